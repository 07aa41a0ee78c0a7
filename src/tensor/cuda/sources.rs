//! The kernel sources of `kernels/`, embedded in the program.

use crate::error::Error;

/// The compiler's options, the same for every kernel: IEEE arithmetic without contraction or approximation.
pub const OPTIONS: &[&str] =
    &["--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"];

/// A kernel source: a file of `kernels/`, or the text that an operator's formula generates.
#[derive(Clone, Copy, Debug)]
pub struct KernelSource {
    /// The file's name without `.cu`, or the formula's name.
    pub name: &'static str,
    /// The text in parts that are concatenated; empty for a file of `kernels/`.
    pub parts: &'static [&'static str],
}

impl KernelSource {
    /// Returns true if both have the same name and text. It compares texts only if they lie at different addresses.
    pub(super) fn is_same(&self, other: &KernelSource) -> bool {
        self.name == other.name && (std::ptr::eq(self.parts, other.parts) || self.parts == other.parts)
    }

    /// Returns the refusal of a source whose name another one has: kernels are kept by name.
    #[cold]
    pub(super) fn refuse_name(&self) -> Error {
        let remedy = "give the source another name";
        Error::invalid("kernel", "another source has this name", self.name, remedy)
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
            return PROGRAMS
                .iter()
                .find(|(file, _)| file.strip_suffix(".cu") == Some(self.name))
                .map(|(_, text)| text.to_string());
        }
        Some(self.parts.concat())
    }
}

/// Names a file of `kernels/`.
impl From<&'static str> for KernelSource {
    fn from(name: &'static str) -> KernelSource {
        KernelSource { name, parts: &[] }
    }
}

macro_rules! embed {
    ($($name:literal)*) => { &[$(($name, include_str!(concat!("../../../kernels/", $name)))),*] };
}

/// Returns the headers, each with the name by which sources include it.
///
/// ```
/// let names: Vec<&str> = isoshard::tensor::cuda::headers().iter().map(|(name, _)| *name).collect();
/// assert!(names.contains(&"iso.cuh"));
/// ```
pub fn headers() -> &'static [(&'static str, &'static str)] {
    HEADERS
}

/// Returns the files of `kernels/` with their text: one per operator with kernels of its own, and some that several
/// operators share. [`ops::cuda_programs`](crate::ops::cuda_programs) has those of formulas as well.
///
/// ```
/// let (name, text) = isoshard::tensor::cuda::programs()[0];
/// assert!(name.ends_with(".cu") && text.contains("KERNEL"));
/// ```
pub fn programs() -> &'static [(&'static str, &'static str)] {
    PROGRAMS
}

const HEADERS: &[(&str, &str)] = embed! {
    "attention.cuh"
    "attention_backward.cuh"
    "attention_fast_backward.cuh"
    "attention_fast_forward.cuh"
    "attention_forward.cuh"
    "attention_tiles.cuh"
    "cast.cuh"
    "cross_entropy.cuh"
    "draws.cuh"
    "flash.cuh"
    "functions.cuh"
    "iso.cuh"
    "math.cuh"
    "matmul.cuh"
    "matmul_panel.cuh"
    "matmul_tile.cuh"
    "mma.cuh"
    "norm.cuh"
    "num.cuh"
    "parameters.cuh"
    "philox.cuh"
    "pointwise.cuh"
    "random.cuh"
    "reduce.cuh"
    "rows.cuh"
    "special_functions.cuh"
    "step.cuh"
};

const PROGRAMS: &[(&str, &str)] = embed! {
    "adamw.cu"
    "argmax.cu"
    "attention_bf16.cu"
    "attention_bias_grad_f32.cu"
    "attention_bias_grad_f64.cu"
    "attention_delta.cu"
    "attention_f16.cu"
    "attention_f32.cu"
    "attention_f64.cu"
    "attention_fast_bf16.cu"
    "attention_fast_f16.cu"
    "attention_grad_bf16.cu"
    "attention_grad_f16.cu"
    "attention_grad_f32.cu"
    "attention_grad_f64.cu"
    "attention_grad_fast_bf16.cu"
    "attention_grad_fast_f16.cu"
    "attention_masked_f32.cu"
    "attention_masked_f64.cu"
    "attention_masked_grad_f32.cu"
    "attention_masked_grad_f64.cu"
    "bernoulli.cu"
    "cast_bf16.cu"
    "cast_bool.cu"
    "cast_f16.cu"
    "cast_f32.cu"
    "cast_f64.cu"
    "cast_i32.cu"
    "cast_i64.cu"
    "cast_u8.cu"
    "compare.cu"
    "copy.cu"
    "create.cu"
    "cross_entropy.cu"
    "cross_entropy_grad.cu"
    "dropout.cu"
    "embedding_grad.cu"
    "expert_slots.cu"
    "exponential.cu"
    "fill.cu"
    "float_test.cu"
    "first_index.cu"
    "flip.cu"
    "fold.cu"
    "gamma.cu"
    "gather.cu"
    "index_rows.cu"
    "inverse_power_of_two.cu"
    "layer_norm.cu"
    "layer_norm_grad.cu"
    "log_softmax.cu"
    "log_softmax_grad.cu"
    "mask.cu"
    "matmul_bf16.cu"
    "matmul_f16.cu"
    "matmul_f32.cu"
    "matmul_f64.cu"
    "max.cu"
    "min.cu"
    "multinomial.cu"
    "poisson.cu"
    "radix.cu"
    "prod.cu"
    "random.cu"
    "rms_norm.cu"
    "rms_norm_grad.cu"
    "rotary.cu"
    "rotary_apply.cu"
    "rotary_table.cu"
    "scatter.cu"
    "select.cu"
    "sgd.cu"
    "shuffle.cu"
    "soft_cross_entropy.cu"
    "soft_cross_entropy_grad.cu"
    "softmax.cu"
    "sort.cu"
    "softmax_grad.cu"
    "sum.cu"
    "sum_exp.cu"
    "terms.cu"
};
