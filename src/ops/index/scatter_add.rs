//! `scatter_add`: adds elements along a dim by index. The derivative of `gather`.

use smallvec::smallvec;

use super::lines::{DimLines, LineIndex, rows_along, rows_back};
use super::scatter::write_rows;
use super::segments::{SegmentSums, expect_indices};
use super::{cuda, scatter_cuda};
use crate::error::{Error, Result};
use crate::ops::record::work::elements;
use crate::ops::{
    AxisPlacement, Gather, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Vjp, Windows, Work, arity,
    list,
};
use crate::placement::Leaf;
use crate::tensor::{DType, Tensor, cpu, for_dtype};

/// Adds elements into a tensor of zeros by index: [`DTensor::scatter_add`](crate::dtensor::DTensor::scatter_add), and
/// the derivative of [`Gather`](crate::ops::Gather).
///
/// Operands `(index, src)` have equal shape, index is i64. The result has extent `extent` along `dim`; `src[.., k, ..]`
/// is added at index `index[.., k, ..]` for each `k`, along the reduction tree over `k`. Sums of i64 and i32 keep the
/// dtype and wrap.
///
/// ```
/// use isoshard::ops::{ScatterAdd, eval_whole};
/// use isoshard::tensor::Tensor;
/// let index = Tensor::from_vec(vec![1i64, 1, 0], [3])?;
/// let src = Tensor::from_vec(vec![1.0, 2.0, 4.0], [3])?;
/// let y = eval_whole(&ScatterAdd { dim: 0, extent: 3 }, &[index, src])?.remove(0);
/// assert_eq!(y.to_f64_vec(), [4.0, 3.0, 0.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ScatterAdd {
    /// The dim.
    pub dim: usize,
    /// The result's extent along `dim`.
    pub extent: usize,
}

