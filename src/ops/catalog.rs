//! Every operator's samples, for the tests that judge rows, gradients and equivalence.

use super::Sample;

/// All samples of all operators.
pub fn catalog() -> Vec<Sample> {
    let files: &[fn() -> Vec<Sample>] = &[
        super::abs::samples,
        super::add::samples,
        super::cast::samples,
        super::cat::samples,
        super::compare::samples,
        super::div::samples,
        super::exp::samples,
        super::expand::samples,
        super::gelu::samples,
        super::gelu_grad::samples,
        super::log::samples,
        super::mask::samples,
        super::matmul::samples,
        super::maximum::samples,
        super::minimum::samples,
        super::mul::samples,
        super::neg::samples,
        super::pad::samples,
        super::permute::samples,
        super::pow::samples,
        super::pow_grad::samples,
        super::pow_scalar::samples,
        super::relu::samples,
        super::relu_grad::samples,
        super::reshape::samples,
        super::rsqrt::samples,
        super::scale::samples,
        super::select::samples,
        super::shift::samples,
        super::sigmoid::samples,
        super::sigmoid_grad::samples,
        super::sign::samples,
        super::silu::samples,
        super::silu_grad::samples,
        super::slice::samples,
        super::split::samples,
        super::sqrt::samples,
        super::sub::samples,
        super::sum::samples,
        super::tanh::samples,
        super::tanh_grad::samples,
    ];
    files.iter().flat_map(|samples| samples()).collect()
}
