//! Reductions over dims: `sum`, `max`, `min`, `prod`, `argmax`, `first_index`, and the sums of terms that
//! variances and norms are composed of; and `expand`, the transpose of `sum`.
//!
//! The loops of `sum`, `max` and `min` are [`tensor::cpu::reduce`](crate::tensor::cpu::reduce) and its CUDA counterpart.
//! `cpu` and `cuda` hold the kernels of `argmax` and `first_index`; `prod` and `terms` have their own.
//!
//! Missing: `median` and `mode`; running sums and maxima along a dim; on CUDA devices, 2^32 elements in one `argmax`, which
//! is refused.

mod argmax;
mod blocks;
pub(super) mod cpu;
mod cuda;
mod expand;
mod first_index;
mod inverse_power_of_two;
mod max;
mod min;
mod prod;
mod sum;
mod terms;

pub use argmax::Argmax;
pub use expand::Expand;
pub use first_index::FirstIndex;
pub use inverse_power_of_two::InversePowerOfTwo;
pub use max::{Max, MaxOrMin};
pub use min::Min;
pub use prod::Prod;
pub use prod::grad::ProdGrad;
pub use sum::{Sum, SumIn, WideSum};
pub use terms::TermSum;
pub use terms::sum_term::SumTerm;

use smallvec::smallvec;

use super::{AxisPlacement, Meta, Row, Sample, Tensors, Windows};
use crate::error::{Error, Result};
use crate::placement::Leaf;
use crate::tensor::{Dims, ReduceOp, Shape, Tensor};

/// A reduction as its operators share it: name, kind, dims (ascending), and true if the dims stay with extent 1.
struct DimReduction<'a>(&'static str, ReduceOp, &'a [usize], bool);

impl DimReduction<'_> {
    /// Returns the shape after the reduction. Refuses dims that `x` does not have, and dims that are not ascending.
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

    /// Returns the rows: a dim that is kept stays sharded; a sharded reduced dim gives a partial, and so does a ragged
    /// operand if all dims are reduced. Partials of the same kind are accepted: a sum of sums is a sum, a maximum of
    /// maxima a maximum.
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

    /// Reduces this rank's shard. A shard that is ragged over several dims has fewer dims than the global tensor; the
    /// rows admit it only if all dims are reduced.
    fn eval(
        &self,
        x: &Tensor,
        at: &Windows,
        reduce: impl Fn(&str, &Tensor, &[usize], ReduceOp, bool) -> Result<Tensor>,
    ) -> Result<Tensors> {
        let DimReduction(verb, kind, dims, keep) = *self;
        if dims.len() == at.ins[0].global.len() {
            let all: Dims = (0..x.shape().len()).collect();
            return Ok(smallvec![reduce(verb, x, &all, kind, false)?.reshape(at.outs[0].local().clone())?]);
        }
        Ok(smallvec![reduce(verb, x, dims, kind, keep)?])
    }
}

/// Returns `shape` with extent 1 at `dims`.
pub(super) fn kept_shape(shape: &Shape, dims: &[usize]) -> Shape {
    shape.iter().enumerate().map(|(d, &n)| if dims.contains(&d) { 1 } else { n }).collect()
}

/// Returns the samples of the family's operators.
pub(super) fn samples() -> Vec<Sample> {
    [
        argmax::samples(),
        expand::samples(),
        first_index::samples(),
        inverse_power_of_two::samples(),
        max::samples(),
        min::samples(),
        prod::samples(),
        sum::samples(),
        terms::samples(),
    ]
    .concat()
}
