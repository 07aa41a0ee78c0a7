//! The table of pointwise operators that are formulas, one row per operator.
//!
//! A row has these parts:
//!
//! ```text
//! /// The documentation of the type and of the method.
//! Type method(operands; constant) [name = expression] = formula,     the source of the CPU loops and of the CUDA kernel
//!     for floats | numbers, Algebra "why" and |ins| further rows,    dtypes; the rows of partial operands
//!     gradient |of the result, the result| { operand => (expression), operand => "why there is none" },
//!     samples [values of each operand, ...] rounded n not_smooth [...],   `not_smooth`: not for finite differences
//!     example [first operand], [second operand]; constant => [result] | "result to three digits";
//! ```
//!
//! Macros generate from it the record, the loops, the kernels, the samples, and the methods of
//! [`DTensor`](crate::dtensor::DTensor) and [`GradientExpr`]. Rows after `derivatives` have no method of `DTensor`.

use std::sync::Arc;

use super::flops::operations;
use super::functions::*;
use super::gradient_expr::{GradientExpr, GradientWriter};
use super::record::{Pointwise, floats, numbers};
use super::rows::{add_scalar_rows, lattice_rows, mul_scalar_rows, negated_rows, select_rows};
use super::second_derivatives::{gelu_curvature, gelu_tanh_curvature, silu_curvature};
use super::words::*;
use crate::error::Result;
use crate::ops::{Algebra, AxisPlacement, Bits, Input, InputFill, Meta, Op, Row, Sample, Vjp, Windows};
use crate::tensor::cpu::{self, Function, Loops, Num, NumFunction, Real};
use crate::tensor::{DType, ReduceOp, Tensor, cuda};

