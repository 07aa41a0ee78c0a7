//! `silu`: the sigmoid linear unit, also called swish (Elfwing, Uchibe, Doya 2017).

use super::pointwise::one_float;
use super::{Algebra, Input, Meta, Pointwise, Sample, SiluGrad, Vjp, Windows, reuse};
use crate::error::Result;
use crate::tensor::cpu::{Real, UnaryF};
use crate::tensor::{DType, Tensor, cuda};

/// `x · sigmoid(x)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Silu;

impl Pointwise for Silu {
    const NAME: &'static str = "silu";
    const ARITY: usize = 1;

    /// Not linear, and it falls before it rises.
    fn algebra(&self) -> Algebra {
        Algebra::Opaque
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        one_float(Self::NAME, ins)
    }

    fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        reuse::float_unary(Self::NAME, ins, *self)
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        cuda::map(cuda::formula!("silu"), ins, &[])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        let (dy, x) = (g.grad(0), g.input(0));
        let dx = g.apply(SiluGrad, &[dy, x])?;
        g.set(0, dx);
        Ok(())
    }
}

impl UnaryF for Silu {
    #[inline(always)]
    fn apply<A: Real>(self, x: A) -> A {
        // Minus infinity times 0 would be NaN; long before it the sigmoid is 0.
        let x = if x < A::of(-1e4) { A::of(-1e4) } else { x };
        x * x.sigmoid()
    }
}

pub(super) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Silu, [Input::ints([5, 3])]),
        Sample::new(Silu, [Input::ints([7])]),
        Sample::new(Silu, [Input::ints([])]),
        Sample::new(Silu, [Input::ints([0, 3])]),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::eval_whole;
    use super::*;

    #[test]
    fn has_its_limits() {
        let x =
            Tensor::from_vec(vec![f64::NEG_INFINITY, -2.0, 0.0, f64::INFINITY, f64::NAN], [5]).expect("five");
        let y = eval_whole(&Silu, &[x]).expect("legal")[0].to_f64_vec();
        assert_eq!((y[0], y[2], y[3]), (0.0, 0.0, f64::INFINITY));
        assert!((y[1] + 2.0 / (1.0 + 2f64.exp())).abs() < 1e-15 && y[4].is_nan());
    }
}
