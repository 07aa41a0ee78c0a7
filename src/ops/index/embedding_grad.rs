//! `embedding_grad`: adds gradients into the rows of a table. The derivative of `embedding`.

use smallvec::smallvec;

use super::cuda;
use super::segments::{SegmentSums, checked_index, expect_indices};
use crate::error::{Error, Result};
use crate::ops::record::work::elements;
use crate::ops::{
    AxisPlacement, Embedding, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Vjp, Windows, Work,
    arity, list,
};
use crate::placement::Leaf;
use crate::tensor::{Tensor, cpu, for_dtype};

/// The derivative of [`Embedding`](crate::ops::Embedding) with respect to the table: `(index, dy) -> dtable`.
///
/// The result `[rows, C]` starts as zeros; `dy[i]` (dy is `[.., C]`) is added to row `index[i]` (i64 `[..]`) for each
/// `i`, along the reduction tree over the index's dims.
///
/// ```
/// use isoshard::ops::{EmbeddingGrad, eval_whole};
/// use isoshard::tensor::Tensor;
/// let index = Tensor::from_vec(vec![2i64, 0, 2], [3])?;
/// let dy = Tensor::from_vec(vec![1.0, 10.0, 100.0], [3, 1])?;
/// let dtable = eval_whole(&EmbeddingGrad { rows: 3 }, &[index, dy])?.remove(0);
/// assert_eq!(dtable.to_f64_vec(), [10.0, 0.0, 101.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EmbeddingGrad {
    /// The number of rows of the table.
    pub rows: usize,
}

impl Op for EmbeddingGrad {
    fn name(&self) -> &'static str {
        "embedding_grad"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [index, dy] = arity(self.name(), ins)?;
        expect_indices(self.name(), index)?;
        dy.dtype.expect_float(self.name())?;
        match dy.shape.split_last() {
            Some((&width, outer)) if *outer == *index.shape => {
                Ok(smallvec![Meta::new(dy.dtype, [self.rows, width])])
            }
            _ => Err(Error::invalid(self.name(), "wants one row of dy for each index", list(ins), "")),
        }
    }

    /// Linear in the gradient. If the result is sharded by rows, each rank adds up its own rows.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let last = ins[0].shape.len();
        let mut rows: Vec<Row> = (0..last)
            .map(|d| {
                Row::new([AxisPlacement::S(d), AxisPlacement::S(d)], [AxisPlacement::TreeSum(Leaf::Pairs)])
            })
            .collect();
        rows.push(Row::new([AxisPlacement::R, AxisPlacement::S(last)], [AxisPlacement::S(1)]));
        rows.push(Row::new([AxisPlacement::R, AxisPlacement::R], [AxisPlacement::S(0)]));
        rows.push(Row::new([AxisPlacement::R, AxisPlacement::SUM], [AxisPlacement::SUM]));
        rows
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let (index, dy) = (ins[0].contiguous()?, ins[1].contiguous()?);
        let (local, start) = (at.outs[0].local(), at.outs[0].start(0));
        let entries = index.as_slice::<i64>()?;
        for &i in entries {
            checked_index(self.name(), i, self.rows, 0)?;
        }
        let mut out = Tensor::zeros(dy.dtype(), local);
        for_dtype!(float self.name(), dy.dtype(), T => {
            let (src, out) = (dy.as_slice::<T>()?, cpu::as_elements_mut::<T>(out.bytes_mut()));
            SegmentSums::<T>::new(index.shape(), local[1]).add(entries, start, src, out);
            Ok(())
        })?;
        Ok(smallvec![out])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let rows = cuda::HeldRange { n: self.rows, start: at.outs[0].start(0) };
        Ok(smallvec![cuda::embedding_grad(&ins[0], &ins[1], rows, at.outs[0].local())?])
    }

    /// One addition per element of the gradient.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::new(elements(&ins[1]), ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.none(0, "an index has no derivative");
        let (index, table) = (g.input(0), g.grad(0));
        let dy = g.apply(Embedding, &[table, index])?;
        g.set(1, dy);
        Ok(())
    }

    fn takes_groups(&self) -> bool {
        true
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(EmbeddingGrad { rows: 3 }, [Input::index([7], 3), Input::ints([7, 2])]),
        Sample::new(EmbeddingGrad { rows: 5 }, [Input::index([2, 3], 5), Input::ints([2, 3, 1])]),
        Sample::new(EmbeddingGrad { rows: 2 }, [Input::index([], 2), Input::ints([3])]),
        Sample::new(EmbeddingGrad { rows: 2 }, [Input::index([0], 2), Input::ints([0, 3])]),
    ]
}