macro_rules! pointwise_table {
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
            gradient |dz, z| { x => (dz / y), y => (-(dz / y * z)) },
            samples [Ints Positive, Positive Positive] rounded 4,
            example [1.0, -3.0], [4.0, 2.0] => [0.25, -1.5];
        /// Returns the larger of `x` and `y`. -0 is less than 0. The result is one fixed NaN if either operand is NaN
        /// (IEEE 754-2019's `maximum`).
        ///
        /// The gradient goes to the larger operand, and to `x` if both are equal (or zeros of different sign).
        Maximum maximum(x, y) = max(x, y),
            for numbers, Opaque "Partial sums are reduced first; partial maxima and minima are accepted." and |ins| lattice_rows(ReduceOp::Max, ReduceOp::Min),
            gradient |dz, z| { x => (x.ge(y).mask(true, dz)), y => (x.ge(y).mask(false, dz)) },
            samples [] not_smooth [Ints Ints],
            example [1.0, -2.0], [0.5, 3.0] => [1.0, 3.0];
        /// Returns the smaller of `x` and `y`. -0 is less than 0. The result is one fixed NaN if either operand is NaN
        /// (IEEE 754-2019's `minimum`).
        ///
        /// The gradient goes to the smaller operand, and to `x` if both are equal (or zeros of different sign).
        Minimum minimum(x, y) = min(x, y),
            for numbers, Opaque "Partial sums are reduced first; partial maxima and minima are accepted." and |ins| lattice_rows(ReduceOp::Min, ReduceOp::Max),
            gradient |dz, z| { x => (x.le(y).mask(true, dz)), y => (x.le(y).mask(false, dz)) },
            samples [] not_smooth [Ints Ints],
            example [1.0, -2.0], [0.5, 3.0] => [0.5, -2.0];
        /// Raises `x` to the power `y`, with IEEE 754's special cases: 1 if `y` is 0 or `x` is 1, NaN for a negative
        /// `x` unless `y` is an integer.
        ///
        /// Computed in f64 as `e^(y ln x)`. Narrower dtypes are off by about half a unit in the last place, f64 by
        /// about `|y ln x|` units. Two gradients are 0 although the formula gives an infinity or NaN: that of `x` if
        /// `y` is 0, and that of `y` if `x` is 0.
        Pow pow(x, y) = of(power(wide(x), wide(y))),
            for floats, Opaque "Not linear in either operand.",
            gradient |dz, z| { x => (dz.pow_grad_base(x, y)), y => (dz.pow_grad_exponent(x, z)) },
            samples [Positive Ints, Positive Positive] not_smooth [Ints Ints],
            example [2.0, 9.0], [10.0, 0.5] => "[1024.000, 3.000]";

        /// Changes the sign of `x`. Integers wrap.
        Neg neg(x) = negative(x),
            for numbers, Additive "Linear, but not bit for bit: `-(1 - 1)` is -0, `-1 + 1` is +0."
                and |ins| negated_rows(ins[0].dtype.is_float()),
            gradient |dy, y| { x => (-dy) },
            samples [Ints],
            example [1.0, -2.0] => [-1.0, 2.0];
        /// Returns the absolute value `|x|`.
        Abs abs(x) = abs(x),
            for floats, Opaque "Neither linear nor monotone.",
            gradient |dy, y| { x => (dy * x.sign()) },
            samples [] not_smooth [Ints],
            example [1.0, -2.0] => [1.0, 2.0];
        /// Returns the sign of `x`: 1 or -1. Zeros keep their sign, and NaN stays NaN. The gradient is 0.
        Sign sign(x) = select(x != of(0.0) && !is_nan(x), copysign(of(1.0), x), x),
            for floats, Monotone "Never decreases.",
            gradient |dy, y| { x => "a step function is constant almost everywhere" },
            samples [] not_smooth [Ints],
            example [-3.0, 0.5] => [-1.0, 1.0];
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
        /// linear unit (Hendrycks, Gimpel 2016).
        Gelu gelu(x) [b = bounded(x)] = select(x < b, b, x) * phi(b),
            for floats, Opaque "Neither linear nor monotone.",
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
        /// Multiplies every element by a number. The number is first rounded to the dtype of the computation: the
        /// tensor's dtype, or f32 for f16 and bf16.
        MulScalar mul_scalar(x; factor) = x * of(factor),
            for floats, Linear "Linear." and |ins, factor| mul_scalar_rows(factor),
            gradient |dy, y| { x => (dy * factor) },
            samples [Ints],
            example [1.0, -2.0]; 2.5 => [2.5, -5.0];
        /// Adds a number to every element. The number is first rounded to the dtype of the computation: the tensor's
        /// dtype, or f32 for f16 and bf16. A partial sum is reduced first, so that the number is added once and not
        /// once per rank.
        AddScalar add_scalar(x; by) = x + of(by),
            for floats, Opaque "Partial sums are reduced first: every rank would add the number." and |ins, by| add_scalar_rows(ins, by),
            gradient |dy, y| { x => (dy) },
            samples [Ints],
            example [1.0, -2.0]; 2.5 => [3.5, 0.5];
    } derivatives {
        /// The derivative of [`Tanh`]: takes `(dy, y)` with `y = tanh x` and returns `dy · (1 - y²)`.
        TanhGrad tanh_grad(dy, y) = dy * sub(of(1.0), y * y),
            for floats, Linear "Linear in the incoming gradient.",
            gradient |d, dx| { dy => (d.tanh_grad(y)), y => (d * dy * (y * -2.0)) },
            samples [Ints Ints],
            example [1.0, 2.0], [0.5, 0.0] => [0.75, 2.0];
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
        GeluGrad gelu_grad(dy, x) [b = bounded(x), density = exp(b * b * of(-0.5)) * of(DENSITY)] = dy * fma(b, density, phi(b)),
            for floats, Linear "Linear in the incoming gradient.",
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
        /// The derivative of [`Pow`] with respect to the base: takes `(dz, x, y)` and returns `dz · y · x^(y - 1)`, and
        /// 0 if `y` is 0.
        PowGradBase pow_grad_base(dz, x, y)
                = select(y == of(0.0), of(0.0), dz * (y * of(power(wide(x), wide(y - of(1.0)))))),
            for floats, Linear "Linear in the incoming gradient.",
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
            gradient |d, dy| { dz => (d.pow_grad_exponent(x, z)), x => (d * dz * z / x), z => (d * dz * x.log()) },
            samples [Ints Positive Positive] rounded 4,
            example [1.0, 1.0], [10.0, 0.0], [100.0, 0.0] => "[230.259, 0.000]";
    } } };
}
pub(crate) use pointwise_table;

