//! Derivatives of activation functions that are long, as expressions.

use super::functions::{C, DENSITY, PI, V};
use super::gradient_expr::GradientExpr;

/// Returns `d · φ(x) (2 - x²)`, with `φ` the normal density: the derivative of gelu's slope.
pub(super) fn gelu_curvature<'t>(d: GradientExpr<'t>, x: GradientExpr<'t>) -> GradientExpr<'t> {
    let square = x * x;
    d * ((square * -1.0 + 2.0) * ((square * -0.5).exp() * DENSITY))
}

/// Returns `d · s (1 - s) (2 v' + x ((1 - 2 s) v'² + v''))`, with `v = V (x + C x³)` and `s = sigmoid(v)`.
pub(super) fn gelu_tanh_curvature<'t>(d: GradientExpr<'t>, x: GradientExpr<'t>) -> GradientExpr<'t> {
    let square = x * x;
    let s = ((square * (V * C) + V) * x).sigmoid();
    let slope = square * (3.0 * V * C) + V;
    let bend = (slope * slope * (s * -2.0 + 1.0) + x * (6.0 * V * C)) * x + slope * 2.0;
    (bend * d).sigmoid_grad(s)
}

/// Returns `d · dy · s (1 - s) (2 + x (1 - 2 s))`, with `s = sigmoid x`.
pub(super) fn silu_curvature<'t>(
    d: GradientExpr<'t>,
    dy: GradientExpr<'t>,
    x: GradientExpr<'t>,
) -> GradientExpr<'t> {
    let s = x.sigmoid();
    (((s * -2.0 + 1.0) * x + 2.0) * dy * d).sigmoid_grad(s)
}

/// Returns `-d (π² sinc x + 2 sinc'(x) / x)`: the derivative of sinc's slope. At 0 the quotient is that of a number
/// near 0.
pub(super) fn sinc_curvature<'t>(d: GradientExpr<'t>, x: GradientExpr<'t>) -> GradientExpr<'t> {
    let at = x + x.equals(x.zero()).mask(true, x.zero() + 1e-5);
    -(d.sinc_grad(at) / at * 2.0 + d * x.sinc() * (PI * PI))
}

/// Returns `-d x g³`: the derivative of `g`, which is `1 / √(x² + 1)` or `1 / √(x² - 1)`.
pub(super) fn inverse_curvature<'t>(
    d: GradientExpr<'t>,
    x: GradientExpr<'t>,
    g: GradientExpr<'t>,
) -> GradientExpr<'t> {
    -(d * (x * g) * g * g)
}

/// Returns `d (y² - x²) / (x² + y²)²` and `-2 d x y / (x² + y²)²`: the derivatives of `x / (x² + y²)`.
pub(super) fn atan2_curvature<'t>(
    d: GradientExpr<'t>,
    x: GradientExpr<'t>,
    y: GradientExpr<'t>,
) -> [GradientExpr<'t>; 2] {
    let one = x.zero() + 1.0;
    let (by_x, by_y) = (one.atan2_grad(x, y), one.atan2_grad(y, x));
    [d * (by_y - by_x) * (by_y + by_x), d * by_x * by_y * -2.0]
}

/// Returns `t + x · sigmoid(x) (1 - t²)` with `t = tanh(ln(1 + e^x))`: the slope of mish.
pub(super) fn mish_slope(x: GradientExpr<'_>) -> GradientExpr<'_> {
    let t = x.softplus().tanh();
    t + x * x.sigmoid() * (t * t * -1.0 + 1.0)
}
