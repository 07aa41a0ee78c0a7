//! Every operator's samples, for the tests that judge rows, gradients and equivalence.

use super::Sample;
use crate::tensor::cuda;

/// All samples of all operators.
pub fn catalog() -> Vec<Sample> {
    let files: &[fn() -> Vec<Sample>] = &[
        super::step::adamw::samples,
        super::reduce::argmax::samples,
        super::attention::samples,
        super::attention::grad::samples,
        super::random::bernoulli::samples,
        super::cat::samples,
        super::cross_entropy::samples,
        super::cross_entropy::grad::samples,
        super::dropout::samples,
        super::index::embedding::samples,
        super::index::embedding_grad::samples,
        super::expand::samples,
        super::random::exponential::samples,
        super::random::gamma::samples,
        super::index::gather::samples,
        super::norm::layer_norm::samples,
        super::norm::layer_norm_grad::samples,
        super::softmax::log_softmax::samples,
        super::softmax::log_softmax_grad::samples,
        super::matmul::samples,
        super::reduce::max::samples,
        super::reduce::min::samples,
        super::random::multinomial::samples,
        super::pad::samples,
        super::permute::samples,
        super::pointwise::samples,
        super::random::poisson::samples,
        super::reshape::samples,
        super::norm::rms_norm::samples,
        super::norm::rms_norm_grad::samples,
        super::rotary::samples,
        super::index::scatter_add::samples,
        super::step::sgd::samples,
        super::random::shuffle::samples,
        super::slice::samples,
        super::softmax::samples,
        super::softmax::grad::samples,
        super::split::samples,
        super::reduce::sum::samples,
        super::softmax::sum_exp::samples,
    ];
    files.iter().flat_map(|samples| samples()).collect()
}

/// Every CUDA source: the files of `kernels/`, and those that formulas give, by file name.
pub fn cuda_programs() -> Vec<(String, String)> {
    let files = cuda::programs().iter().map(|(name, text)| (name.to_string(), text.to_string()));
    let formulas = super::pointwise::cuda_sources().into_iter();
    files.chain(formulas.map(|s| (format!("{}.cu", s.name), s.parts.concat()))).collect()
}
