//! `gelu_grad`: the derivative of `gelu`, in one pass.

use super::gelu::{C, V, bounded};
use super::pointwise::one_float;
use super::{
    Add, Algebra, Exp, GeluKind, Input, Meta, Mul, Pointwise, Ref, Sample, Scale, Shift, Sigmoid,
    SigmoidGrad, Vjp, Windows, reuse,
};
use crate::error::Result;
use crate::tensor::cpu::{BinaryF, Real};
use crate::tensor::{DType, Tensor, cuda};

/// Of operands `(dy, x)`: `dy · gelu'(x)`, the approximation's own derivative where one is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GeluGrad {
    /// As in [`super::Gelu`].
    pub approximate: GeluKind,
}

impl Pointwise for GeluGrad {
    const NAME: &'static str = "gelu_grad";
    const ARITY: usize = 2;

    /// Linear in the gradient that comes in.
    fn algebra(&self) -> Algebra {
        Algebra::Linear
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        one_float(Self::NAME, ins)
    }

    fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        match self.approximate {
            GeluKind::Erf => reuse::float_binary(Self::NAME, ins, ErfGrad),
            GeluKind::Tanh => reuse::float_binary(Self::NAME, ins, TanhGrad),
        }
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        let formula = match self.approximate {
            GeluKind::Erf => cuda::formula!("gelu_grad", "gelu_grad_erf"),
            GeluKind::Tanh => cuda::formula!("gelu_grad", "gelu_grad_tanh"),
        };
        cuda::map(formula, ins, &[])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        let (ddx, dy, x) = (g.grad(0), g.input(0), g.input(1));
        if g.needs(0) {
            let ddy = g.apply(*self, &[ddx, x])?;
            g.set(0, ddy);
        }
        if g.needs(1) {
            let both = g.apply(Mul, &[ddx, dy])?;
            let dx = match self.approximate {
                GeluKind::Erf => curved_erf(g, both, x)?,
                GeluKind::Tanh => curved_tanh(g, both, x)?,
            };
            g.set(1, dx);
        }
        Ok(())
    }
}

/// `d · φ(x) (2 - x²)`, with `φ` the normal density.
fn curved_erf(g: &mut Vjp, d: Ref, x: Ref) -> Result<Ref> {
    let square = g.apply(Mul, &[x, x])?;
    let half = g.apply(Scale::by(-0.5), &[square])?;
    let density = g.apply(Exp, &[half])?;
    let density = g.apply(Scale::by(DENSITY), &[density])?;
    let bend = g.apply(Scale::by(-1.0), &[square])?;
    let bend = g.apply(Shift::by(2.0), &[bend])?;
    let bend = g.apply(Mul, &[bend, density])?;
    g.apply(Mul, &[d, bend])
}

/// `d · s (1 - s) (2 v' + x ((1 - 2 s) v'² + v''))`, with `v = V (x + C x³)` and `s = sigmoid(v)`.
fn curved_tanh(g: &mut Vjp, d: Ref, x: Ref) -> Result<Ref> {
    let square = g.apply(Mul, &[x, x])?;
    let v = g.apply(Scale::by(V * C), &[square])?;
    let v = g.apply(Shift::by(V), &[v])?;
    let v = g.apply(Mul, &[v, x])?;
    let s = g.apply(Sigmoid, &[v])?;
    let slope = g.apply(Scale::by(3.0 * V * C), &[square])?;
    let slope = g.apply(Shift::by(V), &[slope])?;
    let sign = g.apply(Scale::by(-2.0), &[s])?;
    let sign = g.apply(Shift::by(1.0), &[sign])?;
    let bend = g.apply(Mul, &[slope, slope])?;
    let bend = g.apply(Mul, &[bend, sign])?;
    let second = g.apply(Scale::by(6.0 * V * C), &[x])?;
    let bend = g.apply(Add, &[bend, second])?;
    let bend = g.apply(Mul, &[bend, x])?;
    let twice = g.apply(Scale::by(2.0), &[slope])?;
    let bend = g.apply(Add, &[bend, twice])?;
    let bend = g.apply(Mul, &[bend, d])?;
    g.apply(SigmoidGrad, &[bend, s])
}

/// `1 / √(2π)`.
const DENSITY: f64 = 0.5 * std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2;

#[derive(Clone, Copy)]
struct ErfGrad;

impl BinaryF for ErfGrad {
    #[inline(always)]
    fn apply<A: Real>(self, dy: A, x: A) -> A {
        let x = bounded(x);
        let phi = A::of(0.5).mul_add((x * A::of(std::f64::consts::FRAC_1_SQRT_2)).erf(), A::of(0.5));
        let density = (x * x * A::of(-0.5)).exp() * A::of(DENSITY);
        dy * x.mul_add(density, phi)
    }
}

#[derive(Clone, Copy)]
struct TanhGrad;

impl BinaryF for TanhGrad {
    #[inline(always)]
    fn apply<A: Real>(self, dy: A, x: A) -> A {
        let x = bounded(x);
        let square = x * x;
        let s = (x * square.mul_add(A::of(V * C), A::of(V))).sigmoid();
        let slope = square.mul_add(A::of(3.0 * V * C), A::of(V));
        dy * (s * (x * (A::ONE - s)).mul_add(slope, A::ONE))
    }
}

pub(super) fn samples() -> Vec<Sample> {
    let sample = |approximate, shape: &[usize]| {
        Sample::new(GeluGrad { approximate }, [Input::ints(shape), Input::ints(shape)]).rounded(4)
    };
    let shapes: [&[usize]; 4] = [&[5, 3], &[7], &[], &[0, 3]];
    [GeluKind::Erf, GeluKind::Tanh].into_iter().flat_map(|k| shapes.map(|s| sample(k, s))).collect()
}

#[cfg(test)]
mod tests {
    use super::super::eval_whole;
    use super::*;

    #[test]
    fn has_its_limits() {
        let x = Tensor::from_vec(vec![f32::NEG_INFINITY, -2e4, 0.0, 2e4, f32::INFINITY], [5]).expect("five");
        let dy = Tensor::full(DType::F32, [5], 1.0);
        for approximate in [GeluKind::Erf, GeluKind::Tanh] {
            let dx = eval_whole(&GeluGrad { approximate }, &[dy.clone(), x.clone()]).expect("legal");
            assert_eq!(dx[0].to_f64_vec(), [0.0, 0.0, 0.5, 1.0, 1.0], "{approximate:?}");
        }
    }
}
