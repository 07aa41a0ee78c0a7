//! Exponentials and logarithms to other bases, and functions of logarithms.

use std::sync::Arc;

use crate::error::Result;
use crate::ops::pointwise::flops::operations;
use crate::ops::pointwise::functions::*;
use crate::ops::pointwise::gradient_expr::{GradientExpr, GradientWriter};
use crate::ops::pointwise::record::{
    Pointwise, dtype_of_formula, floats, floats as short_floats, floats as wide_floats,
};
use crate::ops::pointwise::row_samples::add_samples;
use crate::ops::pointwise::words::*;
use crate::ops::{Algebra, InputFill, Meta, Op, Sample, Vjp, Windows};
use crate::tensor::cpu::{self, Constants, Function, Loops, Real, WideFunction};
use crate::tensor::{DType, Tensor, cuda};

macro_rules! logarithmic_table {
    ($then:ident) => { $then! { methods {
        /// Returns 2 to the power of `x`. Integers give exact powers.
        Exp2 exp2(x) = exp2(x),
            for floats, Opaque "Not linear, and the approximation is not proved to be monotone bit for bit.",
            gradient |dy, y| { x => (dy * y * std::f64::consts::LN_2) },
            samples [Ints],
            example [3.0, 0.5] => "[8.000, 1.414]";
        /// Returns `e^x - 1` without cancellation near 0.
        Expm1 expm1(x) = expm1(x),
            for floats, Opaque "Not linear, and the approximation is not proved to be monotone bit for bit.",
            gradient |dy, y| { x => (dy * (y + 1.0)) },
            samples [Ints],
            example [1e-9, 1.0] => "[0.000, 1.718]";
        /// Returns `ln(1 + x)` without cancellation near 0: `-inf` at -1, NaN below.
        Log1p log1p(x) = log1p(x),
            for floats, Opaque "Not linear, and the approximation is not proved to be monotone bit for bit.",
            gradient |dy, y| { x => (dy / (x + 1.0)) },
            samples [Positive],
            example [1e-9, 1.0] => "[0.000, 0.693]";
        /// Returns the logarithm to base 2. Powers of 2 give exact integers.
        Log2 log2(x) = log2(x),
            for floats, Opaque "Not linear, and the approximation is not proved to be monotone bit for bit.",
            gradient |dy, y| { x => (dy / x * std::f64::consts::LOG2_E) },
            samples [Positive],
            example [8.0, 0.5] => [3.0, -1.0];
        /// Returns the logarithm to base 10.
        Log10 log10(x) = log10(x),
            for floats, Opaque "Not linear, and the approximation is not proved to be monotone bit for bit.",
            gradient |dy, y| { x => (dy / x * std::f64::consts::LOG10_E) },
            samples [Positive],
            example [1000.0, 0.1] => [3.0, -1.0];
        /// Returns the cube root, which has the sign of `x`.
        ///
        /// Computed in f64 and rounded once.
        Cbrt cbrt(x) = of(cbrt(wide(x))),
            for wide_floats, Opaque "Not linear, and the approximation is not proved to be monotone bit for bit.",
            gradient |dy, y| { x => (dy / (y * y * 3.0)) },
            samples [Positive],
            example [-27.0, 8.0] => [-3.0, 2.0];
        /// Returns `x ln y`: 0 if `x` is 0, whatever number `y` is. If `x` is 0 and `y` at most 0, both gradients are 0.
        Xlogy xlogy(x, y)
                = select(x == of(0.0) && !is_nan(y), of(0.0), x * ln(y)),
            for floats, Opaque "Linear in `x`, except at 0 times an infinite logarithm.",
            gradient |dz, z| {
                x => (x.equals(x.zero()).bitwise_and(y.le(y.zero())).mask(false, dz.xlogy(y))),
                y => (x.equals(x.zero()).bitwise_and(y.equals(y.zero())).mask(false, dz * x / y)) },
            samples [Positive Positive],
            example [2.0, 0.0], [1.0, 0.0] => [0.0, 0.0];
        /// Returns `x ln(1 + y)`: 0 if `x` is 0, whatever number `y` is. If `x` is 0 and `y` at most -1, both gradients are
        /// 0.
        ///
        /// Computed in f64 and rounded once.
        Xlog1py xlog1py(x, y)
                [a = wide(x), b = wide(y)] = of(select(a == 0.0 && !is_nan(b), 0.0, a * log1p(b))),
            for wide_floats, Opaque "Linear in `x`, except at 0 times an infinite logarithm.",
            gradient |dz, z| {
                x => (x.equals(x.zero()).bitwise_and((y + 1.0).le(y.zero())).mask(false, dz.xlog1py(y))),
                y => (x.equals(x.zero()).bitwise_and((y + 1.0).equals(y.zero())).mask(false, dz * x / (y + 1.0))) },
            samples [Positive Positive],
            example [2.0, 0.0], [1.0, -1.0] => "[1.386, 0.000]";
        /// Returns `ln(e^x + e^y)`, without overflow.
        ///
        /// Computed in f64 and rounded once.
        Logaddexp logaddexp(x, y)
                [a = wide(x), b = wide(y), rest = log1p_unit(exp(-abs(a - b)))] = of(max(a, b) + select(a == b, LN_2, rest)),
            for short_floats, Opaque "Neither linear nor, with rounding, a maximum.",
            gradient |dz, z| { x => (dz * (x - y).sigmoid()), y => (dz * (y - x).sigmoid()) },
            samples [Ints Ints],
            example [0.0, 1000.0], [0.0, 1.0] => "[0.693, 1000.000]";
    } derivatives {
    } } };
}
pub(crate) use logarithmic_table;

logarithmic_table!(make_operators);
