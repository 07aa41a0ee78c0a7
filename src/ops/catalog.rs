//! Every operator's samples, for the tests that judge rows, gradients and equivalence.

use super::{Sample, cat, expand, matmul, pad, permute, reshape, slice, split, sum};

/// All samples of all operators.
pub fn catalog() -> Vec<Sample> {
    let files: &[fn() -> Vec<Sample>] = &[
        cat::samples,
        expand::samples,
        matmul::samples,
        pad::samples,
        permute::samples,
        reshape::samples,
        slice::samples,
        split::samples,
        sum::samples,
    ];
    files.iter().flat_map(|samples| samples()).collect()
}
