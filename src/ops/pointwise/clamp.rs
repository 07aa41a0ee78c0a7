//! `clamp`: limits elements to an interval, and its derivative.

use std::sync::Arc;

use super::flops::operations;
use super::functions::*;
use super::gradient_expr::GradientWriter;
use super::record::{Pointwise, floats, numbers};
use super::rows::select_rows;
use super::words::*;
use crate::error::{Error, Result};
use crate::ops::{Algebra, Bits, Input, Meta, Op, Row, Sample, Vjp, Windows, list};
use crate::tensor::cpu::{self, Constants, Function, Loops, Num, NumFunction, Real};
use crate::tensor::{DType, Tensor, cuda};

/// Limits elements to the interval from `min` to `max`; if `min` is larger, every element becomes `max`. NaN stays NaN,
/// and 0 is above -0. Applied by [`DTensor::clamp`](crate::dtensor::DTensor::clamp) and
/// [`DTensor::hardtanh`](crate::dtensor::DTensor::hardtanh).
///
/// Infinities are no bounds. For an integer dtype the bounds are rounded into the interval, so 0.5 to 3.5 is 1 to 3.
/// Never decreases, so partial maxima and minima are accepted.
///
/// ```
/// use isoshard::{ops::{Bits, Clamp, eval_whole}, tensor::Tensor};
/// let clamp = Clamp { min: Bits(0.5), max: Bits(3.5), open: false };
/// let x = Tensor::from_vec(vec![-1.0, 2.0, 9.0], [3])?;
/// assert_eq!(eval_whole(&clamp, &[x])?[0].to_f64_vec(), [0.5, 2.0, 3.5]);
/// let x = Tensor::from_vec(vec![-1, 2, 9], [3])?;
/// assert_eq!(eval_whole(&clamp, &[x])?[0].to_vec::<i32>()?, [1, 2, 3]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Clamp {
    /// The smallest value of a result.
    pub min: Bits,
    /// The largest value of a result.
    pub max: Bits,
    /// True if elements that equal a bound have the gradient 0, as in PyTorch.
    pub open: bool,
}

/// The derivative of [`Clamp`]: takes `(dy, x)` and returns `dy` if `x` is within the bounds, else 0. If `x` is NaN, it
/// returns `dy`. Applied in backward passes; `DTensor` has no method for it.
///
/// ```
/// use isoshard::{ops::{Bits, ClampGrad, eval_whole}, tensor::Tensor};
/// let grad = ClampGrad { min: Bits(0.0), max: Bits(6.0), open: true };
/// let (dy, x) = (Tensor::from_vec(vec![5.0; 3], [3])?, Tensor::from_vec(vec![0.0, 2.0, 9.0], [3])?);
/// assert_eq!(eval_whole(&grad, &[dy, x])?[0].to_f64_vec(), [0.0, 5.0, 0.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ClampGrad {
    /// The lower bound.
    pub min: Bits,
    /// The upper bound.
    pub max: Bits,
    /// True if elements that equal a bound have the gradient 0.
    pub open: bool,
}

struct ClampFormula;
struct WithinFormula;
function!(ClampFormula clamp: numbers, (x) (low, high) [] min(max(x, of(low)), of(high)));
function!(WithinFormula clamp_grad: floats, (dy, x) (low, high) [] select(x < of(low) || x > of(high), of(0.0), dy));

impl Clamp {
    /// Returns the bounds as the kernels of a dtype take them.
    fn bounds(&self, dtype: DType) -> Constants {
        let range = match dtype {
            DType::I64 => [i64::MIN as f64, i64::MAX as f64],
            DType::I32 => [f64::from(i32::MIN), f64::from(i32::MAX)],
            DType::U8 | DType::Bool => [0.0, 255.0],
            DType::F32 | DType::F64 | DType::F16 | DType::BF16 => return [self.min.0, self.max.0],
        };
        [self.min.0.ceil(), self.max.0.floor()].map(|bound| bound.clamp(range[0], range[1]))
    }
}

