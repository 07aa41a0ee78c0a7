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
    let families: &[fn() -> Vec<Sample>] = &[
        super::attention::samples,
        super::create::samples,
        super::cross_entropy::samples,
        super::dropout::samples,
        super::index::samples,
        super::moe::samples,
        super::norm::samples,
        super::order::samples,
        super::pointwise::samples,
        super::prod::samples,
        super::product::samples,
        super::random::samples,
        super::reduce::samples,
        super::rotary::samples,
        super::shape::samples,
        super::softmax::samples,
        super::step::samples,
    ];
    families.iter().flat_map(|samples| samples()).collect()
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
