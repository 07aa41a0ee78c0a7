//! Every operator's samples, for the tests that judge rows, gradients and equivalence.

use super::{Sample, adamw, add, argmax, cat, cross_entropy, cross_entropy_grad, dropout, embedding, embedding_grad, expand, gather, matmul, mul, neg, pad, permute, reshape, scale, scatter_add, sgd, slice, sub, sum, sum_exp};

/// All samples of all operators.
pub fn catalog() -> Vec<Sample> {
    let files: &[fn() -> Vec<Sample>] = &[
        adamw::samples,
        add::samples,
        argmax::samples,
        cat::samples,
        cross_entropy::samples,
        cross_entropy_grad::samples,
        dropout::samples,
        embedding::samples,
        embedding_grad::samples,
        expand::samples,
        gather::samples,
        matmul::samples,
        mul::samples,
        neg::samples,
        pad::samples,
        permute::samples,
        reshape::samples,
        scale::samples,
        scatter_add::samples,
        sgd::samples,
        slice::samples,
        sub::samples,
        sum::samples,
        sum_exp::samples,
    ];
    files.iter().flat_map(|samples| samples()).collect()
}
