//! The CUDA sources, embedded in the program.

mod variants;

use std::sync::LazyLock;

use variants::ATTENTION;

/// The compiler's options, the same for every kernel: IEEE arithmetic without contraction or approximation.
pub const OPTIONS: &[&str] =
    &["--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"];

/// Returns the headers, each with the name by which sources include it.
///
/// ```
/// let names: Vec<&str> = isoshard_kernels::cuda::headers().iter().map(|(name, _)| *name).collect();
/// assert!(names.contains(&"iso.cuh"));
/// ```
pub fn headers() -> &'static [(&'static str, &'static str)] {
    HEADERS
}

/// Returns the sources of `kernels/cuda` with their text: one per operator with kernels of its own, and some that several
/// operators share. A file that is compiled for one dtype at a time is there once per dtype, as `<file>_<dtype>.cu`, with
/// the dtypes' lists before its text. Attention has a source for each variant.
///
/// ```
/// let (name, text) = isoshard_kernels::cuda::programs()[0];
/// assert!(name.ends_with(".cu") && text.contains("KERNEL"));
/// ```
pub fn programs() -> &'static [(&'static str, &'static str)] {
    static ALL: LazyLock<Vec<(&str, &str)>> = LazyLock::new(|| {
        let whole = FILES.iter().copied().filter(|(_, text)| dtypes(text).is_none());
        let by_dtype = FILES.iter().filter_map(|&(name, text)| Some((name, dtypes(text)?, text)));
        let variants = by_dtype.flat_map(|(name, dtypes, text)| dtypes.map(move |d| variant(name, d, text)));
        whole.chain(variants).chain(ATTENTION.concat()).collect()
    });
    &ALL
}

/// Returns true if a file has all its dtypes' entries, which are compiled at once.
pub fn is_whole(name: &str) -> bool {
    FILES.iter().any(|(file, text)| file.strip_suffix(".cu") == Some(name) && dtypes(text).is_none())
}

// `HEADERS` and `FILES`, each with the names and texts of the files in `cuda/`.
include!(concat!(env!("OUT_DIR"), "/sources.rs"));

/// The dtypes that the lists of `iso.cuh` have.
const LISTS: [(&str, &[&str]); 5] = [
    ("FLOATS", &["f64", "f32", "f16", "bf16"]),
    ("UP_TO_F32", &["f32", "f16", "bf16"]),
    ("HALVES", &["f16", "bf16"]),
    ("INTEGERS", &["i64", "i32", "u8"]),
    ("SMALL_TYPES", &["i32", "u8", "bool"]),
];

/// Returns the dtypes for which a file is compiled one at a time, or `None` if it is compiled for all at once. Its
/// opening comment says so.
fn dtypes(text: &'static str) -> Option<impl Iterator<Item = &'static str>> {
    let listed = text.lines().find_map(|line| line.strip_prefix("// One dtype at a time: "))?;
    Some(listed.trim_end_matches('.').split(", "))
}

/// Returns the variant of a file for a dtype: the lists with that dtype alone, then the text. It stays until the process
/// ends, like the other sources.
fn variant(name: &str, dtype: &str, text: &str) -> (&'static str, &'static str) {
    let file = format!("{}_{dtype}.cu", name.trim_end_matches(".cu"));
    let entry = |all: &[&str]| if all.contains(&dtype) { format!("X({dtype})") } else { String::new() };
    let lists = LISTS.map(|(list, all)| format!("#define {list}(X) {}\n", entry(all))).concat();
    (file.leak(), (lists + text).leak())
}
