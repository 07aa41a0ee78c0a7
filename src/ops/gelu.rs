//! `gelu`: the Gaussian error linear unit (Hendrycks, Gimpel 2016), exact or by the usual approximation.

use super::pointwise::one_float;
use super::{Algebra, GeluGrad, Input, Meta, Pointwise, Sample, Vjp, Windows, reuse};
use crate::error::Result;
use crate::tensor::cpu::{Real, UnaryF};
use crate::tensor::{DType, Tensor, cuda};

/// `x · Φ(x)`, with `Φ` the normal distribution function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Gelu {
    /// How `Φ` is computed.
    pub approximate: GeluKind,
}

/// How `Φ`, the normal distribution function, is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GeluKind {
    /// `(1 + erf(x / √2)) / 2`.
    Erf,
    /// `(1 + tanh(√(2/π) (x + 0.044715 x³))) / 2`.
    Tanh,
}

impl Pointwise for Gelu {
    const NAME: &'static str = "gelu";
    const ARITY: usize = 1;

    /// Not linear, and it falls before it rises.
    fn algebra(&self) -> Algebra {
        Algebra::Opaque
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        one_float(Self::NAME, ins)
    }

    fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        match self.approximate {
            GeluKind::Erf => reuse::float_unary(Self::NAME, ins, Erf),
            GeluKind::Tanh => reuse::float_unary(Self::NAME, ins, Tanh),
        }
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        let formula = match self.approximate {
            GeluKind::Erf => cuda::formula!("gelu", "gelu_erf"),
            GeluKind::Tanh => cuda::formula!("gelu", "gelu_tanh"),
        };
        cuda::map(formula, ins, &[])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        let (dy, x) = (g.grad(0), g.input(0));
        let dx = g.apply(GeluGrad { approximate: self.approximate }, &[dy, x])?;
        g.set(0, dx);
        Ok(())
    }
}

/// `2 √(2/π)`: the approximation is `x · sigmoid(V · (x + C x³))`, since `(1 + tanh(v / 2)) / 2 = sigmoid(v)`.
pub(super) const V: f64 = 2.0 * std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2;
/// The cubic term's factor.
pub(super) const C: f64 = 0.044715;

/// Bounds beyond which `Φ` is 0 or 1, and `x` to the third power finite; NaN stays.
#[inline(always)]
pub(super) fn bounded<A: Real>(x: A) -> A {
    if x.abs() > A::of(1e4) { A::of(1e4).copysign(x) } else { x }
}

#[derive(Clone, Copy)]
struct Erf;

impl UnaryF for Erf {
    #[inline(always)]
    fn apply<A: Real>(self, x: A) -> A {
        // Minus infinity times 0 would be NaN.
        let b = bounded(x);
        let phi = A::of(0.5).mul_add((b * A::of(std::f64::consts::FRAC_1_SQRT_2)).erf(), A::of(0.5));
        (if x < b { b } else { x }) * phi
    }
}

#[derive(Clone, Copy)]
struct Tanh;

impl UnaryF for Tanh {
    #[inline(always)]
    fn apply<A: Real>(self, x: A) -> A {
        let b = bounded(x);
        let v = b * (b * b).mul_add(A::of(V * C), A::of(V));
        (if x < b { b } else { x }) * v.sigmoid()
    }
}

pub(super) fn samples() -> Vec<Sample> {
    let kinds = [GeluKind::Erf, GeluKind::Tanh];
    let sample = |approximate, x| Sample::new(Gelu { approximate }, [x]);
    kinds
        .into_iter()
        .flat_map(|k| {
            [Input::ints([5, 3]), Input::positive([7]), Input::ints([]), Input::ints([0, 3])]
                .map(|x| sample(k, x))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::eval_whole;
    use super::*;

    /// From tables of the normal distribution function, and from the formula with the library's tanh.
    #[test]
    fn values_by_definition_and_limits() {
        let points = [f64::NEG_INFINITY, -3.0, -1.0, 0.0, 0.5, 2.0, f64::INFINITY, f64::NAN];
        let x = Tensor::from_vec(points.to_vec(), [8]).expect("eight");
        let at = |approximate| {
            eval_whole(&Gelu { approximate }, std::slice::from_ref(&x)).expect("legal")[0].to_f64_vec()
        };
        let erf = at(GeluKind::Erf);
        let want = [
            0.0,
            -0.004_049_694_094_890_285,
            -0.158_655_253_931_457_07,
            0.0,
            0.345_731_230_637_006_56,
            1.954_499_736_103_641_6,
        ];
        for (got, want) in erf.iter().zip(want) {
            assert!((got - want).abs() < 1e-14, "{got}, wanted {want}");
        }
        let tanh = at(GeluKind::Tanh);
        for (got, x) in tanh[1..6].iter().zip(&points[1..6]) {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            assert!((got - 0.5 * x * (1.0 + u.tanh())).abs() < 1e-15, "at {x}");
        }
        for y in [erf, tanh] {
            assert!(y[0] == 0.0 && y[6] == f64::INFINITY && y[7].is_nan());
        }
    }
}
