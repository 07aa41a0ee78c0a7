//! The kernel sources of `kernels/cuda/`, embedded in the program.

#[doc(inline)]
pub use isoshard_kernels::cuda::{OPTIONS, headers, programs};

use crate::error::Error;
use crate::tensor::DType;

/// A kernel source: a file of `kernels/cuda/`, or the text that an operator's formula generates.
#[derive(Clone, Copy, Debug)]
pub struct KernelSource {
    /// The name of a file or variant in [`programs`] without `.cu`, or the formula's name.
    pub name: &'static str,
    /// The text in parts that are concatenated; empty for a file of `kernels/cuda/` and its variants.
    pub parts: &'static [&'static str],
}

impl KernelSource {
    /// Returns true if both have the same name and text. It compares texts only if they lie at different addresses.
    pub(in crate::tensor) fn is_same(&self, other: &KernelSource) -> bool {
        self.name == other.name && (std::ptr::eq(self.parts, other.parts) || self.parts == other.parts)
    }

    /// Returns the refusal of a source whose name another one has: kernels are kept by name.
    #[cold]
    pub(in crate::tensor) fn refuse_name(&self) -> Error {
        let remedy = "give the source another name";
        Error::invalid("kernel", "another source has this name", self.name, remedy)
    }

    /// Returns the source that has the entries of `dtype`: this one, or its variant for the dtype if it is compiled for
    /// one dtype at a time.
    pub(in crate::tensor) fn of_dtype(self, dtype: DType) -> KernelSource {
        let of_dtype = |file: &'static str| {
            let rest = file.strip_prefix(self.name)?.strip_prefix('_')?;
            (rest.strip_suffix(".cu") == Some(dtype.name()))
                .then(|| KernelSource::from(&file[..file.len() - 3]))
        };
        let is_whole = !self.parts.is_empty() || isoshard_kernels::cuda::is_whole(self.name);
        if is_whole { self } else { programs().iter().find_map(|(file, _)| of_dtype(file)).unwrap_or(self) }
    }

    /// Returns the whole text, or `None` if there is no such file.
    ///
    /// ```
    /// use isoshard::tensor::cuda::KernelSource;
    ///
    /// assert!(KernelSource::from("fill").text().unwrap().contains("fill_"));
    /// assert_eq!(KernelSource::from("no_such_file").text(), None);
    /// ```
    pub fn text(&self) -> Option<String> {
        if self.parts.is_empty() {
            return programs()
                .iter()
                .find(|(file, _)| file.strip_suffix(".cu") == Some(self.name))
                .map(|(_, text)| text.to_string());
        }
        Some(self.parts.concat())
    }
}

/// Names a file of `kernels/cuda/`, or a variant of one: a file that is compiled for one dtype at a time has a variant
/// `<file>_<dtype>` for each.
impl From<&'static str> for KernelSource {
    fn from(name: &'static str) -> KernelSource {
        KernelSource { name, parts: &[] }
    }
}
