//! Operations on the bits of integers, and on bools.

use std::sync::Arc;

use crate::error::Result;
use crate::ops::pointwise::flops::operations;
use crate::ops::pointwise::functions::*;
use crate::ops::pointwise::gradient_expr::{GradientExpr, GradientWriter};
use crate::ops::pointwise::record::{Pointwise, bits, dtype_of_formula, integers};
use crate::ops::pointwise::row_samples::add_samples;
use crate::ops::pointwise::rows::{lattice_rows, monotone_in_first_rows, negated_rows};
use crate::ops::pointwise::words::*;
use crate::ops::{Algebra, AxisPlacement, InputFill, Meta, Op, Row, Sample, Vjp, Windows};
use crate::tensor::cpu::{self, BitFunction, BitNum, Loops};
use crate::tensor::{DType, ReduceOp, Tensor, cuda};

macro_rules! bits_table {
    ($then:ident) => { $then! { methods {
        /// Returns the bits that both integers have; for bools, true if both are.
        BitwiseAnd bitwise_and(x, y) = bit_and(x, y),
            for bits, Opaque "For bools, the minimum: partial maxima (any) and minima (every) are accepted."
                and |ins| lattice_of_bools(ins, [ReduceOp::Min, ReduceOp::Max]),
            gradient |dz, z| { x => "integers and bools have no derivative", y => "integers and bools have no derivative" },
            samples [],
            example [6, 12], [3, 10] => [2.0, 8.0];
        /// Returns the bits that one or both integers have; for bools, true if one or both are.
        BitwiseOr bitwise_or(x, y) = bit_or(x, y),
            for bits, Opaque "For bools, the maximum: partial maxima (any) and minima (every) are accepted."
                and |ins| lattice_of_bools(ins, [ReduceOp::Max, ReduceOp::Min]),
            gradient |dz, z| { x => "integers and bools have no derivative", y => "integers and bools have no derivative" },
            samples [],
            example [6, 12], [3, 10] => [7.0, 14.0];
        /// Returns the bits that exactly one integer has; for bools, true if they differ.
        BitwiseXor bitwise_xor(x, y) = bit_xor(x, y),
            for bits, Opaque "Neither linear nor monotone.",
            gradient |dz, z| { x => "integers and bools have no derivative", y => "integers and bools have no derivative" },
            samples [],
            example [6, 12], [3, 10] => [5.0, 6.0];
        /// Returns the bits that an integer does not have; for bools, the opposite.
        BitwiseNot bitwise_not(x) = bit_not(x),
            for bits, Opaque "Reverses the order of integers and bools, so a partial maximum becomes a partial minimum."
                and |ins| negated_rows(true),
            gradient |dy, y| { x => "integers and bools have no derivative" },
            samples [],
            example [6, -1] => [-7.0, 0.0];
        /// Moves the bits of `x` up by `y` places, which multiplies by `2^y` and wraps. If `y` is negative or at least the
        /// number of bits, the result is 0.
        ShiftLeft shift_left(x, y) = shift_left(x, y),
            for integers, Opaque "A product with a power of two: partial sums are accepted if the number of places is replicated."
                and |ins| vec![Row::new([AxisPlacement::SUM, AxisPlacement::R], [AxisPlacement::SUM]).exact()],
            gradient |dz, z| { x => "integers have no derivative", y => "integers have no derivative" },
            samples [],
            example [3, -1], [2, 4] => [12.0, -16.0];
        /// Moves the bits of `x` down by `y` places and keeps the sign, which divides by `2^y` and rounds down. If `y` is
        /// negative or at least the number of bits, the result is -1 for a negative `x` and 0 for others.
        ShiftRight shift_right(x, y) = shift_right(x, y),
            for integers, Opaque "Never decreases in `x`: partial maxima and minima are accepted if the number of places is replicated."
                and |ins| monotone_in_first_rows(),
            gradient |dz, z| { x => "integers have no derivative", y => "integers have no derivative" },
            samples [],
            example [13, -16], [2, 3] => [3.0, -2.0];
    } derivatives {
    } } };
}
pub(crate) use bits_table;

bits_table!(make_operators);

/// Returns the rows of the maximum or minimum, `join`, for bools, and none for integers.
fn lattice_of_bools(ins: &[Meta], [join, meet]: [ReduceOp; 2]) -> Vec<Row> {
    if ins[0].dtype == DType::Bool { lattice_rows(join, meet) } else { vec![] }
}
