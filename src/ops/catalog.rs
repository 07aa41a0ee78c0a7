//! Every operator's samples, for the tests that judge rows, gradients and equivalence.

use super::Sample;

/// All samples of all operators.
pub fn catalog() -> Vec<Sample> {
    let files: &[fn() -> Vec<Sample>] = &[
        super::add::samples,
        super::cat::samples,
        super::expand::samples,
        super::matmul::samples,
        super::mul::samples,
        super::neg::samples,
        super::pad::samples,
        super::permute::samples,
        super::reshape::samples,
        super::scale::samples,
        super::slice::samples,
        super::split::samples,
        super::sub::samples,
        super::sum::samples,
    ];
    files.iter().flat_map(|samples| samples()).collect()
}
