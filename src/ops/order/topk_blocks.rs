//! `topk_blocks`: the largest or smallest elements of each block of a dim. The first step of a top-k of a sharded dim.

use isoshard_kernels::order::{Order, RowOrder};
use smallvec::smallvec;

use super::sort::write_order_vjp;
use super::topk::top_work;
use super::{cuda, expect_dim, rows_but};
use crate::error::{Error, Result};
use crate::ops::index::lines::{rows_along, rows_back};
use crate::ops::{
    AxisPlacement, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Vjp, Windows, Work, arity,
};
use crate::tensor::{DType, Tensor, cpu, for_dtype};

/// The `k` largest or smallest elements of each of `blocks` blocks of a dim, and their indices (i64) in the whole dim.
/// The `k` first elements of the result are those of the dim. [`DTensor::topk`](crate::dtensor::DTensor::topk) applies
/// it to a sharded dim, so that ranks exchange `k` elements each and not their shards.
///
/// A block has `ceil(n / blocks)` indices, the last one those that are left: at least `k`.
///
/// ```
/// use isoshard::{ops::{TopKBlocks, eval_whole}, tensor::Tensor};
/// let x = Tensor::from_vec(vec![1.0, 4.0, 2.0, 5.0, 3.0], [5])?;
/// let top = eval_whole(&TopKBlocks { dim: 0, k: 1, largest: true, blocks: 2 }, &[x])?;
/// assert_eq!((top[0].to_f64_vec(), top[1].to_vec::<i64>()?), (vec![4.0, 5.0], vec![1, 3]));
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TopKBlocks {
    /// The dim.
    pub dim: usize,
    /// The number of elements of each block.
    pub k: usize,
    /// True for the largest elements, false for the smallest.
    pub largest: bool,
    /// The number of blocks.
    pub blocks: usize,
}

impl TopKBlocks {
    /// Returns true if a dim of `n` indices can be divided into `blocks` blocks of at least `k` and 1 indices.
    pub(crate) fn fits(n: usize, k: usize, blocks: usize) -> bool {
        let before = blocks.checked_sub(1).and_then(|full| full.checked_mul(n.div_ceil(blocks)));
        before.and_then(|before| before.checked_add(k.max(1))).is_some_and(|least| least <= n)
    }

    /// Returns the length of a block of a dim of `n` indices.
    fn block_len(&self, n: usize) -> usize {
        n.div_ceil(self.blocks)
    }
}

impl Op for TopKBlocks {
    fn name(&self) -> &'static str {
        "topk_blocks"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x] = arity(self.name(), ins)?;
        if !TopKBlocks::fits(expect_dim(self.name(), x, self.dim)?, self.k, self.blocks) {
            let given = format!("k = {}, {} blocks of dim {} of {x}", self.k, self.blocks, self.dim);
            return Err(Error::invalid(self.name(), "a block has fewer than k elements", given, ""));
        }
        let mut shape = x.shape.clone();
        shape[self.dim] = self.blocks * self.k;
        Ok(smallvec![Meta { dtype: x.dtype, shape: shape.clone() }, Meta { dtype: DType::I64, shape }])
    }

    /// The dim may be sharded if each rank stores whole blocks.
    fn rows(&self, ins: &[Meta], axis: MeshAxis) -> Vec<Row> {
        let (n, pieces) = (ins[0].shape[self.dim], axis.pieces(self.dim));
        let even = n.is_multiple_of(self.blocks) && self.blocks.is_multiple_of(pieces);
        let mut rows = rows_but(&ins[0], self.dim);
        if even || (pieces == self.blocks && axis.ranks == pieces) {
            rows.push(Row::new([AxisPlacement::S(self.dim)], [AxisPlacement::S(self.dim); 2]));
        }
        rows
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let (start, block) = (at.ins[0].start(self.dim), self.block_len(at.ins[0].global[self.dim]));
        let (n, rows) = (ins[0].shape()[self.dim], rows_along(&ins[0], self.dim)?);
        let (k, mut shape) = (self.k, rows.shape().clone());
        let all = n.div_ceil(block) * k;
        *shape.last_mut().expect("the dim is there") = all;
        let mut values = Tensor::uninit(rows.dtype(), &shape);
        let mut indices = Tensor::uninit(DType::I64, &shape);
        if values.numel() > 0 {
            for_dtype!(any rows.dtype(), T => {
                let mut order = RowOrder::<T>::new(self.largest);
                let values = cpu::as_elements_mut::<T>(values.bytes_mut()).chunks_exact_mut(all);
                let indices = cpu::as_elements_mut::<i64>(indices.bytes_mut()).chunks_exact_mut(all);
                for (row, (values, indices)) in rows.as_slice::<T>()?.chunks_exact(n).zip(values.zip(indices)) {
                    let parts = values.chunks_exact_mut(k).zip(indices.chunks_exact_mut(k));
                    for (b, (values, indices)) in parts.enumerate() {
                        T::write_in_order(&mut order, row, b * block..n.min((b + 1) * block), start, values, indices);
                    }
                }
            });
        }
        Ok(smallvec![rows_back(&values, self.dim)?, rows_back(&indices, self.dim)?])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let (start, block) = (at.ins[0].start(self.dim), self.block_len(at.ins[0].global[self.dim]));
        cuda::first_of_blocks(self.name(), &ins[0], self.dim, self.largest, (self.k, block, start))
    }

    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        top_work(self.k, ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        write_order_vjp(g, self.dim)
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let top = |dim, k, blocks| TopKBlocks { dim, k, largest: true, blocks };
    vec![
        Sample::new(top(1, 2, 3), [Input::ints([5, 8])]).not_smooth(),
        Sample::new(top(0, 1, 2), [Input::ints([7, 3])]).not_smooth(),
        Sample::new(top(0, 2, 5), [Input::index([15], 4)]).not_smooth(),
        Sample::new(top(1, 3, 2), [Input::ints([0, 7])]).not_smooth(),
    ]
}
