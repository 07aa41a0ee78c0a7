//! Arithmetic, with other tensors or with numbers.

use std::sync::Arc;

use crate::error::Result;
use crate::ops::pointwise::flops::operations;
use crate::ops::pointwise::functions::*;
use crate::ops::pointwise::gradient_expr::{GradientExpr, GradientWriter};
use crate::ops::pointwise::record::{Pointwise, dtype_of_formula, floats, numbers};
use crate::ops::pointwise::row_samples::add_samples;
use crate::ops::pointwise::rows::{add_scalar_rows, lattice_rows, mul_scalar_rows, negated_rows};
use crate::ops::pointwise::words::*;
use crate::ops::{Algebra, Bits, InputFill, Meta, Op, Row, Sample, Vjp, Windows};
use crate::tensor::cpu::{self, Constants, Function, Loops, Num, NumFunction, Real};
use crate::tensor::{DType, ReduceOp, Tensor, cuda};

macro_rules! arithmetic_table {
    ($then:ident) => { $then! { methods {
        /// Adds two tensors. Integers wrap.
        Add add(x, y) = add(x, y),
            for numbers, Additive "Two partial sums may be added per rank. A partial and a replicated operand may not: every rank would add the latter.",
            gradient |dz, z| { x => (dz), y => (dz) },
            samples [Ints Ints],
            example [1.0, 2.0], [10.0, 20.0] => [11.0, 22.0];
        /// Subtracts `y` from `x`. Integers wrap.
        Sub sub(x, y) = sub(x, y),
            for numbers, Additive "Two partial sums may be subtracted per rank.",
            gradient |dz, z| { x => (dz), y => (-dz) },
            samples [Ints Ints],
            example [1.0, 2.0], [10.0, 0.5] => [-9.0, 1.5];
        /// Multiplies two tensors, element by element. Integers wrap.
        Mul mul(x, y) = mul(x, y),
            for numbers, Multilinear "Linear in each factor.",
            gradient |dz, z| { x => (dz * y), y => (dz * x) },
            samples [Ints Ints],
            example [1.5, -2.0], [4.0, 3.0] => [6.0, -6.0];
        /// Divides `x` by `y`.
        Div div(x, y) = x / y,
            for floats, Linear "Linear in the dividend.",
            gradient |dz, z| { x => (dz / y), y => (-(dz * z / y)) },
            samples [Ints Positive, Positive Positive] rounded 4,
            example [1.0, -3.0], [4.0, 2.0] => [0.25, -1.5];
        /// Returns the larger of `x` and `y`. -0 is less than 0. The result is one fixed NaN if either operand is NaN
        /// (IEEE 754-2019's `maximum`).
        ///
        /// The gradient goes to the larger operand, and to `x` if both are equal (or zeros of different sign). If the
        /// result is NaN, it goes to both.
        Maximum maximum(x, y) = max(x, y),
            for numbers, Opaque "Partial sums are reduced first; partial maxima and minima are accepted." and |ins| lattice_rows(ReduceOp::Max, ReduceOp::Min),
            gradient |dz, z| { x => (x.lt(y).mask(false, dz)), y => (x.ge(y).mask(false, dz)) },
            samples [] not_smooth [Ints Ints],
            example [1.0, -2.0], [0.5, 3.0] => [1.0, 3.0];
        /// Returns the smaller of `x` and `y`. -0 is less than 0. The result is one fixed NaN if either operand is NaN
        /// (IEEE 754-2019's `minimum`).
        ///
        /// The gradient goes to the smaller operand, and to `x` if both are equal (or zeros of different sign). If the
        /// result is NaN, it goes to both.
        Minimum minimum(x, y) = min(x, y),
            for numbers, Opaque "Partial sums are reduced first; partial maxima and minima are accepted." and |ins| lattice_rows(ReduceOp::Min, ReduceOp::Max),
            gradient |dz, z| { x => (x.gt(y).mask(false, dz)), y => (x.le(y).mask(false, dz)) },
            samples [] not_smooth [Ints Ints],
            example [1.0, -2.0], [0.5, 3.0] => [0.5, -2.0];
        /// Changes the sign of `x`. Integers wrap.
        Neg neg(x) = negative(x),
            for numbers, Additive "Linear, but not bit for bit: `-(1 - 1)` is -0, `-1 + 1` is +0."
                and |ins| negated_rows(ins[0].dtype.is_float()),
            gradient |dy, y| { x => (-dy) },
            samples [Ints],
            example [1.0, -2.0] => [-1.0, 2.0];
        /// Returns the absolute value `|x|`; that of the lowest integer wraps to itself. The gradient is 0 at zeros and
        /// at NaN.
        Abs abs(x) = abs(x),
            for numbers, Opaque "Neither linear nor monotone.",
            gradient |dy, y| { x => (dy.abs_grad(x)) },
            samples [] not_smooth [Ints],
            example [1.0, -2.0] => [1.0, 2.0];
        /// Returns the sign of `x`: 1 or -1. Zeros keep their sign, and NaN stays NaN. The gradient is 0.
        Sign sign(x) = select(x > of(0.0), of(1.0), select(x < of(0.0), of(-1.0), x)),
            for numbers, Monotone "Never decreases.",
            gradient |dy, y| { x => (dy.zero()) },
            samples [] not_smooth [Ints],
            example [-3.0, 0.5] => [-1.0, 1.0];
        /// Multiplies every element by a number. The number is first rounded to the dtype of the computation: the
        /// tensor's dtype, or f32 for f16 and bf16. Integers take whole numbers, and wrap.
        MulScalar mul_scalar(x; factor) = mul(x, of(factor)),
            for numbers, Linear "Linear." and |ins, factor| mul_scalar_rows(ins, factor),
            gradient |dy, y| { x => (dy * factor) },
            samples [Ints],
            example [1.0, -2.0]; 2.5 => [2.5, -5.0];
        /// Adds a number to every element. The number is first rounded to the dtype of the computation: the tensor's
        /// dtype, or f32 for f16 and bf16. A partial sum is reduced first, so that the number is added once and not
        /// once per rank. Integers take whole numbers, and wrap.
        AddScalar add_scalar(x; by) = add(x, of(by)),
            for numbers, Opaque "Partial sums are reduced first: every rank would add the number." and |ins, by| add_scalar_rows(ins, by),
            gradient |dy, y| { x => (dy) },
            samples [Ints],
            example [1.0, -2.0]; 2.5 => [3.5, 0.5];
    } derivatives {
    } } };
}
pub(crate) use arithmetic_table;

arithmetic_table!(make_operators);
