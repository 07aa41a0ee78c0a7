//! The pointwise operators that are formulas, a row each.
//!
//! A row gives, once, all that is true of an operator:
//!
//! ```text
//! /// The documentation, of the type and of the method.
//! Type method(operands; constant) [name = expression] = formula,     one text for the CPU's loops and for CUDA
//!     for floats | numbers, Algebra "why" and |ins| further rows,    dtypes; the `Partial` that passes unreduced
//!     gradient |of the result, the result| { operand => (expression), operand => "why there is none" },
//!     samples [values of each operand, ...] rounded n rough [...];   `rough`: not for finite differences
//! ```
//!
//! From it come the record, the loops, the kernels, the catalog's samples, [`DTensor`](crate::dtensor::DTensor)'s method and
//! [`Term`]'s. The rows behind `derivatives` have no method of `DTensor`.

use std::sync::Arc;

use super::count::operations;
use super::functions::*;
use super::record::{Pointwise, floats, numbers};
use super::rows::{add_scalar_rows, chosen_rows, lattice_rows, mul_scalar_rows, turned_rows};
use super::second::{gelu_curvature, gelu_tanh_curvature, silu_curvature};
use super::term::{Term, Terms};
use super::words::*;
use crate::error::Result;
use crate::ops::{Algebra, AxisPlacement, Bits, Fill, Input, Meta, Op, Row, Sample, Vjp, Windows};
use crate::tensor::cpu::{self, Function, Loops, Num, NumFunction, Real};
use crate::tensor::{DType, ReduceOp, Tensor, cuda};