macro_rules! make_operators {
    (methods { $($method:tt)* } derivatives { $($derivative:tt)* }) => {
        record_types! { method: $($method)* }
        record_types! { derivative: $($derivative)* }
        records! { $($method)* $($derivative)* }
        signatures! { expr_methods: $($method)* $($derivative)* }
    };
}

/// The rows as methods of an expression in a derivative.
macro_rules! expr_methods {
    ($([$(#[$doc:meta])*] $Type:ident $name:ident($x:ident $(, $y:ident)*) ($($s:ident)?);)*) => {
        #[allow(dead_code, clippy::should_implement_trait)]
        impl<'t> GradientExpr<'t> {
            $(#[doc = concat!("Adds a step of [`", stringify!($Type), "`].")]
            pub fn $name(self $(, $y: GradientExpr<'t>)* $(, $s: f64)?) -> GradientExpr<'t> {
                self.then(operator!($Type $($s)?), &[$($y),*])
            })*
        }
    };
}
macro_rules! operator {
    ($Type:ident) => {
        $Type
    };
    ($Type:ident $s:ident) => {
        $Type::by($s)
    };
}

pointwise_table!(make_operators);

/// Adds a row's samples: the first fill at four shapes, the others at one, and an i64 sample if the row takes
/// `numbers`. Several operators take turns.
fn add_samples<P: Pointwise + Copy>(
    all: &mut Vec<Sample>,
    ops: &[P],
    smooth: &[&[InputFill]],
    not_smooth: &[&[InputFill]],
    rounded: usize,
    class: &str,
) {
    const SHAPES: [&[usize]; 4] = [&[5, 3], &[7], &[], &[0, 3]];
    let mut add = |shape: &[usize], fills: &[InputFill], dtype: DType, smooth: bool| {
        let input = |&fill: &InputFill| Input { meta: Meta::new(dtype, shape), fill };
        let sample = Sample::new(ops[all.len() % ops.len().min(4)], fills.iter().map(input)).rounded(rounded);
        all.push(if smooth { sample } else { sample.not_smooth() });
    };
    let both =
        smooth.iter().map(|fills| (*fills, true)).chain(not_smooth.iter().map(|fills| (*fills, false)));
    for (i, (fills, smooth)) in both.enumerate() {
        let shapes = if i == 0 { &SHAPES[..] } else { &SHAPES[1..2] };
        shapes.iter().for_each(|shape| add(shape, fills, DType::F32, smooth));
    }
    if class == "numbers" {
        add(SHAPES[1], &[InputFill::Index(9); 3][..P::ARITY], DType::I64, false);
    }
}

/// Raises every element to the power of a number: [`DTensor::pow_scalar`](crate::dtensor::DTensor::pow_scalar).
///
/// The exponents 2 and 3 are computed by products, -1, 1/2 and -1/2 by reciprocal and square root, and all others as
/// [`Pow`].
///
/// ```
/// use isoshard::{ops::{PowScalar, eval_whole}, tensor::Tensor};
/// let x = Tensor::from_vec(vec![3.0, -0.5], [2])?;
/// assert_eq!(eval_whole(&PowScalar::to(2.0), &[x])?[0].to_f64_vec(), [9.0, 0.25]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PowScalar {
    /// The exponent.
    pub exponent: Bits,
}

impl PowScalar {
    /// Creates the operator with this exponent.
    pub fn to(exponent: f64) -> PowScalar {
        PowScalar { exponent: Bits(exponent) }
    }

    /// Returns the loops, kernels and number of operations for this exponent, or `None` for 1, which copies.
    fn formula(&self) -> Option<(Loops, cuda::FormulaKernels, u64)> {
        Some(match self.exponent.0 {
            1.0 => return None,
            2.0 => (Square::LOOPS, Square::FORMULA, Square::FLOPS),
            3.0 => (Cube::LOOPS, Cube::FORMULA, Cube::FLOPS),
            -1.0 => (Reciprocal::LOOPS, Reciprocal::FORMULA, Reciprocal::FLOPS),
            0.5 => (Sqrt::LOOPS, Sqrt::FORMULA, Sqrt::FLOPS),
            -0.5 => (Rsqrt::LOOPS, Rsqrt::FORMULA, Rsqrt::FLOPS),
            _ => (Power::LOOPS, Power::FORMULA, Power::FLOPS),
        })
    }
}

struct Square;
struct Cube;
struct Reciprocal;
struct Power;
function!(Square pow_scalar_square: floats, (x) () [] x * x);
function!(Cube pow_scalar_cube: floats, (x) () [] x * x * x);
function!(Reciprocal pow_scalar_recip: floats, (x) () [] recip(x));
// The exponent stays f64 if the elements are narrower: 1/3 is then not rounded to f32 first.
function!(Power pow_scalar: floats, (x) (exponent) [] of(power(wide(x), exponent)));

impl Pointwise for PowScalar {
    const NAME: &'static str = "pow_scalar";
    const ARITY: usize = 1;

    /// The exponent 1 copies; no other is linear.
    fn algebra(&self) -> Algebra {
        if self.exponent.0 == 1.0 { Algebra::Structural } else { Algebra::Opaque }
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        floats(Self::NAME, ins)
    }

    fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        let Some((loops, ..)) = self.formula() else { return Ok(ins[0].clone()) };
        cpu::compute(Self::NAME, &loops, self.exponent.0, ins)
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        let Some((_, formula, _)) = self.formula() else { return Ok(ins[0].clone()) };
        cuda::map(formula, ins, &[self.exponent.0])
    }

    fn flops(&self) -> u64 {
        self.formula().map_or(0, |(.., flops)| flops)
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        let writer = GradientWriter::new(g);
        let ([x], dy, c) = (writer.operands(), writer.grad(), self.exponent.0);
        match c {
            0.0 => writer.none(x, "x^0 is constant"),
            1.0 => writer.set(x, dy),
            2.0 => writer.set(x, dy * (x * c)),
            _ => writer.set(x, dy * (x.pow_scalar(c - 1.0) * c)),
        }
        writer.finish()
    }

    /// A square root accepts partial minima, as [`Sqrt`] does.
    fn more_rows(&self, _: &[Meta]) -> Vec<Row> {
        if self.exponent.0 == 0.5 { vec![Row::same(AxisPlacement::P(ReduceOp::Min), 1)] } else { vec![] }
    }
}

impl GradientExpr<'_> {
    /// Adds a step of [`PowScalar`].
    fn pow_scalar(self, exponent: f64) -> Self {
        self.then(PowScalar::to(exponent), &[])
    }
}

/// Returns all samples of this file.
pub(super) fn samples() -> Vec<Sample> {
    let mut all = row_samples();
    let powers = [2.0, 3.0, -1.0, 0.5, -0.5, 1.0, 1.0 / 3.0, -2.5];
    all.extend(powers.map(|c| Sample::new(PowScalar::to(c), [Input::positive([5, 3])])));
    all.push(Sample::new(PowScalar::to(2.0), [Input::ints([])]));
    all.push(Sample::new(PowScalar::to(3.0), [Input::ints([0, 3])]));
    all
}

/// Returns the operators of this file.
pub(super) fn operators() -> Vec<Arc<dyn Op>> {
    let exponents = [2.0, 3.0, -1.0, 0.5, -0.5, 1.0, 1.0 / 3.0, -2.5, 0.0, 7.0, f64::INFINITY];
    let powers = exponents.map(|exponent| Arc::new(PowScalar::to(exponent)) as Arc<dyn Op>);
    row_operators().into_iter().chain(powers).collect()
}

/// Returns the CUDA sources of this file.
pub(super) fn cuda_sources() -> Vec<cuda::KernelSource> {
    let powers = [Square::FORMULA, Cube::FORMULA, Reciprocal::FORMULA, Power::FORMULA];
    ROW_SOURCES.iter().copied().chain(powers.map(|f| f.source)).collect()
}
