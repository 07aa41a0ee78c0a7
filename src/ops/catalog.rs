//! Every operator's samples, for the tests that judge rows, gradients and equivalence.

use super::Sample;
use crate::tensor::cuda;

/// All samples of all operators.
pub fn catalog() -> Vec<Sample> {
    let files: &[fn() -> Vec<Sample>] = &[
        super::adamw::samples,
        super::argmax::samples,
        super::attention::samples,
        super::attention_grad::samples,
        super::bernoulli::samples,
        super::cat::samples,
        super::cross_entropy::samples,
        super::cross_entropy_grad::samples,
        super::dropout::samples,
        super::embedding::samples,
        super::embedding_grad::samples,
        super::expand::samples,
        super::exponential::samples,
        super::gamma::samples,
        super::gather::samples,
        super::layer_norm::samples,
        super::layer_norm_grad::samples,
        super::log_softmax::samples,
        super::log_softmax_grad::samples,
        super::matmul::samples,
        super::max::samples,
        super::min::samples,
        super::multinomial::samples,
        super::pad::samples,
        super::permute::samples,
        super::pointwise::samples,
        super::poisson::samples,
        super::reshape::samples,
        super::rms_norm::samples,
        super::rms_norm_grad::samples,
        super::rotary::samples,
        super::scatter_add::samples,
        super::sgd::samples,
        super::shuffle::samples,
        super::slice::samples,
        super::softmax::samples,
        super::softmax_grad::samples,
        super::split::samples,
        super::sum::samples,
        super::sum_exp::samples,
    ];
    files.iter().flat_map(|samples| samples()).collect()
}

/// Every CUDA source: the files of `kernels/`, and those that formulas give, by file name.
pub fn cuda_programs() -> Vec<(String, String)> {
    let files = cuda::programs().iter().map(|(name, text)| (name.to_string(), text.to_string()));
    let formulas = super::pointwise::cuda_sources().into_iter();
    files.chain(formulas.map(|s| (format!("{}.cu", s.name), s.parts.concat()))).collect()
}
