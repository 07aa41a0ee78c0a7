//! Pointwise operators: element `i` of the result depends on element `i` of each operand.
//!
//! Most are formulas, a row of `table.rs` each. Comparisons, choices and casts, whose operands or results have other dtypes
//! than what is computed, have files of their own.

mod cast;
mod compare;
mod count;
#[macro_use]
mod formula;
mod functions;
mod mask;
mod record;
mod rows;
mod second;
mod select;
mod table;
mod term;
#[cfg(test)]
mod tests;
mod words;

pub use cast::Cast;
pub use compare::{Compare, CompareKind};
pub(crate) use formula::signatures;
pub use mask::Mask;
pub use record::Pointwise;
pub(crate) use record::floats;
pub use select::Select;
pub(crate) use table::pointwise_table;
pub use table::*;

use std::sync::Arc;

use super::{Op, Sample};
use crate::tensor::cuda::KernelSource;

/// The samples of all pointwise operators.
pub(super) fn samples() -> Vec<Sample> {
    [table::samples(), cast::samples(), compare::samples(), mask::samples(), select::samples()].concat()
}

/// The CUDA sources that the table's formulas give.
pub(super) fn cuda_sources() -> Vec<KernelSource> {
    table::cuda_sources()
}

/// Every operator that is a formula of floating numbers or of any; of one with a constant, several. For tests that compare
/// devices.
pub fn formulas() -> Vec<Arc<dyn Op>> {
    table::operators()
}
