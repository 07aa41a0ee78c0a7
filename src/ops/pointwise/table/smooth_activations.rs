//! Activation functions that are made of exponentials and logarithms.

use std::sync::Arc;

use crate::error::Result;
use crate::ops::pointwise::flops::operations;
use crate::ops::pointwise::functions::*;
use crate::ops::pointwise::gradient_expr::{GradientExpr, GradientWriter};
use crate::ops::pointwise::record::{Pointwise, dtype_of_formula, floats, floats as wide_floats};
use crate::ops::pointwise::row_samples::add_samples;
use crate::ops::pointwise::second_derivatives::mish_slope;
use crate::ops::pointwise::words::*;
use crate::ops::{Algebra, Bits, InputFill, Meta, Op, Sample, Vjp, Windows};
use crate::tensor::cpu::{self, Constants, Function, Loops, Real, WideFunction};
use crate::tensor::{DType, Tensor, cuda};

macro_rules! smooth_activations_table {
    ($then:ident) => { $then! { methods {
        /// Returns `ln(1 + e^x)`, a smooth form of [`Relu`](crate::ops::Relu), without overflow.
        Softplus softplus(x) = max(x, of(0.0)) + log1p(exp(-abs(x))),
            for floats, Opaque "Not linear, and the approximation is not proved to be monotone bit for bit.",
            gradient |dy, y| { x => (dy * x.sigmoid()) },
            samples [Ints],
            example [0.0, 100.0] => "[0.693, 100.000]";
        /// Returns the logarithm of [`Sigmoid`](crate::ops::Sigmoid), `-ln(1 + e^-x)`, without overflow.
        LogSigmoid log_sigmoid(x) = min(x, of(0.0)) - log1p(exp(-abs(x))),
            for floats, Opaque "Not linear, and the approximation is not proved to be monotone bit for bit.",
            gradient |dy, y| { x => (dy * (-x).sigmoid()) },
            samples [Ints],
            example [0.0, -100.0] => "[-0.693, -100.000]";
        /// Returns the logarithm of the odds, `ln(x / (1 - x))`, the inverse of [`Sigmoid`](crate::ops::Sigmoid); NaN outside [0, 1].
        Logit logit(x)
                [rest = -x + of(1.0)] = select(x < of(0.34), ln(x / rest), log1p((x + x - of(1.0)) / rest)),
            for floats, Opaque "Not linear, and the approximation is not proved to be monotone bit for bit.",
            gradient |dy, y| { x => (dy / (x * (-x + 1.0))) },
            samples [InsideUnit],
            example [0.5, 0.75] => "[0.000, 1.099]";
        /// Returns `x · tanh(ln(1 + e^x))` (Misra 2019).
        ///
        /// Computed in f64 and rounded once.
        Mish mish(x)
                [a = wide(x), e = exp(select(a > 40.0, 40.0, a)), n = e * (e + 2.0), low = select(a < -800.0, -800.0, a)] = of(select(a > 40.0, a, low * (n / (n + 2.0)))),
            for wide_floats, Opaque "Neither linear nor monotone.",
            gradient |dy, y| { x => (dy * mish_slope(x)) },
            samples [Ints],
            example [-1.0, 1.0] => "[-0.303, 0.865]";
        /// Returns `x` if it is positive, else `alpha (e^x - 1)`: the exponential linear unit (Clevert, Unterthiner, Hochreiter 2015).
        Elu elu(x; alpha)
                = select(x > of(0.0), x, expm1(min(x, of(0.0))) * of(alpha)),
            for floats, Opaque "Neither linear nor monotone.",
            gradient |dy, y| { x => (dy.relu_grad(x) + x.le(x.zero()).mask(true, dy * ((-(-x).relu()).exp() * alpha))) },
            samples [] not_smooth [Ints],
            example [-1.0, 2.0]; 1.0 => "[-0.632, 2.000]";
        /// Returns `1.0507 x` if `x` is positive, else `1.0507 · 1.6733 (e^x - 1)`: the scaled exponential linear unit (Klambauer et al. 2017).
        Selu selu(x)
                = select(x > of(0.0), x * of(SELU_SCALE), expm1(min(x, of(0.0))) * of(SELU_SLOPE)),
            for floats, Opaque "Neither linear nor monotone.",
            gradient |dy, y| { x => (dy.relu_grad(x) * SELU_SCALE + x.le(x.zero()).mask(true, dy * ((-(-x).relu()).exp() * SELU_SLOPE))) },
            samples [] not_smooth [Ints],
            example [-2.0, 1.0] => "[-1.520, 1.051]";
        /// Returns `x - tanh(x)` without cancellation near 0.
        ///
        /// Computed in f64 and rounded once; below 1 by the continued fraction of the hyperbolic tangent.
        Tanhshrink tanhshrink(x)
                [a = wide(x), z = a * a, deep = 7.0 + z / (9.0 + z / (11.0 + z / (13.0 + z / (15.0 + z / 17.0)))),
                 t = z / (3.0 + z / (5.0 + z / deep))] = of(select(abs(a) < 1.0, a * (t / (1.0 + t)), a - tanh(a))),
            for wide_floats, Opaque "Not linear, and the approximation is not proved to be monotone bit for bit.",
            gradient |dy, y| { x => (dy * x.tanh() * x.tanh()) },
            samples [Ints],
            example [1.0, -3.0] => "[0.238, -2.005]";
    } derivatives {
    } } };
}
pub(crate) use smooth_activations_table;

smooth_activations_table!(make_operators);
