//! Loops over slices: elementwise formulas, conversions of rows, copies between strided layouts, steps of optimizers.

pub(crate) mod aligned_buffer;
pub(crate) mod cast;
pub(crate) mod copy;
pub(crate) mod formulas;
pub(crate) mod optimizer_steps;
pub(crate) mod rare_operands;
pub(crate) mod streaming;
pub(crate) mod strided_rows;
pub(crate) mod two_passes;
pub(crate) mod wide_functions;

pub use formulas::{FloatLoops, IntegerLoops, LoopFn};
pub use optimizer_steps::{AdamWFactors, AdamWLoop, OptimizerStep, SgdLoop};
