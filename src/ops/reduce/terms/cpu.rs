//! CPU kernels of sums of terms: the terms of a block.

use super::sum_term::SumTerm;
use crate::error::Result;
use crate::tensor::cpu::{Kernel, Real, dispatch, map};
use crate::tensor::{DType, Tensor, cpu};

/// Computes the terms of a block in `with`'s dtype, which is f32 or f64.
///
/// # Errors
/// Returns an error if the shapes do not fit.
pub(super) fn terms(term: SumTerm, x: &Tensor, with: &Tensor) -> Result<Tensor> {
    let x = cpu::cast(x, with.dtype())?;
    let with = with.expand(x.shape())?;
    match with.dtype() {
        DType::F64 => map::<f64, f64>(&[&x, &with], &|ins, out| write_terms(term, ins[0], ins[1], out)),
        _ => map::<f32, f32>(&[&x, &with], &|ins, out| write_terms(term, ins[0], ins[1], out)),
    }
}

fn write_terms<A: Real>(term: SumTerm, x: &[A], with: &[A], out: &mut [A]) {
    dispatch(TermLoop { term, x, with, out });
}

/// The loop over one run of elements.
struct TermLoop<'a, A> {
    term: SumTerm,
    x: &'a [A],
    with: &'a [A],
    out: &'a mut [A],
}

impl<A: Real> Kernel for TermLoop<'_, A> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let TermLoop { term, x, with, out } = self;
        let all = out.iter_mut().zip(x.iter().zip(with));
        match term {
            SumTerm::Deviation => all.for_each(|(o, (&x, &m))| *o = x - m),
            SumTerm::SquaredDeviation => all.for_each(|(o, (&x, &m))| *o = (x - m) * (x - m)),
            SumTerm::ExpDifference => all.for_each(|(o, (&x, &m))| *o = (x - m).exp()),
            SumTerm::Power(p) if p.0 == 2.0 => all.for_each(|(o, (&x, &m))| *o = (x * m) * (x * m)),
            SumTerm::Power(p) if (1.0..=8.0).contains(&p.0) && p.0.fract() == 0.0 => {
                for (o, (&x, &m)) in all {
                    let y = (x * m).abs();
                    *o = (1..p.0 as u32).fold(y, |product, _| product * y);
                }
            }
            SumTerm::Power(p) => all.for_each(|(o, (&x, &m))| *o = (A::of(p.0) * (x * m).abs().ln()).exp()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Bits;
    use crate::ops::reduce::blocks::sum_blocks;
    use crate::ops::reduce::kept_shape;
    use crate::tensor::ReduceOp;
    use crate::tensor::Shape;

    fn noise(shape: impl Into<Shape>) -> Tensor {
        let shape = shape.into();
        let value = |i: usize| ((i * 7919 + 13) % 10_007) as f32 * 0.001_37 - 6.5;
        Tensor::from_vec((0..shape.numel()).map(value).collect(), shape).unwrap()
    }

    /// Blocks change no bit: the terms of the whole tensor at once, then one reduction.
    #[test]
    fn blocks_follow_the_tree() {
        for (shape, dims) in [
            (&[300, 701][..], &[0][..]),
            (&[300, 701], &[1]),
            (&[300, 701], &[0, 1]),
            (&[5, 170_001], &[1]),
            (&[170_001], &[0]),
            (&[70_003, 3], &[0]),
            (&[9, 110, 83], &[0, 2]),
            (&[9, 110, 83], &[1]),
            (&[1, 90_000, 1], &[0, 1, 2]),
        ] {
            let (x, with) = (noise(shape), noise(kept_shape(&shape.into(), dims)));
            for term in [
                SumTerm::Deviation,
                SumTerm::SquaredDeviation,
                SumTerm::ExpDifference,
                SumTerm::Power(Bits(3.0)),
                SumTerm::Power(Bits(0.5)),
            ] {
                let whole = terms(term, &x, &with).unwrap();
                let want = cpu::reduce("sum", &whole, dims, ReduceOp::Sum, true).unwrap();
                let of = |x: &Tensor, with: Option<&Tensor>| terms(term, x, with.unwrap());
                let got = sum_blocks(&x, Some(&with), dims, DType::F32, &of).unwrap();
                assert_eq!(got.as_bytes().unwrap(), want.as_bytes().unwrap(), "{shape:?} {dims:?} {term:?}");
                let order: Vec<usize> = (0..shape.len()).rev().collect();
                let turned = x.permute(&order).unwrap().contiguous().unwrap().permute(&order).unwrap();
                let got = sum_blocks(&turned, Some(&with), dims, DType::F32, &of).unwrap();
                assert_eq!(got.as_bytes().unwrap(), want.as_bytes().unwrap(), "{shape:?} {dims:?} {term:?}");
            }
        }
    }
}
