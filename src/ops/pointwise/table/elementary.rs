//! Powers, exponentials, logarithms and other elementary functions.

use std::sync::Arc;

use crate::error::Result;
use crate::ops::pointwise::flops::operations;
use crate::ops::pointwise::functions::*;
use crate::ops::pointwise::gradient_expr::{GradientExpr, GradientWriter};
use crate::ops::pointwise::record::{Pointwise, dtype_of_formula, floats, floats as short_floats};
use crate::ops::pointwise::row_samples::add_samples;
use crate::ops::pointwise::words::*;
use crate::ops::{Algebra, AxisPlacement, InputFill, Meta, Op, Row, Sample, Vjp, Windows};
use crate::tensor::cpu::{self, Constants, Function, Loops, Real, WideFunction};
use crate::tensor::{DType, ReduceOp, Tensor, cuda};

macro_rules! elementary_table {
    ($then:ident) => { $then! { methods {
        /// Raises `x` to the power `y`, with IEEE 754's special cases: 1 if `y` is 0 or `x` is 1, NaN for a negative
        /// `x` unless `y` is an integer.
        ///
        /// Computed in f64 and rounded once; the error in f64 is below 1 unit in the last place. Two gradients are 0 although the formula gives an infinity or NaN: that of `x` if
        /// `y` is 0, and that of `y` if `x` is 0.
        Pow pow(x, y)
                [a = wide(x), b = wide(y), magnitude = pow_abs(abs(a), b)] = of(power(a, b, magnitude)),
            for short_floats, Opaque "Not linear in either operand.",
            gradient |dz, z| { x => (dz.pow_grad_base(x, y)), y => (dz.pow_grad_exponent(x, z)) },
            samples [Positive Ints, Positive Positive] not_smooth [Ints Ints],
            example [2.0, 9.0], [10.0, 0.5] => "[1024.000, 3.000]";
        /// Returns the exponential `e^x`.
        Exp exp(x) = exp(x),
            for floats, Opaque "Not linear, and the approximation is not proved to be monotone bit for bit.",
            gradient |dy, y| { x => (dy * y) },
            samples [Ints],
            example [0.0, 1.0] => "[1.000, 2.718]";
        /// Returns the natural logarithm.
        Log log(x) = ln(x),
            for floats, Opaque "Not linear, and the approximation is not proved to be monotone bit for bit.",
            gradient |dy, y| { x => (dy / x) },
            samples [Positive],
            example [1.0, 10.0] => "[0.000, 2.303]";
        /// Returns the square root.
        Sqrt sqrt(x) = sqrt(x),
            for floats, Opaque "Not linear. It never decreases, so partial minima are accepted; partial maxima are not, because negative numbers give NaN."
                and |ins| vec![Row::same(AxisPlacement::P(ReduceOp::Min), 1)],
            gradient |dy, y| { x => (dy * 0.5 / y) },
            samples [Positive] not_smooth [Ints],
            example [4.0, 2.25] => [2.0, 1.5];
        /// Returns `1 / √x`.
        Rsqrt rsqrt(x) = recip(sqrt(x)),
            for floats, Opaque "Not linear, and not proved to be monotone bit for bit.",
            gradient |dy, y| { x => (dy * y.pow_scalar(3.0) * -0.5) },
            samples [Positive],
            example [4.0, 0.25] => [0.5, 2.0];
        /// Returns the hyperbolic tangent.
        Tanh tanh(x) = tanh(x),
            for floats, Opaque "Not linear, and the approximation is not proved to be monotone bit for bit.",
            gradient |dy, y| { x => (dy.tanh_grad(y)) },
            samples [Ints],
            example [0.0, 1.0] => "[0.000, 0.762]";
    } derivatives {
        /// The derivative of [`Tanh`]: takes `(dy, y)` with `y = tanh x` and returns `dy · (1 - y²)`.
        TanhGrad tanh_grad(dy, y) = dy * sub(of(1.0), y * y),
            for floats, Linear "Linear in the incoming gradient.",
            gradient |d, dx| { dy => (d.tanh_grad(y)), y => (d * dy * (y * -2.0)) },
            samples [Ints Ints],
            example [1.0, 2.0], [0.5, 0.0] => [0.75, 2.0];
        /// The derivative of [`Pow`] with respect to the base: takes `(dz, x, y)` and returns `dz · y · x^(y - 1)`, and
        /// 0 if `y` is 0. Computed in f64 and rounded once.
        PowGradBase pow_grad_base(dz, x, y)
                [a = wide(x), b = wide(y), c = b - 1.0, magnitude = pow_abs(abs(a), c)] = of(select(b == 0.0, 0.0, wide(dz) * (b * power(a, c, magnitude)))),
            for short_floats, Linear "Linear in the incoming gradient.",
            gradient |d, dx| {
                dz => (d.pow_grad_base(x, y)), x => ((d * dz * y).pow_grad_base(x, y + -1.0)),
                y => ((d * dz * y).pow_grad_exponent(x, x.pow(y + -1.0)) + d * dz * x.pow(y + -1.0)) },
            samples [Ints Positive Positive, Ints Positive Ints] rounded 4,
            example [1.0, 1.0], [3.0, 5.0], [2.0, 0.0] => "[6.000, 0.000]";
        /// The derivative of [`Pow`] with respect to the exponent: takes `(dz, x, z)` with `z = x^y`, and returns
        /// `dz · z · ln x`, and 0 if `x` or `z` is 0.
        PowGradExponent pow_grad_exponent(dz, x, z) = select(x == of(0.0) || z == of(0.0), of(0.0), dz * (z * ln(x))),
            for floats, Linear "Linear in the incoming gradient, and in the power."
                and |ins| vec![Row::new([AxisPlacement::R, AxisPlacement::R, AxisPlacement::SUM], [AxisPlacement::SUM])],
            gradient |d, dy| {
                dz => (d.pow_grad_exponent(x, z)), x => (x.equals(x.zero()).mask(false, d * dz * z / x)),
                z => (x.equals(x.zero()).mask(false, d * dz * x.log())) },
            samples [Ints Positive Positive] rounded 4,
            example [1.0, 1.0], [10.0, 0.0], [100.0, 0.0] => "[230.259, 0.000]";
    } } };
}
pub(crate) use elementary_table;

elementary_table!(make_operators);
