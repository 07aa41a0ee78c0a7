//! `min`: the smallest element over any dims.

use super::max::{eval, eval_cuda, infer, rows, vjp};
use super::{Axis, Input, Meta, Metas, Op, Row, Sample, Tensors, Vjp, Windows, Work};
use crate::error::Result;
use crate::tensor::{Dims, ReduceOp, Tensor};

/// The minimum over `dims`, where -0 is less than 0; NaN, always the same one, if any element is. The gradient is shared equally among equal minima, as by PyTorch's
/// `amin`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Min {
    /// The dims to reduce, ascending.
    pub dims: Dims,
    /// Whether they stay, with extent 1.
    pub keep: bool,
}

impl Op for Min {
    fn name(&self) -> &'static str {
        "min"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        infer(self.name(), ins, &self.dims, self.keep)
    }

    fn rows(&self, ins: &[Meta], _: Axis) -> Vec<Row> {
        rows(ins, &self.dims, self.keep, ReduceOp::Min)
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        eval(&ins[0], at, &self.dims, self.keep, ReduceOp::Min)
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        eval_cuda(&ins[0], at, &self.dims, self.keep, ReduceOp::Min)
    }
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::reduction(ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        vjp(g, &self.dims)
    }
}

pub(super) fn samples() -> Vec<Sample> {
    let min = |dims: &[usize], keep| Min { dims: dims.iter().copied().collect(), keep };
    vec![
        Sample::new(min(&[0], false), [Input::ints([5, 3])]).rough(),
        Sample::new(min(&[0, 1], true), [Input::ints([3, 2])]).rough(),
    ]
}
