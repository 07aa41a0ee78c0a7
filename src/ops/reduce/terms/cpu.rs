//! CPU kernels of sums of terms: the terms of a block.

use isoshard_kernels::sums::{TermRows, Terms};

use super::sum_term::SumTerm;
use crate::error::Result;
use crate::ops::Bits;
use crate::tensor::cpu::{as_elements_mut, map};
use crate::tensor::{DType, Tensor, cpu};

/// Computes the terms of a block in `with`'s dtype, which is f32 or f64.
///
/// # Errors
/// Returns an error if the shapes do not fit.
pub(super) fn terms(term: SumTerm, x: &Tensor, with: &Tensor) -> Result<Tensor> {
    let x = cpu::cast(x, with.dtype())?;
    let with = with.expand(x.shape())?;
    match with.dtype() {
        DType::F64 => map::<f64, f64>(&[&x, &with], &|ins, out| {
            Terms::write_terms(term.of_numbers(), ins[0], ins[1], out)
        }),
        _ => map::<f32, f32>(&[&x, &with], &|ins, out| {
            Terms::write_terms(term.of_numbers(), ins[0], ins[1], out)
        }),
    }
}

/// Sums the squares of elements that nothing scales: of f32, in f64, with each value in `with` being 1. Returns `None` if
/// the term or the operands are others; f16 and bf16 would be cast as a whole first. The bits are those of [`sum_blocks`](crate::ops::reduce::blocks::sum_blocks).
///
/// # Errors
/// Returns an error if the elements are not in the CPU's memory.
pub(super) fn sum_squares(
    term: SumTerm,
    x: &Tensor,
    with: &Tensor,
    dims: &[usize],
) -> Result<Option<Tensor>> {
    let fits = term == SumTerm::Power(Bits(2.0)) && with.dtype() == DType::F64 && !dims.is_empty();
    if !fits || x.dtype() != DType::F32 || with.packed().as_slice::<f64>()?.iter().any(|&m| m != 1.0) {
        return Ok(None);
    }
    cpu::sum_of_squares(x, dims).map(Some)
}

/// The most elements of a row whose terms are written to a buffer, which stays in the nearest caches.
const LONGEST_ROW: usize = 4096;

/// Sums the terms of each row of a contiguous tensor over its last dim, which stays with extent 1. Returns `None` if the
/// operands are others, or the rows too long. The bits are those of [`sum_blocks`](crate::ops::reduce::blocks::sum_blocks).
///
/// # Errors
/// Returns an error if the elements are not in the CPU's memory.
pub(super) fn sum_rows(term: SumTerm, x: &Tensor, with: &Tensor, dims: &[usize]) -> Result<Option<Tensor>> {
    let Some(last) = x.shape().len().checked_sub(1) else { return Ok(None) };
    if dims != [last] || !(1..=LONGEST_ROW).contains(&x.shape()[last]) || !x.is_contiguous() {
        return Ok(None);
    }
    match (x.dtype(), with.dtype()) {
        (DType::F32, DType::F32) => rows_as::<f32, f32>(term, x, with).map(Some),
        (DType::F32, DType::F64) => rows_as::<f32, f64>(term, x, with).map(Some),
        (DType::F64, DType::F64) => rows_as::<f64, f64>(term, x, with).map(Some),
        _ => Ok(None),
    }
}

