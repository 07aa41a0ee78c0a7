//! The dims of a reduction: the shapes, rows and kernels that sums, maxima and products share.

use smallvec::smallvec;

use crate::error::{Error, Result};
use crate::ops::{AxisPlacement, Meta, Row, Tensors, Windows};
use crate::placement::Leaf;
use crate::tensor::{Dims, ReduceOp, Shape, Tensor};

/// A reduction over dims, as its operators share it.
pub(in crate::ops) struct DimReduction<'a> {
    /// The operator's name.
    pub verb: &'static str,
    pub kind: ReduceOp,
    /// The reduced dims, ascending.
    pub dims: &'a [usize],
    /// True if the dims stay with extent 1.
    pub keep: bool,
}

impl DimReduction<'_> {
    /// Returns the shape after the reduction. Refuses dims that `x` does not have, and dims that are not ascending.
    pub(in crate::ops) fn shape(&self, x: &Meta) -> Result<Shape> {
        let DimReduction { verb, dims, keep, .. } = *self;
        if dims.windows(2).any(|w| w[0] >= w[1]) || dims.last().is_some_and(|&d| d >= x.shape.len()) {
            return Err(Error::invalid(
                verb,
                "no such dims",
                format!("dims {dims:?} of {x}"),
                "name each once, ascending",
            ));
        }
        let kept = kept_shape(&x.shape, dims);
        if keep {
            return Ok(kept);
        }
        Ok((0..kept.len()).filter(|d| !dims.contains(d)).map(|d| kept[d]).collect())
    }

    /// Returns the rows: a dim that is kept stays sharded; a sharded reduced dim gives a partial, and so does a ragged
    /// operand if all dims are reduced. Partials of the same kind are accepted: a sum of sums is a sum, a maximum of
    /// maxima a maximum.
    pub(in crate::ops) fn rows(&self, x: &Meta) -> Vec<Row> {
        let DimReduction { kind, dims, keep, .. } = *self;
        let place = |d: usize| d - if keep { 0 } else { dims.iter().filter(|&&r| r < d).count() };
        let part =
            if kind == ReduceOp::Sum { AxisPlacement::TreeSum(Leaf::Pairs) } else { AxisPlacement::P(kind) };
        let out = |d: usize| if dims.contains(&d) { part } else { AxisPlacement::S(place(d)) };
        let mut rows: Vec<Row> =
            (0..x.shape.len()).map(|d| Row::new([AxisPlacement::S(d)], [out(d)])).collect();
        if dims.len() == x.shape.len() {
            rows.push(Row::new([AxisPlacement::Ragged], [part]));
        }
        rows.push(Row::same(AxisPlacement::P(kind), 1));
        rows
    }

    /// Reduces this rank's shard. A shard that is ragged over several dims has fewer dims than the global tensor; the
    /// rows admit it only if all dims are reduced.
    pub(in crate::ops) fn eval(
        &self,
        x: &Tensor,
        at: &Windows,
        reduce: impl Fn(&str, &Tensor, &[usize], ReduceOp, bool) -> Result<Tensor>,
    ) -> Result<Tensors> {
        let DimReduction { verb, kind, dims, keep } = *self;
        if dims.len() == at.ins[0].global.len() {
            let all: Dims = (0..x.shape().len()).collect();
            return Ok(smallvec![reduce(verb, x, &all, kind, false)?.reshape(at.outs[0].local().clone())?]);
        }
        Ok(smallvec![reduce(verb, x, dims, kind, keep)?])
    }
}

/// Returns `shape` with extent 1 at `dims`.
pub(in crate::ops) fn kept_shape(shape: &Shape, dims: &[usize]) -> Shape {
    shape.iter().enumerate().map(|(d, &n)| if dims.contains(&d) { 1 } else { n }).collect()
}
