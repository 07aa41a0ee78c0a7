//! Activation functions of neural networks.

use std::sync::Arc;

use crate::error::Result;
use crate::ops::pointwise::flops::operations;
use crate::ops::pointwise::functions::*;
use crate::ops::pointwise::gradient_expr::{GradientExpr, GradientWriter};
use crate::ops::pointwise::record::{Pointwise, dtype_of_formula, floats, floats as two_pass_floats};
use crate::ops::pointwise::row_samples::add_samples;
use crate::ops::pointwise::rows::select_rows;
use crate::ops::pointwise::second_derivatives::{gelu_curvature, gelu_tanh_curvature, silu_curvature};
use crate::ops::pointwise::words::*;
use crate::ops::{Algebra, InputFill, Meta, Op, Row, Sample, Vjp, Windows};
use crate::tensor::cpu::{self, Constants, Function, Loops, Real, TwoPasses};
use crate::tensor::{DType, Tensor, cuda};

macro_rules! activations_table {
    ($then:ident) => { $then! { methods {
        /// Returns the logistic function `1 / (1 + e^-x)`.
        Sigmoid sigmoid(x) = sigmoid(x),
            for floats, Opaque "Not linear, and the approximation is not proved to be monotone bit for bit.",
            gradient |dy, y| { x => (dy.sigmoid_grad(y)) },
            samples [Ints],
            example [0.0, 2.0] => "[0.500, 0.881]";
        /// Returns `max(0, x)`, the rectified linear unit. -0 becomes 0, and NaN stays NaN.
        Relu relu(x) = max(of(0.0), x),
            for floats, Monotone "Never decreases.",
            gradient |dy, y| { x => (dy.relu_grad(y)) },
            samples [] not_smooth [Ints],
            example [-1.0, 2.0] => [0.0, 2.0];
        /// Returns `x · Φ(x)`, with `Φ` the normal distribution function `(1 + erf(x / √2)) / 2`: the Gaussian error
        /// linear unit (Hendrycks, Gimpel 2016). Computed as `max(x, 0) - |x| (1 - Φ(|x|))`, in which nothing cancels.
        Gelu gelu(x) [a = bounded_abs(x), e = bell(a), tail = e * mills(a)] = fma(-a, tail, select(x < of(0.0), of(-0.0), x)),
            for two_pass_floats, Opaque "Neither linear nor monotone.",
            gradient |dy, y| { x => (dy.gelu_grad(x)) },
            samples [Ints, Positive],
            example [-1.0, 2.0] => "[-0.159, 1.954]";
        /// Returns the usual approximation of [`Gelu`](crate::ops::Gelu), `x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2`.
        GeluTanh gelu_tanh(x) as "gelu"
                [b = bounded(x), v = b * fma(b * b, of(V * C), of(V))] = select(x < b, b, x) * sigmoid(v),
            for floats, Opaque "Neither linear nor monotone.",
            gradient |dy, y| { x => (dy.gelu_tanh_grad(x)) },
            samples [Ints, Positive],
            example [-1.0, 2.0] => "[-0.159, 1.955]";
        /// Returns `x · sigmoid(x)`: the sigmoid linear unit, also called swish (Elfwing, Uchibe, Doya 2017).
        Silu silu(x) [b = select(x < of(-1e4), of(-1e4), x)] = b * sigmoid(b),
            for floats, Opaque "Neither linear nor monotone.",
            gradient |dy, y| { x => (dy.silu_grad(x)) },
            samples [Ints],
            example [-1.0, 2.0] => "[-0.269, 1.762]";
    } derivatives {
        /// The derivative of [`Sigmoid`]: takes `(dy, y)` with `y = sigmoid x` and returns `dy · y · (1 - y)`.
        SigmoidGrad sigmoid_grad(dy, y) = dy * (y * sub(of(1.0), y)),
            for floats, Linear "Linear in the incoming gradient.",
            gradient |d, dx| { dy => (d.sigmoid_grad(y)), y => (d * dy * (y * -2.0 + 1.0)) },
            samples [Ints Ints],
            example [1.0, 4.0], [0.5, 0.25] => [0.25, 0.75];
        /// The derivative of [`Relu`]: takes `(dy, y)`, where `y` is `relu x` or `x`, and returns `dy` if `y > 0`, else
        /// 0. If `y` is NaN, it returns `dy`.
        ReluGrad relu_grad(dy, y) = select(y <= of(0.0), of(0.0), dy),
            for floats, Opaque "Selects `dy` or 0, so any partial `dy` is accepted if `y` is replicated." and |ins| select_rows(ins[0].dtype),
            gradient |d, dx| { dy => (d.relu_grad(y)), y => "a step function is constant almost everywhere" },
            samples [] not_smooth [Ints Ints],
            example [1.0, 1.0], [-3.0, 3.0] => [0.0, 1.0];
        /// The derivative of [`Gelu`]: takes `(dy, x)` and returns `dy · gelu'(x)`.
        GeluGrad gelu_grad(dy, x)
                [a = bounded_abs(x), e = bell(a), low = e * fma(-a, of(DENSITY), mills(a))] = dy * select(x < of(0.0), low, sub(of(1.0), low)),
            for two_pass_floats, Linear "Linear in the incoming gradient.",
            gradient |d, dx| { dy => (d.gelu_grad(x)), x => (gelu_curvature(d * dy, x)) },
            samples [Ints Ints] rounded 4,
            example [1.0, 2.0], [0.0, 0.0] => [0.5, 1.0];
        /// The derivative of [`GeluTanh`]: takes `(dy, x)` and returns `dy · gelu_tanh'(x)`.
        GeluTanhGrad gelu_tanh_grad(dy, x) as "gelu_grad"
                [b = bounded(x), square = b * b, s = sigmoid(b * fma(square, of(V * C), of(V))),
                 slope = fma(square, of(3.0 * V * C), of(V))] = dy * (s * fma(b * sub(of(1.0), s), slope, of(1.0))),
            for floats, Linear "Linear in the incoming gradient.",
            gradient |d, dx| { dy => (d.gelu_tanh_grad(x)), x => (gelu_tanh_curvature(d * dy, x)) },
            samples [Ints Ints] rounded 4,
            example [1.0, 2.0], [0.0, 0.0] => [0.5, 1.0];
        /// The derivative of [`Silu`]: takes `(dy, x)` and returns `dy · s · (1 + x (1 - s))` with `s = sigmoid x`.
        SiluGrad silu_grad(dy, x) [b = bounded(x), s = sigmoid(b)] = dy * (s * (b * sub(of(1.0), s) + of(1.0))),
            for floats, Linear "Linear in the incoming gradient.",
            gradient |d, dx| { dy => (d.silu_grad(x)), x => (silu_curvature(d, dy, x)) },
            samples [Ints Ints] rounded 4,
            example [1.0, 2.0], [0.0, 0.0] => [0.5, 1.0];
    } } };
}
pub(crate) use activations_table;

activations_table!(make_operators);