fn rows_as<S: TermRows<A>, A: Terms>(term: SumTerm, x: &Tensor, with: &Tensor) -> Result<Tensor> {
    let (n, values) = (x.shape()[x.shape().len() - 1], with.packed());
    let mut out = Tensor::uninit(A::DTYPE, with.shape());
    let (x, with, out_data) =
        (x.as_slice::<S>()?, values.as_slice::<A>()?, as_elements_mut::<A>(out.bytes_mut()));
    S::sum_term_rows(term.of_numbers(), x, n, with, out_data);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Bits;
    use crate::ops::reduce::blocks::sum_blocks;
    use crate::ops::reduce::dims::kept_shape;
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

    /// Squares that nothing scales have the bits of their terms, over any dims, with any instruction set and number of threads.
    #[test]
    fn squares_follow_the_tree() {
        isoshard_kernels::set_smallest_part(1);
        let square = SumTerm::Power(Bits(2.0));
        for (shape, dims) in [
            (&[1][..], &[0][..]),
            (&[0, 3], &[0]),
            (&[5, 31], &[1]),
            (&[33, 127], &[1]),
            (&[7, 1024], &[1]),
            (&[2, 70_001], &[1]),
            (&[300, 701], &[0]),
            (&[300, 701], &[0, 1]),
            (&[9, 110, 83], &[0, 2]),
            (&[9, 110, 83], &[1]),
        ] {
            let (x, one) = (noise(shape), Tensor::full(DType::F64, kept_shape(&shape.into(), dims), 1.0));
            let whole = terms(square, &x, &one).unwrap();
            let want = cpu::reduce("sum", &whole, dims, ReduceOp::Sum, true).unwrap();
            let order: Vec<usize> = (0..shape.len()).rev().collect();
            let turned = x.permute(&order).unwrap().contiguous().unwrap().permute(&order).unwrap();
            for x in [&x, &turned] {
                for &isa in cpu::Isa::available() {
                    let squares = || sum_squares(square, x, &one, dims).unwrap().unwrap();
                    let got = cpu::with_isa(isa, || cpu::with_threads(3, squares));
                    assert_eq!(got.shape(), want.shape());
                    let same = got.as_bytes().unwrap() == want.as_bytes().unwrap();
                    assert!(same, "{shape:?} {dims:?} {isa:?}");
                }
            }
        }
        let x = Tensor::from_vec(vec![3e38f32, -1e-45, f32::INFINITY, f32::NAN], [2, 2]).unwrap();
        let one = |len: usize| Tensor::full(DType::F64, [len, 1], 1.0);
        let sums = sum_squares(square, &x, &one(2), &[1]).unwrap().unwrap().to_f64_vec();
        assert!(sums[0] == f64::from(3e38f32).powi(2) && sums[1].is_nan(), "{sums:?}");
        let (cube, half) = (SumTerm::Power(Bits(3.0)), Tensor::full(DType::F64, [2, 1], 0.5));
        let wide = cpu::cast(&x, DType::F64).unwrap();
        for (term, x, with) in [(cube, &x, &one(2)), (square, &x, &half), (square, &wide, &one(2))] {
            assert!(sum_squares(term, x, with, &[1]).unwrap().is_none());
        }
    }

    /// Rows change no bit either, with any instruction set and number of threads.
    #[test]
    fn rows_follow_the_tree() {
        isoshard_kernels::set_smallest_part(1);
        let terms_of = [
            SumTerm::Deviation,
            SumTerm::SquaredDeviation,
            SumTerm::ExpDifference,
            SumTerm::Power(Bits(2.0)),
            SumTerm::Power(Bits(3.0)),
            SumTerm::Power(Bits(0.5)),
        ];
        for shape in
            [&[1][..], &[7, 1], &[5, 31], &[2, 3, 100], &[33, 127], &[3, 1024], &[4, LONGEST_ROW - 1]]
        {
            let last = shape.len() - 1;
            for (from, to) in [(DType::F32, DType::F32), (DType::F32, DType::F64), (DType::F64, DType::F64)] {
                let x = cpu::cast(&noise(shape), from).unwrap();
                let with = cpu::cast(&noise(kept_shape(&shape.into(), &[last])), to).unwrap();
                for term in terms_of {
                    let whole = terms(term, &x, &with).unwrap();
                    let want = cpu::reduce("sum", &whole, &[last], ReduceOp::Sum, true).unwrap();
                    for &isa in cpu::Isa::available() {
                        let rows = || sum_rows(term, &x, &with, &[last]).unwrap().unwrap();
                        let got = cpu::with_isa(isa, || cpu::with_threads(3, rows));
                        assert_eq!(got.shape(), want.shape());
                        assert_eq!(
                            got.as_bytes().unwrap(),
                            want.as_bytes().unwrap(),
                            "{shape:?} {term:?} {from} {to} {isa:?}"
                        );
                    }
                }
            }
        }
        let (x, one) = (noise([3, 5]), noise([3, 1]));
        assert!(sum_rows(SumTerm::Deviation, &x, &noise([1, 5]), &[0]).unwrap().is_none());
        let turned = noise([5, 3]).transpose(0, 1).unwrap();
        assert!(sum_rows(SumTerm::Deviation, &turned, &one, &[1]).unwrap().is_none());
        assert!(sum_rows(SumTerm::Deviation, &noise([3, 0]), &one, &[1]).unwrap().is_none());
    }
}