macro_rules! pointwise_table {
    ($then:ident) => { $then! { methods {
        /// Adds two tensors. Integers wrap.
        Add add(x, y) = add(x, y),
            for numbers, Additive "A sum of sums may be taken in any order; partial and whole do not mix, for every rank would add the whole.",
            gradient |dz, z| { x => (dz), y => (dz) },
            samples [Ints Ints];
        /// Subtracts `y` from `x`. Integers wrap.
        Sub sub(x, y) = sub(x, y),
            for numbers, Additive "A difference of sums may be taken in any order.",
            gradient |dz, z| { x => (dz), y => (-dz) },
            samples [Ints Ints];
        /// Multiplies two tensors, element by element. Integers wrap.
        Mul mul(x, y) = mul(x, y),
            for numbers, Multilinear "Linear in each factor.",
            gradient |dz, z| { x => (dz * y), y => (dz * x) },
            samples [Ints Ints];
        /// Divides `x` by `y`.
        Div div(x, y) = x / y,
            for floats, Linear "Linear in the dividend.",
            gradient |dz, z| { x => (dz / y), y => (-(dz / y * z)) },
            samples [Ints Positive, Positive Positive] rounded 4;
        /// Returns the larger of `x` and `y`, where -0 is less than 0; NaN, always the same one, if either is (IEEE 754-2019's
        /// `maximum`). The gradient goes to the larger, to `x` if they are equal or zeros of either sign.
        Maximum maximum(x, y) = max(x, y),
            for numbers, Opaque "No sum passes." and |ins| lattice_rows(ReduceOp::Max, ReduceOp::Min),
            gradient |dz, z| { x => (x.ge(y).mask(true, dz)), y => (x.ge(y).mask(false, dz)) },
            samples [] rough [Ints Ints];
        /// Returns the smaller of `x` and `y`, where -0 is less than 0; NaN, always the same one, if either is. The gradient
        /// goes to the smaller, to `x` if they are equal or zeros of either sign.
        Minimum minimum(x, y) = min(x, y),
            for numbers, Opaque "No sum passes." and |ins| lattice_rows(ReduceOp::Min, ReduceOp::Max),
            gradient |dz, z| { x => (x.le(y).mask(true, dz)), y => (x.le(y).mask(false, dz)) },
            samples [] rough [Ints Ints];
        /// Raises `x` to the power `y`, with IEEE 754's special cases: 1 if `y` is 0 or `x` is 1, NaN for a negative `x` unless
        /// `y` is an integer.
        ///
        /// Computed in f64 as `e^(y ln x)`: narrower dtypes are off by about half a unit in the last place, f64 by about
        /// `|y ln x|` units. The gradients are 0 where an infinity or NaN would be a limit's: that of `x` if `y` is 0, that of
        /// `y` if `x` is 0.
        Pow pow(x, y) = of(power(wide(x), wide(y))),
            for floats, Opaque "Linear in neither.",
            gradient |dz, z| { x => (dz.pow_grad_base(x, y)), y => (dz.pow_grad_exponent(x, z)) },
            samples [Positive Ints, Positive Positive] rough [Ints Ints];

        /// Changes the sign of `x`. Integers wrap.
        Neg neg(x) = negative(x),
            for numbers, Additive "Linear. A sum passes, but not by bits: `-(1 - 1)` is -0, `-1 + 1` is +0."
                and |ins| turned_rows(ins[0].dtype.is_float()),
            gradient |dy, y| { x => (-dy) },
            samples [Ints];
        /// Returns `|x|`.
        Abs abs(x) = abs(x),
            for floats, Opaque "It falls before it rises.",
            gradient |dy, y| { x => (dy * x.sign()) },
            samples [] rough [Ints];
        /// Returns the sign of `x` as a number; zeros (with their signs) and NaN stay.
        Sign sign(x) = select(x != of(0.0) && !is_nan(x), copysign(of(1.0), x), x),
            for floats, Monotone "It never falls.",
            gradient |dy, y| { x => "a step function is constant almost everywhere" },
            samples [] rough [Ints];
        /// Returns the exponential `e^x`.
        Exp exp(x) = exp(x),
            for floats, Opaque "A sum becomes a product; and the approximation is not proved to be monotone by bits.",
            gradient |dy, y| { x => (dy * y) },
            samples [Ints];
        /// Returns the natural logarithm.
        Log log(x) = ln(x),
            for floats, Opaque "Not linear; and the approximation is not proved to be monotone by bits.",
            gradient |dy, y| { x => (dy / x) },
            samples [Positive];
        /// Returns the square root.
        Sqrt sqrt(x) = sqrt(x),
            for floats, Opaque "Not linear. Rounded once, it never falls; but of a NaN among negative numbers a maximum would make something else."
                and |ins| vec![Row::same(AxisPlacement::P(ReduceOp::Min), 1)],
            gradient |dy, y| { x => (dy * 0.5 / y) },
            samples [Positive] rough [Ints];
        /// Returns one over the square root.
        Rsqrt rsqrt(x) = recip(sqrt(x)),
            for floats, Opaque "Not linear, and not proved to be monotone by bits.",
            gradient |dy, y| { x => (dy * y.pow_scalar(3.0) * -0.5) },
            samples [Positive];
        /// Returns the hyperbolic tangent.
        Tanh tanh(x) = tanh(x),
            for floats, Opaque "Not linear; and the approximation is not proved to be monotone by bits.",
            gradient |dy, y| { x => (dy.tanh_grad(y)) },
            samples [Ints];
        /// Returns `1 / (1 + e^-x)`.
        Sigmoid sigmoid(x) = sigmoid(x),
            for floats, Opaque "Not linear; and the approximation is not proved to be monotone by bits.",
            gradient |dy, y| { x => (dy.sigmoid_grad(y)) },
            samples [Ints];
        /// Returns `max(0, x)`; -0 becomes 0, NaN stays.
        Relu relu(x) = max(of(0.0), x),
            for floats, Monotone "It never falls.",
            gradient |dy, y| { x => (dy.relu_grad(y)) },
            samples [] rough [Ints];
        /// Returns `x · Φ(x)`, with `Φ` the normal distribution function `(1 + erf(x / √2)) / 2`: the Gaussian error linear unit
        /// (Hendrycks, Gimpel 2016).
        Gelu gelu(x) [b = bounded(x)] = select(x < b, b, x) * phi(b),
            for floats, Opaque "Not linear, and it falls before it rises.",
            gradient |dy, y| { x => (dy.gelu_grad(x)) },
            samples [Ints, Positive];
        /// Returns the usual approximation of [`Gelu`](crate::ops::Gelu), `x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2`.
        GeluTanh gelu_tanh(x) as "gelu"
                [b = bounded(x), v = b * fma(b * b, of(V * C), of(V))] = select(x < b, b, x) * sigmoid(v),
            for floats, Opaque "Not linear, and it falls before it rises.",
            gradient |dy, y| { x => (dy.gelu_tanh_grad(x)) },
            samples [Ints, Positive];
        /// Returns `x · sigmoid(x)`: the sigmoid linear unit, also called swish (Elfwing, Uchibe, Doya 2017).
        Silu silu(x) [b = select(x < of(-1e4), of(-1e4), x)] = b * sigmoid(b),
            for floats, Opaque "Not linear, and it falls before it rises.",
            gradient |dy, y| { x => (dy.silu_grad(x)) },
            samples [Ints];
        /// Multiplies every element by one number, which is rounded to the dtype that is computed in: f32 for f16 and bf16.
        MulScalar mul_scalar(x; factor) = x * of(factor),
            for floats, Linear "Linear." and |ins, factor| mul_scalar_rows(factor),
            gradient |dy, y| { x => (dy * factor) },
            samples [Ints];
        /// Adds one number to every element, rounded to the dtype that is computed in: f32 for f16 and bf16. A `Partial` is
        /// reduced first: the number is added once, not once per rank.
        AddScalar add_scalar(x; by) = x + of(by),
            for floats, Opaque "No partial sum may pass: every rank would add the number." and |ins, by| add_scalar_rows(ins, by),
            gradient |dy, y| { x => (dy) },
            samples [Ints];
    } derivatives {
        /// Takes `(dy, y)` with `y = tanh x` and returns `dy · (1 - y²)`.
        TanhGrad tanh_grad(dy, y) = dy * sub(of(1.0), y * y),
            for floats, Linear "Linear in the gradient that comes in.",
            gradient |d, dx| { dy => (d.tanh_grad(y)), y => (d * dy * (y * -2.0)) },
            samples [Ints Ints];
        /// Takes `(dy, y)` with `y = sigmoid x` and returns `dy · y · (1 - y)`.
        SigmoidGrad sigmoid_grad(dy, y) = dy * (y * sub(of(1.0), y)),
            for floats, Linear "Linear in the gradient that comes in.",
            gradient |d, dx| { dy => (d.sigmoid_grad(y)), y => (d * dy * (y * -2.0 + 1.0)) },
            samples [Ints Ints];
        /// Takes `(dy, y)`, `y` being `relu x` or `x`, and returns `dy` if `y > 0`, else 0. A NaN in `y` lets `dy` through.
        ReluGrad relu_grad(dy, y) = select(y <= of(0.0), of(0.0), dy),
            for floats, Opaque "A choice between `dy` and 0: see the rows." and |ins| chosen_rows(ins[0].dtype),
            gradient |d, dx| { dy => (d.relu_grad(y)), y => "a step function is constant almost everywhere" },
            samples [] rough [Ints Ints];
        /// Takes `(dy, x)` and returns `dy · gelu'(x)`.
        GeluGrad gelu_grad(dy, x) [b = bounded(x), density = exp(b * b * of(-0.5)) * of(DENSITY)] = dy * fma(b, density, phi(b)),
            for floats, Linear "Linear in the gradient that comes in.",
            gradient |d, dx| { dy => (d.gelu_grad(x)), x => (gelu_curvature(d * dy, x)) },
            samples [Ints Ints] rounded 4;
        /// Takes `(dy, x)` and returns `dy` times the derivative of gelu's approximation.
        GeluTanhGrad gelu_tanh_grad(dy, x) as "gelu_grad"
                [b = bounded(x), square = b * b, s = sigmoid(b * fma(square, of(V * C), of(V))),
                 slope = fma(square, of(3.0 * V * C), of(V))] = dy * (s * fma(b * sub(of(1.0), s), slope, of(1.0))),
            for floats, Linear "Linear in the gradient that comes in.",
            gradient |d, dx| { dy => (d.gelu_tanh_grad(x)), x => (gelu_tanh_curvature(d * dy, x)) },
            samples [Ints Ints] rounded 4;
        /// Takes `(dy, x)` and returns `dy · s · (1 + x (1 - s))` with `s = sigmoid x`.
        SiluGrad silu_grad(dy, x) [b = bounded(x), s = sigmoid(b)] = dy * (s * (b * sub(of(1.0), s) + of(1.0))),
            for floats, Linear "Linear in the gradient that comes in.",
            gradient |d, dx| { dy => (d.silu_grad(x)), x => (silu_curvature(d, dy, x)) },
            samples [Ints Ints] rounded 4;
        /// Takes `(dz, x, y)` and returns `dz · y · x^(y - 1)`, and 0 if `y` is 0.
        PowGradBase pow_grad_base(dz, x, y)
                = select(y == of(0.0), of(0.0), dz * (y * of(power(wide(x), wide(y - of(1.0)))))),
            for floats, Linear "Linear in the gradient that comes in.",
            gradient |d, dx| {
                dz => (d.pow_grad_base(x, y)), x => ((d * dz * y).pow_grad_base(x, y + -1.0)),
                y => ((d * dz * y).pow_grad_exponent(x, x.pow(y + -1.0)) + d * dz * x.pow(y + -1.0)) },
            samples [Ints Positive Positive, Ints Positive Ints] rounded 4;
        /// Takes `(dz, x, z)`, `z` being some `x^y`, and returns `dz · z · ln x`, and 0 if `x` or `z` is 0.
        PowGradExponent pow_grad_exponent(dz, x, z) = select(x == of(0.0) || z == of(0.0), of(0.0), dz * (z * ln(x))),
            for floats, Linear "Linear in the gradient that comes in, and in the power."
                and |ins| vec![Row::new([AxisPlacement::R, AxisPlacement::R, AxisPlacement::SUM], [AxisPlacement::SUM])],
            gradient |d, dy| { dz => (d.pow_grad_exponent(x, z)), x => (d * dz * z / x), z => (d * dz * x.log()) },
            samples [Ints Positive Positive] rounded 4;
    } } };
}
pub(crate) use pointwise_table;

