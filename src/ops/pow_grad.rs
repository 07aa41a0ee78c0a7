//! `pow_grad_base` and `pow_grad_exponent`: the two derivatives of `pow`, each in one pass and without the NaNs that an
//! expression would make of 0 times infinity.

use super::pointwise::one_float;
use super::pow::power;
use super::{
    Add, Algebra, Div, Input, Log, Meta, Mul, Pointwise, Pow, Row, Sample, Shift, Slot, Vjp, Windows, reuse,
};
use crate::error::Result;
use crate::tensor::cpu::{Real, TernaryF};
use crate::tensor::{DType, Tensor, cuda};

/// Of operands `(dz, x, y)`: `dz · y · x^(y - 1)`, and 0 where `y` is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PowGradBase;

/// Of operands `(dz, x, z)`, where `z` is some `x^y`: `dz · z · ln x`, and 0 where `x` or `z` is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PowGradExponent;

impl Pointwise for PowGradBase {
    const NAME: &'static str = "pow_grad_base";
    const ARITY: usize = 3;

    /// Linear in the gradient that comes in.
    fn algebra(&self) -> Algebra {
        Algebra::Linear
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        one_float(Self::NAME, ins)
    }

    fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        reuse::float_ternary(Self::NAME, ins, *self)
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        cuda::map(cuda::formula!("pow_grad", "pow_grad_base"), ins, &[])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        let (d, dz, x, y) = (g.grad(0), g.input(0), g.input(1), g.input(2));
        if g.needs(0) {
            let ddz = g.apply(PowGradBase, &[d, x, y])?;
            g.set(0, ddz);
        }
        if !g.needs(1) && !g.needs(2) {
            return Ok(());
        }
        let both = g.apply(Mul, &[d, dz])?;
        let both_y = g.apply(Mul, &[both, y])?;
        let less = g.apply(Shift::by(-1.0), &[y])?;
        if g.needs(1) {
            let dx = g.apply(PowGradBase, &[both_y, x, less])?;
            g.set(1, dx);
        }
        if g.needs(2) {
            // x^(y-1) (1 + y ln x).
            let p = g.apply(Pow, &[x, less])?;
            let by_power = g.apply(PowGradExponent, &[both_y, x, p])?;
            let by_factor = g.apply(Mul, &[both, p])?;
            let dy = g.apply(Add, &[by_power, by_factor])?;
            g.set(2, dy);
        }
        Ok(())
    }
}

impl Pointwise for PowGradExponent {
    const NAME: &'static str = "pow_grad_exponent";
    const ARITY: usize = 3;

    /// Linear in the gradient that comes in.
    fn algebra(&self) -> Algebra {
        Algebra::Linear
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        one_float(Self::NAME, ins)
    }

    fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        reuse::float_ternary(Self::NAME, ins, *self)
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        cuda::map(cuda::formula!("pow_grad", "pow_grad_exponent"), ins, &[])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        let (d, dz, x, z) = (g.grad(0), g.input(0), g.input(1), g.input(2));
        if g.needs(0) {
            let ddz = g.apply(PowGradExponent, &[d, x, z])?;
            g.set(0, ddz);
        }
        if !g.needs(1) && !g.needs(2) {
            return Ok(());
        }
        let both = g.apply(Mul, &[d, dz])?;
        if g.needs(1) {
            let dx = g.apply(Mul, &[both, z])?;
            let dx = g.apply(Div, &[dx, x])?;
            g.set(1, dx);
        }
        if g.needs(2) {
            let ln = g.apply(Log, &[x])?;
            let dz = g.apply(Mul, &[both, ln])?;
            g.set(2, dz);
        }
        Ok(())
    }

    /// Linear in the power as well.
    fn more_rows(&self, _: &[Meta]) -> Vec<Row> {
        vec![Row::new([Slot::R, Slot::R, Slot::SUM], [Slot::SUM])]
    }
}

impl TernaryF for PowGradBase {
    #[inline(always)]
    fn apply<A: Real>(self, dz: A, x: A, y: A) -> A {
        if y == A::ZERO { A::ZERO } else { dz * (y * power(x, y - A::ONE)) }
    }
}

impl TernaryF for PowGradExponent {
    #[inline(always)]
    fn apply<A: Real>(self, dz: A, x: A, z: A) -> A {
        if x == A::ZERO || z == A::ZERO { A::ZERO } else { dz * (z * x.ln()) }
    }
}

pub(super) fn samples() -> Vec<Sample> {
    let three = |x: Input, y: Input| [Input::ints(x.meta.shape.clone()), x, y];
    vec![
        Sample::new(PowGradBase, three(Input::positive([5, 3]), Input::positive([5, 3]))).rounded(4),
        Sample::new(PowGradBase, three(Input::positive([7]), Input::ints([7]))).rounded(4),
        Sample::new(PowGradBase, three(Input::ints([0, 3]), Input::ints([0, 3]))),
        Sample::new(PowGradExponent, three(Input::positive([5, 3]), Input::positive([5, 3]))).rounded(4),
        Sample::new(PowGradExponent, three(Input::positive([]), Input::positive([]))).rounded(4),
        Sample::new(PowGradExponent, three(Input::ints([0, 3]), Input::ints([0, 3]))),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::eval_whole;
    use super::*;

    #[test]
    fn zeros_have_gradients_without_nan() {
        let of = |v: [f64; 3]| Tensor::from_vec(v.to_vec(), [3]).expect("three");
        let (dz, x, y) = (of([1.0; 3]), of([0.0, 0.0, 2.0]), of([0.0, 3.0, 0.0]));
        let dx = eval_whole(&PowGradBase, &[dz.clone(), x.clone(), y.clone()]).expect("legal");
        assert_eq!(dx[0].to_f64_vec(), [0.0; 3]);
        let z = eval_whole(&Pow, &[x.clone(), y]).expect("legal");
        let dy = eval_whole(&PowGradExponent, &[dz, x, z[0].clone()]).expect("legal")[0].to_f64_vec();
        assert_eq!(dy[..2], [0.0; 2]);
        assert!((dy[2] - std::f64::consts::LN_2).abs() < 1e-15);
    }
}
