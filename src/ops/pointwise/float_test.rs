//! `float_test`: tests elements for NaN, infinite or finite values.

use super::record::{Pointwise, floats};
use crate::error::Result;
use crate::ops::{Algebra, AxisPlacement, Input, Meta, Row, Sample, Vjp, Windows};
use crate::tensor::cpu::{self, FloatPredicateLoops, Real, is_nan};
use crate::tensor::{DType, ReduceOp, Tensor, cuda};

/// Tests each floating-point element: `x -> bool`. Applied by [`DTensor::isnan`](crate::dtensor::DTensor::isnan),
/// [`DTensor::isinf`](crate::dtensor::DTensor::isinf) and [`DTensor::isfinite`](crate::dtensor::DTensor::isfinite).
///
/// ```
/// use isoshard::{ops::{FloatTest, FloatTestKind, eval_whole}, tensor::Tensor};
/// let x = Tensor::from_vec(vec![1.0, f64::NAN, f64::INFINITY], [3])?;
/// let finite = eval_whole(&FloatTest { kind: FloatTestKind::Finite }, &[x])?.remove(0);
/// assert_eq!(finite.to_vec::<bool>()?, [true, false, false]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FloatTest {
    /// The property.
    pub kind: FloatTestKind,
}

/// The property that a [`FloatTest`] tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FloatTestKind {
    /// Not a number.
    Nan,
    /// An infinity of either sign.
    Infinite,
    /// Neither NaN nor infinite.
    Finite,
}

impl Pointwise for FloatTest {
    const NAME: &'static str = "float_test";
    const ARITY: usize = 1;

    /// Partial sums are reduced first. The additional rows accept partial maxima and minima in a test for NaN.
    fn algebra(&self) -> Algebra {
        Algebra::Opaque
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        floats(Self::NAME, ins).map(|_| DType::Bool)
    }

    fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        let loops = match self.kind {
            FloatTestKind::Nan => &const { FloatPredicateLoops::of::<IsNan>() },
            FloatTestKind::Infinite => &const { FloatPredicateLoops::of::<IsInfinite>() },
            FloatTestKind::Finite => &const { FloatPredicateLoops::of::<IsFinite>() },
        };
        cpu::test(Self::NAME, loops, &ins[0])
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        let formula = match self.kind {
            FloatTestKind::Nan => cuda::formula!("float_test", "float_test_nan"),
            FloatTestKind::Infinite => cuda::formula!("float_test", "float_test_infinite"),
            FloatTestKind::Finite => cuda::formula!("float_test", "float_test_finite"),
        };
        cuda::map_to(formula, ins, DType::Bool)
    }

    fn flops(&self) -> u64 {
        match self.kind {
            FloatTestKind::Nan => 1,
            FloatTestKind::Infinite | FloatTestKind::Finite => 2,
        }
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        g.no_gradients("bools have no derivative");
        Ok(())
    }

    /// A maximum or minimum is NaN if any contribution is. The maximum of bools is "any".
    fn more_rows(&self, _: &[Meta]) -> Vec<Row> {
        let any = AxisPlacement::P(ReduceOp::Max);
        match self.kind {
            FloatTestKind::Nan => {
                [ReduceOp::Max, ReduceOp::Min].map(|op| Row::new([AxisPlacement::P(op)], [any])).to_vec()
            }
            FloatTestKind::Infinite | FloatTestKind::Finite => vec![],
        }
    }
}

macro_rules! float_tests {
    ($($name:ident($x:ident) = $value:expr;)*) => {$(
        struct $name;

        impl cpu::FloatPredicate for $name {
            #[inline(always)]
            fn at<A: Real>($x: A) -> bool {
                $value
            }
        }
    )*};
}

float_tests! {
    IsNan(x) = is_nan(x);
    IsInfinite(x) = Real::abs(x) == A::HIGHEST;
    IsFinite(x) = Real::abs(x) < A::HIGHEST;
}

pub(super) fn samples() -> Vec<Sample> {
    let of = |kind, x: Input| Sample::new(FloatTest { kind }, [x]).not_smooth();
    vec![
        of(FloatTestKind::Nan, Input::ints([5, 3])),
        of(FloatTestKind::Infinite, Input::ints([7])),
        of(FloatTestKind::Finite, Input::ints([7])),
        of(FloatTestKind::Finite, Input::ints([0, 3])),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::eval_whole;

    #[test]
    fn every_kind_by_its_definition() {
        use FloatTestKind::{Finite, Infinite, Nan};
        let values = [0.0, -0.0, f32::MAX, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN, 1e-45];
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let x = Tensor::from_vec(values.to_vec(), [8]).expect("eight").cast(dtype).expect("on the CPU");
            for (kind, test) in [
                (Nan, f64::is_nan as fn(f64) -> bool),
                (Infinite, f64::is_infinite),
                (Finite, f64::is_finite),
            ] {
                let got = eval_whole(&FloatTest { kind }, std::slice::from_ref(&x)).expect("legal");
                let want: Vec<bool> = x.to_f64_vec().into_iter().map(test).collect();
                assert_eq!(got[0].to_vec::<bool>().expect("bools"), want, "{kind:?} in {dtype}");
            }
        }
    }
}