macro_rules! make_operators {
    (methods { $($method:tt)* } derivatives { $($derivative:tt)* }) => {
        records! { $($method)* $($derivative)* }
        signatures! { term_methods: $($method)* $($derivative)* }
    };
}

/// The rows as methods of a derivative's terms.
macro_rules! term_methods {
    ($([$(#[$doc:meta])*] $Type:ident $name:ident($x:ident $(, $y:ident)*) ($($s:ident)?);)*) => {
        #[allow(dead_code, clippy::should_implement_trait)]
        impl<'t> Term<'t> {
            $($(#[$doc])*
            pub fn $name(self $(, $y: Term<'t>)* $(, $s: f64)?) -> Term<'t> {
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

/// Adds a row's samples: the first values at four shapes, the others at one; of numbers, integers as well. Of several
/// operators, one after the other.
fn add_samples<P: Pointwise + Copy>(
    all: &mut Vec<Sample>,
    ops: &[P],
    smooth: &[&[Fill]],
    rough: &[&[Fill]],
    rounded: usize,
    class: &str,
) {
    const SHAPES: [&[usize]; 4] = [&[5, 3], &[7], &[], &[0, 3]];
    let mut add = |shape: &[usize], fills: &[Fill], dtype: DType, smooth: bool| {
        let input = |&fill: &Fill| Input { meta: Meta::new(dtype, shape), fill };
        let sample = Sample::new(ops[all.len() % ops.len().min(4)], fills.iter().map(input)).rounded(rounded);
        all.push(if smooth { sample } else { sample.not_smooth() });
    };
    let both = smooth.iter().map(|fills| (*fills, true)).chain(rough.iter().map(|fills| (*fills, false)));
    for (i, (fills, smooth)) in both.enumerate() {
        let shapes = if i == 0 { &SHAPES[..] } else { &SHAPES[1..2] };
        shapes.iter().for_each(|shape| add(shape, fills, DType::F32, smooth));
    }
    if class == "numbers" {
        add(SHAPES[1], &[Fill::Index(9); 3][..P::ARITY], DType::I64, false);
    }
}

/// Raises every element to the power of one number: by products for 2 and 3, by `recip` and `sqrt` for -1, 1/2 and -1/2, and
/// else as [`Pow`] does it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PowScalar {
    /// The number.
    pub exponent: Bits,
}

impl PowScalar {
    /// To the power of `exponent`.
    pub fn to(exponent: f64) -> PowScalar {
        PowScalar { exponent: Bits(exponent) }
    }

    /// The loops, kernels and operations that this exponent takes; none for 1, which copies.
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

    /// Not linear; the exponent 1 copies.
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
        let terms = Terms::new(g);
        let ([x], dy, c) = (terms.operands(), terms.grad(), self.exponent.0);
        match c {
            0.0 => terms.none(x, "x^0 is constant"),
            1.0 => terms.set(x, dy),
            2.0 => terms.set(x, dy * (x * c)),
            _ => terms.set(x, dy * (x.pow_scalar(c - 1.0) * c)),
        }
        terms.finish()
    }

    /// A square root lets minima pass, as [`Sqrt`] does.
    fn more_rows(&self, _: &[Meta]) -> Vec<Row> {
        if self.exponent.0 == 0.5 { vec![Row::same(AxisPlacement::P(ReduceOp::Min), 1)] } else { vec![] }
    }
}

impl Term<'_> {
    /// The power of one number.
    fn pow_scalar(self, exponent: f64) -> Self {
        self.then(PowScalar::to(exponent), &[])
    }
}

/// All samples of this file.
pub(super) fn samples() -> Vec<Sample> {
    let mut all = row_samples();
    let powers = [2.0, 3.0, -1.0, 0.5, -0.5, 1.0, 1.0 / 3.0, -2.5];
    all.extend(powers.map(|c| Sample::new(PowScalar::to(c), [Input::positive([5, 3])])));
    all.push(Sample::new(PowScalar::to(2.0), [Input::ints([])]));
    all.push(Sample::new(PowScalar::to(3.0), [Input::ints([0, 3])]));
    all
}

/// The operators of this file.
pub(super) fn operators() -> Vec<Arc<dyn Op>> {
    let exponents = [2.0, 3.0, -1.0, 0.5, -0.5, 1.0, 1.0 / 3.0, -2.5, 0.0, 7.0, f64::INFINITY];
    let powers = exponents.map(|exponent| Arc::new(PowScalar::to(exponent)) as Arc<dyn Op>);
    row_operators().into_iter().chain(powers).collect()
}

/// The CUDA sources of this file.
pub(super) fn cuda_sources() -> Vec<cuda::KernelSource> {
    let powers = [Square::FORMULA, Cube::FORMULA, Reciprocal::FORMULA, Power::FORMULA];
    ROW_SOURCES.iter().copied().chain(powers.map(|f| f.source)).collect()
}
