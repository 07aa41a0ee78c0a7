//! Reductions over dims: sums, and the largest or smallest elements with their places. The loops are
//! [`tensor::cpu::reduce`](crate::tensor::cpu::reduce)'s and the device's; `cpu` and `cuda` hold those of `argmax`.

pub(super) mod argmax;
pub(super) mod cpu;
mod cuda;
pub(super) mod max;
pub(super) mod min;
pub(super) mod sum;

use smallvec::smallvec;

use super::{AxisPlacement, Meta, Row, Tensors, Windows};
use crate::error::{Error, Result};
use crate::placement::Leaf;
use crate::tensor::{Dims, ReduceOp, Shape, Tensor};

/// A reduction over dims by name, kind, dims (ascending) and whether they stay with extent 1: what the operators share.
struct DimReduction<'a>(&'static str, ReduceOp, &'a [usize], bool);

/// The CPU's or the device's `reduce`.
type ReduceFn = fn(&str, &Tensor, &[usize], ReduceOp, bool) -> Result<Tensor>;

impl DimReduction<'_> {
    /// The shape after reducing; refuses dims that are not there, or not ascending.
    fn shape(&self, x: &Meta) -> Result<Shape> {
        let DimReduction(verb, _, dims, keep) = *self;
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

    /// Kept dims stay sharded, a sharded reduced dim leaves a partial, and of ragged parts a full reduction does; partials of the
    /// same kind pass, since sums of sums are sums and extremes of extremes extremes.
    fn rows(&self, x: &Meta) -> Vec<Row> {
        let DimReduction(_, kind, dims, keep) = *self;
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

    /// Reduces a rank's part. One that is ragged over several dims has fewer dims than the whole; only a full reduction admits it.
    fn eval(&self, x: &Tensor, at: &Windows, reduce: ReduceFn) -> Result<Tensors> {
        let DimReduction(verb, kind, dims, keep) = *self;
        if dims.len() == at.ins[0].global.len() {
            let all: Dims = (0..x.shape().len()).collect();
            return Ok(smallvec![reduce(verb, x, &all, kind, false)?.reshape(at.outs[0].local().clone())?]);
        }
        Ok(smallvec![reduce(verb, x, dims, kind, keep)?])
    }
}

/// `shape` with extent 1 at `dims`.
pub(super) fn kept_shape(shape: &Shape, dims: &[usize]) -> Shape {
    shape.iter().enumerate().map(|(d, &n)| if dims.contains(&d) { 1 } else { n }).collect()
}
