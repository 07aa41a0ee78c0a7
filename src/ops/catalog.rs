//! Every operator's samples, for the tests that judge rows, gradients and equivalence.

use super::{Sample, add, cat, expand, matmul, mul, neg, pad, permute, reshape, scale, slice, sub, sum};

/// All samples of all operators.
pub fn catalog() -> Vec<Sample> {
    let files: &[fn() -> Vec<Sample>] = &[
        add::samples,
        cat::samples,
        expand::samples,
        matmul::samples,
        mul::samples,
        neg::samples,
        pad::samples,
        permute::samples,
        reshape::samples,
        scale::samples,
        slice::samples,
        sub::samples,
        sum::samples,
    ];
    files.iter().flat_map(|samples| samples()).collect()
}
