//! Every operator's samples, for the tests that judge rows, gradients and equivalence.

use super::Sample;

/// All samples of all operators.
pub fn catalog() -> Vec<Sample> {
    let files: &[fn() -> Vec<Sample>] = &[];
    files.iter().flat_map(|samples| samples()).collect()
}
