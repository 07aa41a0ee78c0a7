//! The CUDA sources of all operators.

use crate::tensor::cuda;

/// Returns all CUDA sources as pairs of file name and text: the files of `kernels/cuda/`, and the sources generated from
/// formulas.
///
/// ```
/// let programs = isoshard::ops::cuda_programs();
/// assert!(programs.iter().any(|(name, text)| name == "relu.cu" && text.contains("max(of(0.0), x)")));
/// ```
pub fn cuda_programs() -> Vec<(String, String)> {
    let files = cuda::programs().iter().map(|(name, text)| (name.to_string(), text.to_string()));
    let formulas = super::pointwise::cuda_sources().into_iter();
    files.chain(formulas.map(|s| (format!("{}.cu", s.name), s.parts.concat()))).collect()
}
