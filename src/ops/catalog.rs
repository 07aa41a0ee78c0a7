//! The samples of all operators, which the tests of rows, gradients and equal bits run. Compiled with the feature
//! `testing`.

use std::sync::Arc;

use super::{Op, Sample};

/// Returns all samples of all built-in operators.
///
/// ```
/// let samples = isoshard::ops::catalog();
/// assert!(samples.iter().any(|sample| sample.op.name() == "matmul"));
/// ```
pub fn catalog() -> Vec<Sample> {
    let files: &[fn() -> Vec<Sample>] = &[
        super::step::adamw::samples,
        super::reduce::argmax::samples,
        super::attention::samples,
        super::attention::grad::samples,
        super::attention::bias_grad::samples,
        super::random::bernoulli::samples,
        super::shape::cat::samples,
        super::create::keep_band::samples,
        super::create::one_hot::samples,
        super::cross_entropy::samples,
        super::cross_entropy::grad::samples,
        super::cross_entropy::soft_cross_entropy::samples,
        super::cross_entropy::soft_cross_entropy_grad::samples,
        super::dropout::samples,
        super::index::embedding::samples,
        super::index::embedding_grad::samples,
        super::shape::diagonal::samples,
        super::reduce::expand::samples,
        super::shape::flip::samples,
        super::random::exponential::samples,
        super::random::gamma::samples,
        super::index::gather::samples,
        super::moe::expert_slots::samples,
        super::moe::grouped_matmul::samples,
        super::moe::grouped_matmul_grad::samples,
        super::moe::permute_tokens::samples,
        super::moe::unpermute_tokens::samples,
        super::norm::add_norm::samples,
        super::norm::layer_norm::samples,
        super::norm::layer_norm_grad::samples,
        super::softmax::log_softmax::samples,
        super::softmax::log_softmax_grad::samples,
        super::linear::samples,
        super::matmul::samples,
        super::reduce::first_index::samples,
        super::reduce::inverse_power_of_two::samples,
        super::reduce::max::samples,
        super::reduce::min::samples,
        super::random::multinomial::samples,
        super::shape::pad::samples,
        super::shape::permute::samples,
        super::pointwise::samples,
        super::random::poisson::samples,
        super::shape::reshape::samples,
        super::norm::rms_norm::samples,
        super::norm::rms_norm_grad::samples,
        super::rotary::samples,
        super::rotary::apply::samples,
        super::rotary::table::samples,
        super::index::scatter_add::samples,
        super::index::scatter::samples,
        super::index::last_write::samples,
        super::index::linear_index::samples,
        super::index::bincount::samples,
        super::order::sort::samples,
        super::order::topk::samples,
        super::order::topk_blocks::samples,
        super::step::sgd::samples,
        super::random::shuffle::samples,
        super::shape::slice::samples,
        super::softmax::samples,
        super::softmax::grad::samples,
        super::shape::split::samples,
        super::reduce::prod::samples,
        super::reduce::prod::grad::samples,
        super::reduce::sum::samples,
        super::reduce::terms::samples,
        super::softmax::sum_exp::samples,
    ];
    files.iter().flat_map(|samples| samples()).collect()
}

/// Returns every operator of the table of formulas, several for one with a constant. Used by tests that compare devices.
///
/// ```
/// use isoshard::ops::formulas;
/// assert!(formulas().iter().any(|op| op.name() == "relu"));
/// ```
pub fn formulas() -> Vec<Arc<dyn Op>> {
    super::pointwise::operators()
}
