//! Powers with a constant exponent.

use std::sync::Arc;

use super::flops::operations;
use super::functions::*;
use super::gradient_expr::{GradientExpr, GradientWriter};
use super::record::{Pointwise, floats};
use super::table::{Rsqrt, Sqrt};
use super::words::*;
use crate::error::Result;
use crate::ops::{Algebra, AxisPlacement, Bits, Input, Meta, Op, Row, Sample, Vjp, Windows};
use crate::tensor::cpu::{self, Constants, Function, Loops, Real, WideFunction};
use crate::tensor::{DType, ReduceOp, Tensor, cuda};

/// Raises every element to the power of a number: [`DTensor::pow_scalar`](crate::dtensor::DTensor::pow_scalar).
///
/// The exponents 2 and 3 are computed by products, -1, 1/2 and -1/2 by reciprocal and square root, and all others as
/// [`Pow`](crate::ops::Pow).
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
function!(
    Power pow_scalar: short_floats, (x) (exponent)
    [a = wide(x), magnitude = pow_abs(abs(a), exponent)] of(power(a, exponent, magnitude))
);

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
        cpu::compute(Self::NAME, &loops, [self.exponent.0, 0.0], ins)
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
            0.0 => writer.set(x, dy.zero()),
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
    pub fn pow_scalar(self, exponent: f64) -> Self {
        self.then(PowScalar::to(exponent), &[])
    }
}

/// Returns the samples of this file.
pub(super) fn samples() -> Vec<Sample> {
    let powers = [2.0, 3.0, -1.0, 0.5, -0.5, 1.0, 1.0 / 3.0, -2.5];
    let mut all = powers.map(|c| Sample::new(PowScalar::to(c), [Input::positive([5, 3])])).to_vec();
    all.push(Sample::new(PowScalar::to(2.0), [Input::ints([])]));
    all.push(Sample::new(PowScalar::to(3.0), [Input::ints([0, 3])]));
    all
}

/// Returns the operators of this file.
pub(super) fn operators() -> Vec<Arc<dyn Op>> {
    let exponents = [2.0, 3.0, -1.0, 0.5, -0.5, 1.0, 1.0 / 3.0, -2.5, 0.0, 7.0, f64::INFINITY];
    exponents.map(|exponent| Arc::new(PowScalar::to(exponent)) as Arc<dyn Op>).to_vec()
}

/// The CUDA sources of this file.
pub(super) const SOURCES: &[cuda::KernelSource] =
    &[Square::FORMULA.source, Cube::FORMULA.source, Reciprocal::FORMULA.source, Power::FORMULA.source];
