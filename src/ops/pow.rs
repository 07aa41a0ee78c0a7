//! `pow`: one tensor to the power of another, element by element.

use super::pointwise::one_float;
use super::{Algebra, Input, Meta, Pointwise, PowGradBase, PowGradExponent, Sample, Vjp, Windows, reuse};
use crate::error::Result;
use crate::tensor::cpu::{BinaryF, Real, is_nan};
use crate::tensor::{DType, Tensor, cuda};

/// `x^y`, with IEEE 754's special cases: 1 where `y` is 0 or `x` is 1, NaN for a negative `x` unless `y` is an integer.
///
/// Computed in f64 as `e^(y ln x)`: narrower dtypes are off by about half a unit in the last place, f64 by about
/// `|y ln x|` units. The gradients are 0 where an infinity or NaN would be a limit's: of `x` where `y` is 0, of `y` where
/// `x` is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pow;

impl Pointwise for Pow {
    const NAME: &'static str = "pow";
    const ARITY: usize = 2;

    /// Linear in neither.
    fn algebra(&self) -> Algebra {
        Algebra::Opaque
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        one_float(Self::NAME, ins)
    }

    fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        reuse::float_binary(Self::NAME, ins, *self)
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        cuda::map(cuda::formula!("pow"), ins, &[])
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        if g.needs(0) {
            let (dz, x, y) = (g.grad(0), g.input(0), g.input(1));
            let dx = g.apply(PowGradBase, &[dz, x, y])?;
            g.set(0, dx);
        }
        if g.needs(1) {
            let (dz, x, z) = (g.grad(0), g.input(0), g.output(0));
            let dy = g.apply(PowGradExponent, &[dz, x, z])?;
            g.set(1, dy);
        }
        Ok(())
    }
}

impl BinaryF for Pow {
    #[inline(always)]
    fn apply<A: Real>(self, x: A, y: A) -> A {
        power(x, y)
    }
}

/// `x^y`, as [`Pow`] says.
#[inline(always)]
pub(super) fn power<A: Real>(x: A, y: A) -> A {
    let (x, y) = (x.to_f64(), y.to_f64());
    let a = x.abs();
    let magnitude = Real::exp(y * Real::ln(a));
    let integer = y.floor() == y;
    let odd = integer && (y * 0.5).floor() != y * 0.5;
    let signed = if odd && !is_nan(x) { magnitude.copysign(x) } else { magnitude };
    let real = if x < 0.0 && a != f64::INFINITY && !integer && !is_nan(y) { f64::NAN } else { signed };
    let one = y == 0.0 || x == 1.0 || (a == 1.0 && y.abs() == f64::INFINITY);
    A::of(if one { 1.0 } else { real })
}

pub(super) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Pow, [Input::positive([5, 3]), Input::ints([5, 3])]),
        Sample::new(Pow, [Input::positive([7]), Input::positive([7])]),
        Sample::new(Pow, [Input::ints([7]), Input::ints([7])]).rough(),
        Sample::new(Pow, [Input::positive([]), Input::ints([])]),
        Sample::new(Pow, [Input::ints([0, 3]), Input::ints([0, 3])]),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::eval_whole;
    use super::*;

    const POINTS: [f64; 19] = [
        -f64::INFINITY,
        -1e3,
        -3.0,
        -2.5,
        -2.0,
        -1.0,
        -0.5,
        -0.0,
        0.0,
        1e-9,
        0.3,
        0.5,
        1.0,
        1.7,
        2.0,
        3.0,
        1e3,
        f64::INFINITY,
        f64::NAN,
    ];

    #[test]
    fn agrees_with_the_standard_library_on_every_pair_of_awkward_numbers() {
        let pairs: Vec<(f64, f64)> = POINTS.iter().flat_map(|&x| POINTS.map(|y| (x, y))).collect();
        let column = |f: fn(&(f64, f64)) -> f64| {
            Tensor::from_vec(pairs.iter().map(f).collect::<Vec<f64>>(), [pairs.len()]).expect("as many")
        };
        let got = eval_whole(&Pow, &[column(|p| p.0), column(|p| p.1)]).expect("legal")[0].to_f64_vec();
        for (&(x, y), z) in pairs.iter().zip(got) {
            let want = x.powf(y);
            let close = (z - want).abs() <= want.abs() * 2e-13 || (z.is_nan() && want.is_nan());
            let same_sign = z.is_nan() || z.is_sign_negative() == want.is_sign_negative();
            assert!((z == want || close) && same_sign, "{x}^{y} = {z}, wanted {want}");
        }
    }

    #[test]
    fn f32_is_rounded_from_f64() {
        let x = Tensor::from_vec(vec![1.1f32, 7.3, 0.02], [3]).expect("three");
        let y = Tensor::from_vec(vec![33.3f32, -2.2, 5.5], [3]).expect("three");
        let got = eval_whole(&Pow, &[x.clone(), y.clone()]).expect("legal")[0].to_vec::<f32>().expect("f32");
        let want: Vec<f32> =
            x.to_f64_vec().iter().zip(y.to_f64_vec()).map(|(x, y)| x.powf(y) as f32).collect();
        assert_eq!(got, want);
    }
}
