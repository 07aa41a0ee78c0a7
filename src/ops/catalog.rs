//! Every operator's samples, for the tests that judge rows, gradients and equivalence.

use super::{
    Sample, abs, add, cast, cat, compare, div, exp, expand, gelu, gelu_grad, log, mask, matmul, maximum,
    minimum, mul, neg, pad, permute, pow, pow_grad, pow_scalar, relu, relu_grad, reshape, rsqrt, scale,
    select, shift, sigmoid, sigmoid_grad, sign, silu, silu_grad, slice, sqrt, sub, sum, tanh, tanh_grad,
};

/// All samples of all operators.
pub fn catalog() -> Vec<Sample> {
    let files: &[fn() -> Vec<Sample>] = &[
        abs::samples,
        add::samples,
        cast::samples,
        cat::samples,
        compare::samples,
        div::samples,
        exp::samples,
        expand::samples,
        gelu::samples,
        gelu_grad::samples,
        log::samples,
        mask::samples,
        matmul::samples,
        maximum::samples,
        minimum::samples,
        mul::samples,
        neg::samples,
        pad::samples,
        permute::samples,
        pow::samples,
        pow_grad::samples,
        pow_scalar::samples,
        relu::samples,
        relu_grad::samples,
        reshape::samples,
        rsqrt::samples,
        scale::samples,
        select::samples,
        shift::samples,
        sigmoid::samples,
        sigmoid_grad::samples,
        sign::samples,
        silu::samples,
        silu_grad::samples,
        slice::samples,
        sqrt::samples,
        sub::samples,
        sum::samples,
        tanh::samples,
        tanh_grad::samples,
    ];
    files.iter().flat_map(|samples| samples()).collect()
}