impl Pointwise for Clamp {
    const NAME: &'static str = "clamp";
    const ARITY: usize = 1;

    /// Never decreases.
    fn algebra(&self) -> Algebra {
        Algebra::Monotone
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        if self.min.0.is_nan() || self.max.0.is_nan() {
            let given = format!("{:?} to {:?} for {}", self.min, self.max, list(ins));
            return Err(Error::invalid(Self::NAME, "a bound is NaN", given, "give infinities for no bounds"));
        }
        numbers(Self::NAME, ins)
    }

    fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        cpu::compute(Self::NAME, &ClampFormula::LOOPS, self.bounds(ins[0].dtype()), ins)
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        let bounds = self.bounds(ins[0].dtype());
        cuda::map(ClampFormula::FORMULA, ins, &bounds)
    }

    fn flops(&self) -> u64 {
        ClampFormula::FLOPS
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        let writer = GradientWriter::new(g);
        let ([x], dy) = (writer.operands(), writer.grad());
        let Clamp { min, max, open } = *self;
        writer.set(x, dy.then(ClampGrad { min, max, open }, &[x]));
        writer.finish()
    }
}

impl Pointwise for ClampGrad {
    const NAME: &'static str = "clamp_grad";
    const ARITY: usize = 2;

    /// Selects `dy` or 0, so the additional rows accept any partial `dy` if `x` is replicated.
    fn algebra(&self) -> Algebra {
        Algebra::Opaque
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        floats(Self::NAME, ins)
    }

    fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        cpu::compute(Self::NAME, &WithinFormula::LOOPS, self.bounds(ins[0].dtype()), ins)
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        let bounds = self.bounds(ins[0].dtype());
        cuda::map(WithinFormula::FORMULA, ins, &bounds)
    }

    fn flops(&self) -> u64 {
        WithinFormula::FLOPS
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        let writer = GradientWriter::new(g);
        let ([dy, x], d) = (writer.operands(), writer.grad());
        if writer.needs(dy) {
            writer.set(dy, d.then(*self, &[x]));
        }
        if writer.needs(x) {
            writer.set(x, d.zero());
        }
        writer.finish()
    }

    fn more_rows(&self, ins: &[Meta]) -> Vec<Row> {
        select_rows(ins[0].dtype)
    }
}

impl ClampGrad {
    /// Returns the smallest and the largest value with a gradient, in the dtype of the computation. Infinities are no
    /// bounds, so they have one.
    fn bounds(&self, dtype: DType) -> Constants {
        let (low, high) = (self.min.0, self.max.0);
        let [above, below] = match dtype {
            DType::F64 => [low.next_up(), high.next_down()],
            DType::F32 | DType::F16 | DType::BF16 | DType::I64 | DType::I32 | DType::U8 | DType::Bool => {
                [f64::from((low as f32).next_up()), f64::from((high as f32).next_down())]
            }
        };
        let is_open = |bound: f64| self.open && bound.is_finite();
        [if is_open(low) { above } else { low }, if is_open(high) { below } else { high }]
    }
}

pub(super) fn samples() -> Vec<Sample> {
    let of = |[min, max]: [f64; 2], open| (Bits(min), Bits(max), open);
    let clamp = |(min, max, open)| Clamp { min, max, open };
    let grad = |(min, max, open)| ClampGrad { min, max, open };
    let all = vec![
        Sample::new(clamp(of([-1.5, 2.0], false)), [Input::ints([5, 3])]),
        Sample::new(clamp(of([-2.0, f64::INFINITY], true)), [Input::ints([7])]),
        Sample::new(clamp(of([1.5, 5.0], false)), [Input::index([7], 9)]),
        Sample::new(clamp(of([0.0, 1.0], false)), [Input::ints([0, 3])]),
        Sample::new(grad(of([-1.5, 2.0], false)), [Input::ints([5, 3]), Input::ints([5, 3])]),
        Sample::new(grad(of([-1.0, 2.0], true)), [Input::ints([7]), Input::ints([7])]),
    ];
    all.into_iter().map(Sample::not_smooth).collect()
}

