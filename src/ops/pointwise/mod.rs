//! Pointwise operators: element `i` of the result depends only on element `i` of each operand.
//!
//! Most are formulas and are rows of a table, in the folder `table`. Comparisons, selections and casts have files of their own, because
//! their operands and results have different dtypes.

mod cast;
mod compare;
mod float_test;
mod flops;
#[macro_use]
mod formula;
mod clamp;
mod foreach;
mod functions;
mod gradient_expr;
mod mask;
mod pow_scalar;
mod record;
mod row_samples;
mod rows;
mod second_derivatives;
mod select;
mod table;
#[cfg(test)]
mod tests;
mod words;
mod zero_grad;

pub use cast::Cast;
pub use clamp::{Clamp, ClampGrad};
pub use compare::{Compare, CompareKind};
pub use float_test::{FloatTest, FloatTestKind};
pub(crate) use formula::{distribute_example, example_check, signatures, tensor_example};
pub use mask::Mask;
pub use pow_scalar::PowScalar;
pub use record::Pointwise;
pub(crate) use record::floats;
pub use select::Select;
pub use table::*;
pub(crate) use table::{
    activations_table, arithmetic_table, bits_table, elementary_table, logarithmic_table, piecewise_table,
    rounding_table, smooth_activations_table, special_table, trigonometric_table,
};
pub use zero_grad::ZeroGrad;

use std::sync::Arc;

use super::{Op, Sample};
use crate::tensor::cuda::KernelSource;

/// Returns the samples of all pointwise operators.
pub(super) fn samples() -> Vec<Sample> {
    let files = [
        cast::samples(),
        clamp::samples(),
        compare::samples(),
        float_test::samples(),
        mask::samples(),
        pow_scalar::samples(),
        select::samples(),
        zero_grad::samples(),
    ];
    [table::samples(), files.concat()].concat()
}

/// Returns the CUDA sources generated from the table's formulas.
pub(super) fn cuda_sources() -> Vec<KernelSource> {
    [table::cuda_sources(), pow_scalar::SOURCES.to_vec(), clamp::SOURCES.to_vec(), foreach::SOURCES.to_vec()]
        .concat()
}

/// Returns every operator of the table, several for one with a constant.
pub(super) fn operators() -> Vec<Arc<dyn Op>> {
    [table::operators(), pow_scalar::operators(), clamp::operators()].concat()
}
