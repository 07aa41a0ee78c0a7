//! Optimizer steps, which update a parameter in place. One CUDA launch updates many parameters.

mod adamw;
mod cuda;
mod operands;
mod param_loop;
mod sgd;

pub use adamw::AdamWStep;
pub use operands::{expect_step, step_rows};
pub use param_loop::each_chunk;
pub use sgd::SgdStep;

use super::Sample;

/// Returns the samples of the family's operators.
pub(super) fn samples() -> Vec<Sample> {
    [adamw::samples(), sgd::samples()].concat()
}
