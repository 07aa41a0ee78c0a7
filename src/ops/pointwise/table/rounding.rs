//! Rounding, remainders, and functions of the sign.

use std::sync::Arc;

use crate::error::Result;
use crate::ops::pointwise::flops::operations;
use crate::ops::pointwise::functions::*;
use crate::ops::pointwise::gradient_expr::{GradientExpr, GradientWriter};
use crate::ops::pointwise::record::{Pointwise, dtype_of_formula, floats, numbers as rare_numbers};
use crate::ops::pointwise::row_samples::add_samples;
use crate::ops::pointwise::words::*;
use crate::ops::{Algebra, InputFill, Meta, Op, Sample, Vjp, Windows};
use crate::tensor::cpu::{self, Constants, Function, Loops, Num, NumFunction, Real};
use crate::tensor::{DType, Tensor, cuda};

macro_rules! rounding_table {
    ($then:ident) => { $then! { methods {
        /// Returns the largest integer not above `x`. The gradient is 0.
        Floor floor(x) = floor(x),
            for floats, Monotone "Never decreases.",
            gradient |dy, y| { x => (dy.zero()) },
            samples [] not_smooth [Ints, Positive],
            example [-1.5, 2.5] => [-2.0, 2.0];
        /// Returns the smallest integer not below `x`. The gradient is 0.
        Ceil ceil(x) = ceil(x),
            for floats, Monotone "Never decreases.",
            gradient |dy, y| { x => (dy.zero()) },
            samples [] not_smooth [Ints, Positive],
            example [-1.5, 2.5] => [-1.0, 3.0];
        /// Returns `x` rounded toward 0: the integer part. The gradient is 0.
        Trunc trunc(x) = trunc(x),
            for floats, Monotone "Never decreases.",
            gradient |dy, y| { x => (dy.zero()) },
            samples [] not_smooth [Ints, Positive],
            example [-1.5, 2.5] => [-1.0, 2.0];
        /// Returns the integer nearest to `x`, the even one of two. The gradient is 0.
        Round round(x) = round(x),
            for floats, Monotone "Never decreases.",
            gradient |dy, y| { x => (dy.zero()) },
            samples [] not_smooth [Ints, Positive],
            example [-1.5, 2.5] => [-2.0, 2.0];
        /// Returns the fractional part `x - trunc(x)`, which has the sign of `x`. That of an infinity is NaN. The
        /// gradient is 1.
        Frac frac(x) = x - trunc(x),
            for floats, Opaque "Neither linear nor monotone.",
            gradient |dy, y| { x => (dy) },
            samples [] not_smooth [Positive],
            example [-1.5, 2.25] => [-0.5, 0.25];
        /// Returns the remainder of a division that truncates, `x - y · trunc(x / y)`, exactly. It has the sign of `x`,
        /// as C's `fmod` and Rust's `%`. Divided by 0, a float gives NaN and an integer itself.
        Fmod fmod(x, y) = fmod(x, y),
            for rare_numbers, Opaque "Neither linear nor monotone.",
            gradient |dz, z| { x => (dz), y => (-(dz * ((x - z) / y).round())) },
            samples [] not_smooth [Ints Positive, Positive Ints],
            example [-5.0, 5.5], [3.0, 2.0] => [-2.0, 1.5];
        /// Returns the remainder of a division that rounds down, `x - y · floor(x / y)`. It has the sign of `y`, as
        /// Python's `%`. Divided by 0, a float gives NaN and an integer itself.
        Remainder remainder(x, y) = remainder(x, y),
            for rare_numbers, Opaque "Neither linear nor monotone.",
            gradient |dz, z| { x => (dz), y => (-(dz * x.floor_div(y))) },
            samples [] not_smooth [Ints Positive, Positive Ints],
            example [-5.0, 5.5], [3.0, 2.0] => [1.0, 1.5];
        /// Returns the quotient rounded down, `floor(x / y)` without an error of rounding: Python's `//`. Divided by 0,
        /// a float gives an infinity or NaN, and an integer 0. The gradient is 0.
        FloorDiv floor_div(x, y) = floor_div(x, y),
            for rare_numbers, Opaque "Not linear.",
            gradient |dz, z| { x => (dz.zero()), y => (dz.zero()) },
            samples [] not_smooth [Ints Positive, Positive Ints],
            example [-5.0, 5.5], [3.0, 2.0] => [-2.0, 2.0];
        /// Returns the magnitude of `x` with the sign of `y`, which may be that of a zero.
        Copysign copysign(x, y) = copysign(x, y),
            for floats, Opaque "Neither linear nor monotone.",
            gradient |dz, z| { x => (dz * x.sign() * x.sign().copysign(y)), y => (dz.zero()) },
            samples [] not_smooth [Ints Ints],
            example [1.0, -2.0], [-3.0, 0.5] => [-1.0, 2.0];
        /// Returns the step function: 0 if `x` is negative, 1 if `x` is positive, `y` if `x` is 0. NaN stays NaN. The
        /// gradient of `x` is 0.
        Heaviside heaviside(x, y) = select(x == of(0.0), y, select(x > of(0.0), of(1.0), select(x < of(0.0), of(0.0), x))),
            for floats, Opaque "Not linear.",
            gradient |dz, z| { x => (dz.zero()), y => (x.equals(x.zero()).mask(true, dz)) },
            samples [] not_smooth [Ints Ints],
            example [-3.0, 0.0], [0.5, 0.5] => [0.0, 0.5];
    } derivatives {
        /// The derivative of [`Abs`](crate::ops::Abs): takes `(dy, x)` and returns `dy` with the sign of `x`, and 0 if
        /// `x` is 0 or NaN.
        AbsGrad abs_grad(dy, x) = select(x > of(0.0), dy, select(x < of(0.0), negative(dy), of(0.0))),
            for floats, Linear "Linear in the incoming gradient.",
            gradient |d, dx| { dy => (d.abs_grad(x)), x => (d.zero()) },
            samples [] not_smooth [Ints Ints],
            example [1.0, 2.0], [-3.0, 0.0] => [-1.0, 0.0];
    } } };
}
pub(crate) use rounding_table;

rounding_table!(make_operators);