/// Returns the operators of this file.
pub(super) fn operators() -> Vec<Arc<dyn Op>> {
    let bounds = [(-1.0, 1.0), (0.5, f64::INFINITY), (f64::NEG_INFINITY, 2.5), (3.0, -3.0), (-1e300, 300.0)];
    let mut all: Vec<Arc<dyn Op>> = Vec::new();
    for (low, high) in bounds {
        let (min, max) = (Bits(low), Bits(high));
        all.push(Arc::new(Clamp { min, max, open: false }));
        all.push(Arc::new(ClampGrad { min, max, open: low < high }));
    }
    all
}

/// The CUDA sources of this file.
pub(super) const SOURCES: &[cuda::KernelSource] =
    &[ClampFormula::FORMULA.source, WithinFormula::FORMULA.source];

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::ops::eval_whole;

    fn clamp(min: f64, max: f64, x: Tensor) -> Tensor {
        let op = Clamp { min: Bits(min), max: Bits(max), open: false };
        eval_whole(&op, &[x]).expect("legal").remove(0)
    }

    #[test]
    fn bounds_fit_the_dtype() {
        let x = || Tensor::from_vec(vec![i64::MIN, -1, 0, 7, i64::MAX], [5]).expect("five");
        let whole = clamp(f64::NEG_INFINITY, f64::INFINITY, x()).to_vec::<i64>().expect("i64");
        assert_eq!(whole, x().to_vec::<i64>().expect("i64"));
        assert_eq!(clamp(-0.5, 6.5, x()).to_vec::<i64>().expect("i64"), [0, 0, 0, 6, 6]);
        let bytes = || Tensor::from_vec(vec![0u8, 100, 255], [3]).expect("three");
        assert_eq!(clamp(-5.0, 300.0, bytes()).to_vec::<u8>().expect("u8"), [0, 100, 255]);
        assert_eq!(clamp(50.0, 200.0, bytes()).to_vec::<u8>().expect("u8"), [50, 100, 200]);
        assert_eq!(clamp(5.0, 1.0, bytes()).to_vec::<u8>().expect("u8"), [1; 3]);
    }

    #[test]
    fn nan_stays_and_a_nan_bound_is_refused() {
        let x = Tensor::from_vec(vec![f32::NAN, -0.0, f32::INFINITY], [3]).expect("three");
        let y = clamp(0.0, 6.0, x.clone()).to_vec::<f32>().expect("f32");
        assert!(y[0].is_nan() && y[1].to_bits() == 0 && y[2] == 6.0, "{y:?}");
        let refused = Clamp { min: Bits(f64::NAN), max: Bits(1.0), open: false }.infer(&[Meta::of(&x)]);
        assert!(refused.unwrap_err().to_string().starts_with("clamp: a bound is NaN; got NaN to 1.0"));
    }

    #[test]
    fn the_gradient_at_a_bound_is_zero_if_the_interval_is_open() {
        let at = |open, x: Tensor| {
            let op = ClampGrad { min: Bits(-1.0), max: Bits(0.1), open };
            let dy = Tensor::full(x.dtype(), x.shape().clone(), 3.0);
            eval_whole(&op, &[dy, x]).expect("legal")[0].to_f64_vec()
        };
        let x =
            || Tensor::from_vec(vec![-1.0f32, (-1.0f32).next_up(), 0.1, f32::NAN, 0.2], [5]).expect("five");
        assert_eq!(at(false, x()), [3.0, 3.0, 3.0, 3.0, 0.0]);
        assert_eq!(at(true, x()), [0.0, 3.0, 0.0, 3.0, 0.0]);
        let halves = Tensor::from_vec([-1.0, -0.996, 0.0].map(bf16::from_f64).to_vec(), [3]).expect("three");
        assert_eq!(at(true, halves), [0.0, 3.0, 3.0]);
    }
}