impl Op for ScatterAdd {
    fn name(&self) -> &'static str {
        "scatter_add"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [index, src] = arity(self.name(), ins)?;
        expect_indices(self.name(), index)?;
        if !src.dtype.is_float() && !matches!(src.dtype, DType::I64 | DType::I32) {
            let rule = "adds floats, i64 and i32";
            return Err(Error::invalid(self.name(), rule, src.to_string(), "cast the source first"));
        }
        if index.shape != src.shape || self.dim >= src.shape.len() {
            let given = format!("dim {} of {}", self.dim, list(ins));
            return Err(Error::invalid(self.name(), "wants index and source of one shape", given, ""));
        }
        let mut shape = src.shape.clone();
        shape[self.dim] = self.extent;
        Ok(smallvec![Meta { dtype: src.dtype, shape }])
    }

    /// Linear in `src`. If the result is sharded along `dim`, each rank adds up its own elements.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let others = (0..ins[0].shape.len()).filter(|&d| d != self.dim);
        let mut rows: Vec<Row> = others.map(|d| Row::same(AxisPlacement::S(d), 2)).collect();
        rows.push(Row::new([AxisPlacement::R, AxisPlacement::R], [AxisPlacement::S(self.dim)]));
        let (cut, partial) = ([AxisPlacement::S(self.dim); 2], [AxisPlacement::R, AxisPlacement::SUM]);
        if ins[1].dtype.is_float() {
            rows.push(Row::new(cut, [AxisPlacement::TreeSum(Leaf::Pairs)]));
            rows.push(Row::new(partial, [AxisPlacement::SUM]));
        } else {
            // Sums of integers have the same bits in any order.
            rows.push(Row::new(cut, [AxisPlacement::SUM]).exact());
            rows.push(Row::new(partial, [AxisPlacement::SUM]).exact());
        }
        rows
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let (start, held) = (at.outs[0].start(self.dim), at.outs[0].local()[self.dim]);
        let index = LineIndex::new(self.name(), &ins[0], self.dim, self.extent)?;
        if !ins[1].dtype().is_float() {
            let mut out = Tensor::zeros(ins[1].dtype(), at.outs[0].local());
            let place = (start, DimLines::new(out.shape(), self.dim), ins[0].shape()[self.dim]);
            let src = ins[1].contiguous()?;
            match out.dtype() {
                DType::I64 => write_rows(out.make_mut()?, src.as_slice()?, &index, place, i64::wrapping_add)?,
                _ => write_rows(out.make_mut()?, src.as_slice()?, &index, place, i32::wrapping_add)?,
            }
            return Ok(smallvec![out]);
        }
        let lines = DimLines::new(ins[0].shape(), self.dim);
        if index.width == lines.inner {
            return Ok(smallvec![sums(&index, &ins[1], self.dim, (start, held))?]);
        }
        let (moved, src) = (rows_along(&ins[0], self.dim)?, rows_along(&ins[1], self.dim)?);
        let last = moved.shape().len() - 1;
        let index = LineIndex::new(self.name(), &moved, last, self.extent)?;
        Ok(smallvec![rows_back(&sums(&index, &src, last, (start, held))?, self.dim)?])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let indices = cuda::HeldRange { n: self.extent, start: at.outs[0].start(self.dim) };
        let held = at.outs[0].local()[self.dim];
        if !ins[1].dtype().is_float() {
            let place = (self.extent, indices.start);
            let out = at.outs[0].local();
            return Ok(smallvec![scatter_cuda::integer_sums(&ins[0], &ins[1], self.dim, place, out)?]);
        }
        if let Some(rows) = LineIndex::shared_rows(&ins[0], self.dim)? {
            return Ok(smallvec![cuda::scatter_add(&rows, &ins[1], self.dim, indices, held)?]);
        }
        let (index, src) = (rows_along(&ins[0], self.dim)?, rows_along(&ins[1], self.dim)?);
        let last = index.shape().len() - 1;
        Ok(smallvec![rows_back(&cuda::scatter_add(&index, &src, last, indices, held)?, self.dim)?])
    }

    /// One addition per element of `src`.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::new(elements(&ins[1]), ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.none(0, "an index has no derivative");
        if !g.input_meta(1).dtype.is_float() {
            g.none(1, "integers have no derivative");
            return Ok(());
        }
        let (index, dy) = (g.input(0), g.grad(0));
        let dx = g.apply(Gather { dim: self.dim }, &[dy, index])?;
        g.set(1, dx);
        Ok(())
    }
}

/// Returns zeros with the rows of `src` added by destination: `held` rows along `dim`, from row `start` on.
fn sums(index: &LineIndex, src: &Tensor, dim: usize, (start, held): (usize, usize)) -> Result<Tensor> {
    let (src, lines) = (src.contiguous()?, DimLines::new(src.shape(), dim));
    let mut shape = src.shape().clone();
    shape[dim] = held;
    let mut out = Tensor::zeros(src.dtype(), shape);
    if out.numel() > 0 && src.numel() > 0 {
        for_dtype!(float "scatter_add", src.dtype(), T => {
            let extents = [lines.len];
            let mut sums = SegmentSums::<T>::new(&extents, lines.inner);
            let outs = cpu::as_elements_mut::<T>(out.bytes_mut()).chunks_exact_mut(held * lines.inner);
            let src = src.as_slice::<T>()?.chunks_exact(lines.len * lines.inner);
            for (index, (src, out)) in index.entries()?.chunks_exact(lines.len).zip(src.zip(outs)) {
                sums.add(index, start, src, out);
            }
            Ok(())
        })?;
    }
    Ok(out)
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let op = |dim, extent| ScatterAdd { dim, extent };
    vec![
        Sample::new(op(1, 3), [Input::index([5, 7], 3), Input::ints([5, 7])]),
        Sample::new(op(0, 5), [Input::index([3, 2], 5), Input::ints([3, 2])]),
        Sample::new(op(1, 2), [Input::index([2, 3, 1], 2), Input::ints([2, 3, 1])]),
        Sample::new(op(0, 2), [Input::index([0], 2), Input::ints([0])]),
        Sample::new(op(1, 3), [Input::index([3, 5], 3), Input::index([3, 5], 9)]).not_smooth(),
    ]
}
