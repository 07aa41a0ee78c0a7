//! The table of pointwise operators that are formulas, one row per operator, in a file per subject.
//!
//! A row has these parts:
//!
//! ```text
//! /// The documentation of the type and of the method.
//! Type method(operands; constant) [name = expression] = formula,     the source of the CPU loops and of the CUDA kernel
//!     for floats | numbers | integers | bits, Algebra "why" and |ins| further rows,    dtypes; the rows of partial operands
//!     gradient |of the result, the result| { operand => (expression), operand => "why there is none" },
//!     samples [values of each operand, ...] rounded n not_smooth [...],   `not_smooth`: not for finite differences
//!     example [first operand], [second operand]; constant => [result] | "result to three digits";
//! ```
//!
//! The class `wide_floats` computes in f64 for every dtype and rounds once; so does `short_floats`, which calls the words of
//! `words::short` for dtypes below f64. The class `rare_floats` calls the words of
//! `words::far` if those of `words::near` return NaN. The class `far_floats` does both. The class
//! `rare_numbers` is `rare_floats` with integers. In the class `two_pass_floats` loops for f32 compute the second local name
//! in a pass of its own.
//!
//! Macros generate from it the record, the loops, the kernels, the samples, and the methods of
//! [`DTensor`](crate::dtensor::DTensor) and [`GradientExpr`]. Rows after `derivatives` have no method of `DTensor`.

mod activations;
mod arithmetic;
mod bits;
mod elementary;
mod logarithmic;
mod piecewise;
mod rounding;
mod smooth_activations;
mod special;
mod trigonometric;

pub(crate) use activations::activations_table;
pub use activations::*;
pub(crate) use arithmetic::arithmetic_table;
pub use arithmetic::*;
pub(crate) use bits::bits_table;
pub use bits::*;
pub(crate) use elementary::elementary_table;
pub use elementary::*;
pub(crate) use logarithmic::logarithmic_table;
pub use logarithmic::*;
pub(crate) use piecewise::piecewise_table;
pub use piecewise::*;
pub(crate) use rounding::rounding_table;
pub use rounding::*;
pub(crate) use smooth_activations::smooth_activations_table;
pub use smooth_activations::*;
pub(crate) use special::special_table;
pub use special::*;
pub(crate) use trigonometric::trigonometric_table;
pub use trigonometric::*;

use std::sync::Arc;

use crate::ops::{Op, Sample};
use crate::tensor::cuda::KernelSource;

/// Returns the samples of all rows.
pub(super) fn samples() -> Vec<Sample> {
    [
        arithmetic::row_samples(),
        elementary::row_samples(),
        activations::row_samples(),
        bits::row_samples(),
        piecewise::row_samples(),
        rounding::row_samples(),
        logarithmic::row_samples(),
        smooth_activations::row_samples(),
        special::row_samples(),
        trigonometric::row_samples(),
    ]
    .concat()
}

/// Returns the operators of all rows.
pub(super) fn operators() -> Vec<Arc<dyn Op>> {
    [
        arithmetic::row_operators(),
        elementary::row_operators(),
        activations::row_operators(),
        bits::row_operators(),
        piecewise::row_operators(),
        rounding::row_operators(),
        logarithmic::row_operators(),
        smooth_activations::row_operators(),
        special::row_operators(),
        trigonometric::row_operators(),
    ]
    .concat()
}

/// Returns the CUDA sources of all rows.
pub(super) fn cuda_sources() -> Vec<KernelSource> {
    [
        arithmetic::ROW_SOURCES,
        elementary::ROW_SOURCES,
        activations::ROW_SOURCES,
        bits::ROW_SOURCES,
        piecewise::ROW_SOURCES,
        rounding::ROW_SOURCES,
        logarithmic::ROW_SOURCES,
        smooth_activations::ROW_SOURCES,
        special::ROW_SOURCES,
        trigonometric::ROW_SOURCES,
    ]
    .concat()
}
