//! `gather`: reads elements along a dim by index.

use smallvec::smallvec;

use super::cuda;
use super::lines::{DimLines, LineIndex, expect_in_range};
use super::rows::minus_zero;
use super::segments::expect_indices;
use crate::error::{Error, Result};
use crate::ops::{
    Algebra, AxisPlacement, Input, MeshAxis, Meta, Metas, Op, Row, Sample, ScatterAdd, Tensors, Vjp, Windows,
    Work, arity, list,
};
use crate::tensor::{Element, Tensor, cpu, for_dtype};

/// Reads elements along a dim by index: `y[.., k, ..] = x[.., index[.., k, ..], ..]`. Applied by
/// [`DTensor::gather`](crate::dtensor::DTensor::gather).
///
/// The index is i64 and has x's extents in all dims but `dim`; the result has the index's shape. An x that is sharded
/// along `dim` gives a partial sum.
///
/// ```
/// use isoshard::{ops::{Gather, eval_whole}, tensor::Tensor};
/// let x = Tensor::from_vec(vec![1.0, 2.0, 3.0, 4.0], [2, 2])?;
/// let index = Tensor::from_vec(vec![1i64, 0], [2, 1])?;
/// assert_eq!(eval_whole(&Gather { dim: 1 }, &[x, index])?[0].to_f64_vec(), [2.0, 3.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Gather {
    /// The dim.
    pub dim: usize,
}

impl Op for Gather {
    fn name(&self) -> &'static str {
        "gather"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x, index] = arity(self.name(), ins)?;
        expect_indices(self.name(), index)?;
        expect_alike_but(self.name(), self.dim, ins)?;
        Ok(smallvec![Meta { dtype: x.dtype, shape: index.shape.clone() }])
    }

    /// Elements are only copied, so any partial operand is accepted. If the operand is sharded along `dim`, each rank
    /// fills in the elements that it stores, which gives a partial sum.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let others = (0..ins[0].shape.len()).filter(|&d| d != self.dim);
        let mut rows: Vec<Row> = others.map(|d| Row::same(AxisPlacement::S(d), 2)).collect();
        rows.push(Row::new([AxisPlacement::R, AxisPlacement::S(self.dim)], [AxisPlacement::S(self.dim)]));
        rows.push(Row::new([AxisPlacement::S(self.dim), AxisPlacement::R], [AxisPlacement::SUM]).exact());
        rows.extend(
            Algebra::Structural
                .rows(1)
                .iter()
                .map(|r| Row::new([r.ins[0], AxisPlacement::R], [r.outs[0]]).exact()),
        );
        rows
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let (n, start) = (at.ins[0].global[self.dim], at.ins[0].start(self.dim));
        let (held, x) = (ins[0].shape()[self.dim], ins[0].contiguous()?);
        let index = LineIndex::unchecked(&ins[1], self.dim)?;
        let check = |entries: &[i64]| expect_in_range(self.name(), entries, self.dim, n);
        let lines = DimLines::new(ins[1].shape(), self.dim);
        let mut out = Tensor::uninit(x.dtype(), ins[1].shape());
        if out.numel() > 0 {
            for_dtype!(any x.dtype(), T => {
                let out = cpu::as_elements_mut::<T>(out.bytes_mut());
                take(x.as_slice::<T>()?, (start, held), &index, lines, out, check)?;
            });
        }
        Ok(smallvec![out])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let indices = cuda::HeldRange { n: at.ins[0].global[self.dim], start: at.ins[0].start(self.dim) };
        Ok(smallvec![cuda::gather(&ins[0], &ins[1], self.dim, indices)?])
    }

    /// Reads only the elements that are copied.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::by_index(&ins[1], outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.none(1, "an index has no derivative");
        let extent = g.input_meta(0).shape[self.dim];
        let (index, dy) = (g.input(1), g.grad(0));
        let dx = g.apply(ScatterAdd { dim: self.dim, extent }, &[index, dy])?;
        g.set(0, dx);
        Ok(())
    }
}

/// Reads elements by index. This rank stores `held` rows per block, from row `start` on. Each block's entries are given
/// to `check` first.
fn take<T: Element>(
    x: &[T],
    (start, held): (usize, usize),
    index: &LineIndex,
    DimLines { len, inner, .. }: DimLines,
    out: &mut [T],
    check: impl Fn(&[i64]) -> Result<()>,
) -> Result<()> {
    // An index before this rank's first row wraps to a number far beyond its last row.
    let place = |i: i64| (i as usize).wrapping_sub(start);
    let per_row = inner / index.width;
    let entries = index.entries()?.chunks_exact(len * per_row);
    for (b, (out, index_block)) in out.chunks_exact_mut(len * inner).zip(entries).enumerate() {
        check(index_block)?;
        let x = &x[b * held * inner..][..held * inner];
        if inner == 1 {
            for (o, &i) in out.iter_mut().zip(index_block) {
                *o = x.get(place(i)).copied().unwrap_or_else(minus_zero);
            }
        } else if index.width == inner {
            for (out, &i) in out.chunks_exact_mut(inner).zip(index_block) {
                match place(i) < held {
                    true => out.copy_from_slice(&x[place(i) * inner..][..inner]),
                    false => out.fill(minus_zero()),
                }
            }
        } else {
            for (out, index) in out.chunks_exact_mut(inner).zip(index_block.chunks_exact(inner)) {
                for (column, (o, &i)) in out.iter_mut().zip(index).enumerate() {
                    let there = place(i) < held;
                    *o = if there { x[place(i) * inner + column] } else { minus_zero() };
                }
            }
        }
    }
    Ok(())
}

/// Refuses two operands whose extents differ in a dim other than `dim`, and a `dim` that they do not have.
pub(in crate::ops) fn expect_alike_but(verb: &str, dim: usize, ins: &[Meta]) -> Result<()> {
    let (a, b) = (&ins[0].shape, &ins[1].shape);
    if dim < a.len() && a.len() == b.len() && (0..a.len()).all(|d| d == dim || a[d] == b[d]) {
        return Ok(());
    }
    let rule = format!("the operands' extents differ in another dim than {dim}");
    Err(Error::invalid(verb, rule, list(ins), "expand one of them"))
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Gather { dim: 1 }, [Input::ints([5, 3]), Input::index([5, 2], 3)]),
        Sample::new(Gather { dim: 0 }, [Input::ints([3, 2]), Input::index([7, 2], 3)]),
        Sample::new(Gather { dim: 1 }, [Input::ints([2, 5, 3]), Input::index([2, 1, 3], 5)]),
        Sample::new(Gather { dim: 0 }, [Input::ints([3]), Input::index([0], 3)]),
    ]
}
