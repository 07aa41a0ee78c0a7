//! Functions of several tensors at once, and activation functions in pieces.

use std::sync::Arc;

use crate::error::Result;
use crate::ops::pointwise::flops::operations;
use crate::ops::pointwise::functions::*;
use crate::ops::pointwise::gradient_expr::{GradientExpr, GradientWriter};
use crate::ops::pointwise::record::{Pointwise, dtype_of_formula, floats};
use crate::ops::pointwise::row_samples::add_samples;
use crate::ops::pointwise::rows::{added_product_rows, softshrink_rows};
use crate::ops::pointwise::words::*;
use crate::ops::{Algebra, AxisPlacement, Bits, InputFill, Meta, Op, Row, Sample, Vjp, Windows};
use crate::tensor::cpu::{self, Constants, Function, Loops, Real};
use crate::tensor::{DType, Tensor, cuda};

macro_rules! piecewise_table {
    ($then:ident) => { $then! { methods {
        /// Returns the linear interpolation from `x` to `y` by the weight `w`, `x + w (y - x)`: exactly `x` for weight 0
        /// and exactly `y` for weight 1.
        Lerp lerp(x, y, w) [d = y - x, far = abs(d) == of(inf()) && abs(x) < of(inf()) && abs(y) < of(inf())]
                = select(far, fma(w, y, x * sub(of(1.0), w)), select(abs(w) < of(0.5), fma(w, d, x), fma(w - of(1.0), d, y))),
            for floats, Opaque "Linear in `x` and `y` together, so both may be partial sums if the weight is replicated."
                and |ins| vec![Row::new([AxisPlacement::SUM, AxisPlacement::SUM, AxisPlacement::R], [AxisPlacement::SUM])],
            gradient |dz, z| { x => (dz * (w * -1.0 + 1.0)), y => (dz * w), w => (dz * (y - x)) },
            samples [Ints Ints Ints] rounded 8,
            example [1.0, 10.0], [3.0, 20.0], [0.5, 0.25] => [2.0, 12.5];
        /// Adds a product: `x + factor · y · z`.
        Addcmul addcmul(x, y, z; factor) = fma(y * of(factor), z, x),
            for floats, Opaque "Linear in `x` and one factor together: both may be partial sums if the other factor is replicated."
                and |ins| added_product_rows(),
            gradient |dr, r| { x => (dr), y => (dr * z * factor), z => (dr * y * factor) },
            samples [Ints Ints Ints] rounded 8,
            example [1.0, 2.0], [3.0, 4.0], [10.0, 100.0]; 0.5 => [16.0, 202.0];
        /// Adds a quotient: `x + factor · y / z`.
        Addcdiv addcdiv(x, y, z; factor) = x + y * of(factor) / z,
            for floats, Opaque "Linear in `x` and `y` together, so both may be partial sums if the divisor is replicated."
                and |ins| vec![Row::new([AxisPlacement::SUM, AxisPlacement::SUM, AxisPlacement::R], [AxisPlacement::SUM])],
            gradient |dr, r| { x => (dr), y => (dr * factor / z), z => (-(dr * y * factor / z / z)) },
            samples [Ints Ints Positive] rounded 8,
            example [1.0, 2.0], [30.0, 40.0], [10.0, 4.0]; 0.5 => [2.5, 7.0];
        /// Returns the length of the vector `(x, y)`, `√(x² + y²)`, also if the squares overflow. An infinite operand
        /// gives infinity, even beside a NaN. At (0, 0) the gradient is NaN.
        Hypot hypot(x, y) [a = abs(x), b = abs(y), m = max(a, b), r = min(a, b) / m, far = a == of(inf()) || b == of(inf())]
                = select(far, of(inf()), select(m == of(0.0), m, m * sqrt(fma(r, r, of(1.0))))),
            for floats, Opaque "Neither linear nor monotone.",
            gradient |dz, z| { x => (dz * (x / z)), y => (dz * (y / z)) },
            samples [Positive Positive] not_smooth [Ints Ints],
            example [3.0, -5.0], [4.0, 12.0] => [5.0, 13.0];
        /// Returns `x` if it is positive, else `x · w`: the parametric rectified linear unit (He, Zhang, Ren, Sun 2015).
        /// The slope `w` usually has one element per channel, and is trained.
        Prelu prelu(x, w) = select(x > of(0.0), x, x * w),
            for floats, Opaque "Neither linear nor monotone for every slope.",
            gradient |dy, y| { x => (dy.prelu_grad(x, w)), w => ((dy * x).relu_grad(-x)) },
            samples [] not_smooth [Ints Positive, Ints Ints],
            example [-2.0, 3.0], [0.25, 0.25] => [-0.5, 3.0];
        /// Returns `x / (1 + |x|)`, from -1 to 1: softsign (Glorot, Bengio 2010).
        Softsign softsign(x) [a = abs(x)] = select(a == of(inf()), copysign(of(1.0), x), x / (a + of(1.0))),
            for floats, Opaque "Not linear, and not proved to be monotone bit for bit.",
            gradient |dy, y| { x => (dy / (x.abs() + 1.0) / (x.abs() + 1.0)) },
            samples [Positive] not_smooth [Ints],
            example [-3.0, 1.0] => [-0.75, 0.5];
        /// Returns `(x + 3) / 6`, clamped to 0 to 1: a sigmoid in three straight pieces (Courbariaux et al. 2015).
        Hardsigmoid hardsigmoid(x) = min(max(x + of(3.0), of(0.0)), of(6.0)) / of(6.0),
            for floats, Monotone "Never decreases.",
            gradient |dy, y| { x => (dy.hardsigmoid_grad(x)) },
            samples [] not_smooth [Ints],
            example [-4.0, 1.5] => [0.0, 0.75];
        /// Returns `x · hardsigmoid(x)` (Howard et al. 2019). It is 0 up to -3.
        Hardswish hardswish(x)
                = select(x <= of(-3.0), of(0.0), select(x > of(1e30), x, x * min(x + of(3.0), of(6.0)) / of(6.0))),
            for floats, Opaque "Neither linear nor monotone.",
            gradient |dy, y| { x => (dy.hardswish_grad(x)) },
            samples [] not_smooth [Ints],
            example [-1.5, 4.0] => [-0.375, 4.0];
        /// Returns `x`, and 0 if `|x|` is at most `|lambda|`.
        Hardshrink hardshrink(x; lambda) = select(abs(x) <= of(abs(lambda)), of(0.0), x),
            for floats, Monotone "Never decreases.",
            gradient |dy, y| { x => (y.equals(y.zero()).mask(false, dy)) },
            samples [] not_smooth [Ints],
            example [-2.0, 0.5]; 1.0 => [-2.0, 0.0];
        /// Returns `x` moved toward 0 by `|lambda|`, and 0 if `|x|` is at most `|lambda|`.
        Softshrink softshrink(x; lambda) [by = of(abs(lambda))]
                = select(x > by, x - by, select(x < -by, x + by, x * of(0.0))),
            for floats, Opaque "Not linear. Never decreases if `lambda` is finite." and |ins, lambda| softshrink_rows(lambda),
            gradient |dy, y| { x => (y.equals(y.zero()).mask(false, dy)) },
            samples [] not_smooth [Ints],
            example [-2.0, 0.5]; 1.0 => [-1.0, 0.0];
    } derivatives {
        /// The derivative of [`Prelu`] with respect to `x`: takes `(dy, x, w)` and returns `dy` if `x` is positive, else
        /// `dy · w`.
        PreluGrad prelu_grad(dy, x, w) = select(x > of(0.0), dy, dy * w),
            for floats, Linear "Linear in the incoming gradient.",
            gradient |d, dx| { dy => (d.prelu_grad(x, w)), x => (d.zero()), w => ((d * dy).relu_grad(-x)) },
            samples [] not_smooth [Ints Ints Positive],
            example [2.0, 3.0], [-1.0, 1.0], [0.25, 0.25] => [0.5, 3.0];
        /// The derivative of [`Hardsigmoid`]: takes `(dy, x)` and returns `dy / 6` if `x` is between -3 and 3, else 0.
        HardsigmoidGrad hardsigmoid_grad(dy, x) = select(x <= of(-3.0) || x >= of(3.0), of(0.0), dy / of(6.0)),
            for floats, Linear "Linear in the incoming gradient.",
            gradient |d, dx| { dy => (d.hardsigmoid_grad(x)), x => (d.zero()) },
            samples [] not_smooth [Ints Ints],
            example [12.0, 12.0], [-4.0, 1.5] => [0.0, 2.0];
        /// The derivative of [`Hardswish`]: takes `(dy, x)` and returns 0 if `x` is at most -3, `dy` if `x` is at least 3, and
        /// else `dy (x / 3 + 1 / 2)`.
        HardswishGrad hardswish_grad(dy, x)
                = select(x <= of(-3.0), of(0.0), select(x >= of(3.0), dy, dy * (x / of(3.0) + of(0.5)))),
            for floats, Linear "Linear in the incoming gradient.",
            gradient |d, dx| { dy => (d.hardswish_grad(x)), x => ((d * dy * 2.0).hardsigmoid_grad(x)) },
            samples [] not_smooth [Ints Ints],
            example [2.0, 2.0], [-1.5, 4.0] => [0.0, 2.0];
    } } };
}
pub(crate) use piecewise_table;

piecewise_table!(make_operators);
