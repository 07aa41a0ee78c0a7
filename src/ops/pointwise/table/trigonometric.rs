//! Trigonometric and hyperbolic functions and their inverses.

use std::sync::Arc;

use crate::error::Result;
use crate::ops::pointwise::flops::operations;
use crate::ops::pointwise::functions::*;
use crate::ops::pointwise::gradient_expr::{GradientExpr, GradientWriter};
use crate::ops::pointwise::record::{
    Pointwise, dtype_of_formula, floats, floats as far_floats, floats as rare_floats, floats as short_floats,
    floats as wide_floats,
};
use crate::ops::pointwise::row_samples::add_samples;
use crate::ops::pointwise::second_derivatives::{atan2_curvature, inverse_curvature, sinc_curvature};
use crate::ops::pointwise::words::*;
use crate::ops::{Algebra, InputFill, Meta, Op, Sample, Vjp, Windows};
use crate::tensor::cpu::{self, Constants, Function, Loops, Real, WideFunction};
use crate::tensor::{DType, Tensor, cuda};

macro_rules! trigonometric_table {
    ($then:ident) => { $then! { methods {
        /// Returns the sine of `x` radians, of any magnitude; NaN if `x` is infinite.
        Sin sin(x) = sin(x),
            for rare_floats, Opaque "Neither linear nor monotone.",
            gradient |dy, y| { x => (dy * x.cos()) },
            samples [Ints],
            example [0.0, 1.0] => "[0.000, 0.841]";
        /// Returns the cosine of `x` radians, of any magnitude; NaN if `x` is infinite.
        Cos cos(x) = cos(x),
            for rare_floats, Opaque "Neither linear nor monotone.",
            gradient |dy, y| { x => (-(dy * x.sin())) },
            samples [Ints],
            example [0.0, 2.0] => "[1.000, -0.416]";
        /// Returns the tangent of `x` radians, of any magnitude; NaN if `x` is infinite.
        Tan tan(x) = tan(x),
            for rare_floats, Opaque "Neither linear nor monotone.",
            gradient |dy, y| { x => (dy * (y * y + 1.0)) },
            samples [Positive],
            example [0.0, 1.0] => "[0.000, 1.557]";
        /// Returns the angle in [-π/2, π/2] whose sine is `x`; NaN if `|x|` is above 1.
        ///
        /// Computed in f64 and rounded once.
        Asin asin(x) = of(asin(wide(x))),
            for short_floats, Opaque "Not linear, and the approximation is not proved to be monotone bit for bit.",
            gradient |dy, y| { x => (dy * ((-x + 1.0) * (x + 1.0)).rsqrt()) },
            samples [InsideUnit],
            example [0.5, -1.0] => "[0.524, -1.571]";
        /// Returns the angle in [0, π] whose cosine is `x`; NaN if `|x|` is above 1.
        ///
        /// Computed in f64 and rounded once.
        Acos acos(x) = of(acos(wide(x))),
            for short_floats, Opaque "Not linear, and the approximation is not proved to be monotone bit for bit.",
            gradient |dy, y| { x => (-(dy * ((-x + 1.0) * (x + 1.0)).rsqrt())) },
            samples [InsideUnit],
            example [0.5, -1.0] => "[1.047, 3.142]";
        /// Returns the angle in [-π/2, π/2] whose tangent is `x`.
        ///
        /// Computed in f64 and rounded once.
        Atan atan(x) = of(atan(wide(x))),
            for short_floats, Opaque "Not linear, and the approximation is not proved to be monotone bit for bit.",
            gradient |dy, y| { x => (dy / (x * x + 1.0)) },
            samples [Ints],
            example [0.5, -1.0] => "[0.464, -0.785]";
        /// Returns the angle in [-π, π] of the point with ordinate `y` and abscissa `x`, with C99's values at zeros and infinities.
        ///
        /// The gradient at the origin is NaN. Computed in f64 and rounded once.
        Atan2 atan2(y, x) = of(atan2(wide(y), wide(x))),
            for short_floats, Opaque "Neither linear nor monotone.",
            gradient |dz, z| { y => (dz.atan2_grad(x, y)), x => (-dz.atan2_grad(y, x)) },
            samples [Ints Positive],
            example [1.0, -1.0], [1.0, -2.0] => "[0.785, -2.678]";
        /// Returns the hyperbolic sine `(e^x - e^-x) / 2`.
        ///
        /// Computed in f64 and rounded once.
        Sinh sinh(x) = of(sinh(wide(x))),
            for wide_floats, Opaque "Not linear, and the approximation is not proved to be monotone bit for bit.",
            gradient |dy, y| { x => (dy * x.cosh()) },
            samples [Ints],
            example [0.0, 1.0] => "[0.000, 1.175]";
        /// Returns the hyperbolic cosine `(e^x + e^-x) / 2`.
        ///
        /// Computed in f64 and rounded once.
        Cosh cosh(x) = of(cosh(wide(x))),
            for wide_floats, Opaque "Neither linear nor monotone.",
            gradient |dy, y| { x => (dy * x.sinh()) },
            samples [Ints],
            example [0.0, 1.0] => "[1.000, 1.543]";
        /// Returns the inverse hyperbolic sine `ln(x + √(x² + 1))`.
        ///
        /// Computed in f64 and rounded once.
        Asinh asinh(x) = of(asinh(wide(x))),
            for wide_floats, Opaque "Not linear, and the approximation is not proved to be monotone bit for bit.",
            gradient |dy, y| { x => (dy.asinh_grad(x)) },
            samples [Ints],
            example [0.0, -1.0] => "[0.000, -0.881]";
        /// Returns the inverse hyperbolic cosine `ln(x + √(x² - 1))`; NaN if `x` is below 1.
        ///
        /// Computed in f64 and rounded once.
        Acosh acosh(x) = of(acosh(wide(x))),
            for wide_floats, Opaque "Not linear, and the approximation is not proved to be monotone bit for bit.",
            gradient |dy, y| { x => (dy.acosh_grad(x)) },
            samples [AboveOne],
            example [1.0, 2.0] => "[0.000, 1.317]";
        /// Returns the inverse hyperbolic tangent `ln((1 + x) / (1 - x)) / 2`; NaN if `|x|` is above 1.
        Atanh atanh(x) = atanh(x),
            for floats, Opaque "Not linear, and the approximation is not proved to be monotone bit for bit.",
            gradient |dy, y| { x => (dy / ((-x + 1.0) * (x + 1.0))) },
            samples [InsideUnit],
            example [0.0, 0.5] => "[0.000, 0.549]";
        /// Returns the normalised cardinal sine `sin(πx) / (πx)`: 1 at 0 and 0 at other integers; NaN if `x` is infinite.
        ///
        /// Computed in f64 and rounded once.
        Sinc sinc(x)
                [a = wide(x), r = fma(round(a * 0.5), -2.0, a), n = select(abs(r) > 0.5, copysign(1.0 - abs(r), r), r)]
                = of(select(a == 0.0, 1.0, sin(n * PI) / (a * PI))),
            for far_floats, Opaque "Neither linear nor monotone.",
            gradient |dy, y| { x => (dy.sinc_grad(x)) },
            samples [Positive, InsideUnit],
            example [0.0, 0.5] => "[1.000, 0.637]";
    } derivatives {
        /// The derivative of [`Asinh`]: takes `(dy, x)` and returns `dy / √(x² + 1)`, also if `x²` overflows.
        AsinhGrad asinh_grad(dy, x)
                [a = abs(x)] = dy * select(a > of(1e9), recip(a), recip(sqrt(x * x + of(1.0)))),
            for floats, Linear "Linear in the incoming gradient.",
            gradient |d, dx| {
                dy => (d.asinh_grad(x)), x => (inverse_curvature(d * dy, x, (x.zero() + 1.0).asinh_grad(x))) },
            samples [Ints Ints] rounded 4,
            example [1.0, 2.0], [0.0, 1e30] => "[1.000, 0.000]";
        /// The derivative of [`Acosh`]: takes `(dy, x)` and returns `dy / √(x² - 1)`, also if `x²` overflows.
        AcoshGrad acosh_grad(dy, x)
                [a = abs(x)] = dy * select(a > of(1e9), recip(a), recip(sqrt((x - of(1.0)) * (x + of(1.0))))),
            for floats, Linear "Linear in the incoming gradient.",
            gradient |d, dx| {
                dy => (d.acosh_grad(x)), x => (inverse_curvature(d * dy, x, (x.zero() + 1.0).acosh_grad(x))) },
            samples [Ints AboveOne] rounded 4,
            example [1.0, 3.0], [1.25, 1.25] => "[1.333, 4.000]";
        /// The derivative of [`Atan2`] by one of its operands: takes `(dz, x, y)` and returns `dz · x / (x² + y²)`, also if
        /// a square or the sum overflows or underflows.
        Atan2Grad atan2_grad(dz, x, y)
                [a = abs(x), b = abs(y), m = max(a, b), r = min(a, b) / m, s = x * x + y * y, far = s < of(1e-30) || s > of(1e30)]
                = select(far, dz * (x / m) / fma(r, r, of(1.0)) / m, dz * x / s),
            for floats, Linear "Linear in the incoming gradient.",
            gradient |d, dx| {
                dz => (d.atan2_grad(x, y)), x => (atan2_curvature(d * dz, x, y)[0]), y => (atan2_curvature(d * dz, x, y)[1]) },
            samples [Ints Ints Positive, Ints Positive Ints] rounded 4,
            example [5.0, 4.0], [1.0, 2.0], [2.0, 0.0] => [1.0, 2.0];
        /// The derivative of [`Sinc`]: takes `(dy, x)` and returns `dy · (cos(πx) - sinc x) / x`, and 0 at 0.
        SincGrad sinc_grad(dy, x)
                [a = wide(x), r = fma(round(a * 0.5), -2.0, a), n = select(abs(r) > 0.5, copysign(1.0 - abs(r), r), r),
                 u = a * PI, z = u * u,
                 low = fma(z, fma(z, fma(z, 1.0 / 518918400.0, -1.0 / 3991680.0), 1.0 / 45360.0), -1.0 / 840.0),
                 near = u * PI * fma(z, fma(z, low, 1.0 / 30.0), -1.0 / 3.0),
                 far = (cos(r * PI) - sin(n * PI) / u) / a]
                = of(wide(dy) * select(abs(a) < 0.1, near, far)),
            for far_floats, Linear "Linear in the incoming gradient.",
            gradient |d, dx| { dy => (d.sinc_grad(x)), x => (sinc_curvature(d * dy, x)) },
            samples [Ints Positive] rounded 4,
            example [1.0, 1.0], [0.5, 1.0] => "[-1.273, -1.000]";
    } } };
}
pub(crate) use trigonometric_table;

trigonometric_table!(make_operators);
