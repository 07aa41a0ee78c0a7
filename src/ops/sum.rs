//! `sum`: over any dims. `mean` is a sum times the reciprocal of the *global* count.

use smallvec::smallvec;

use super::{
    Axis, Expand, Input, Meta, Metas, Op, Reshape, Row, Sample, Slot, Tensors, Vjp, Windows, Work, arity,
};
use crate::error::{Error, Result};
use crate::placement::Leaf;
use crate::tensor::{Dims, ReduceOp, Shape, Tensor, cpu, cuda};

/// The sum over `dims`, by the tree of [`cpu::reduce`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Sum {
    /// The dims to sum over, ascending.
    pub dims: Dims,
    /// Whether they stay, with extent 1.
    pub keep: bool,
}

impl Op for Sum {
    fn name(&self) -> &'static str {
        "sum"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x] = arity(self.name(), ins)?;
        Ok(smallvec![Meta { dtype: x.dtype, shape: reduced_shape(self.name(), x, &self.dims, self.keep)? }])
    }

    fn rows(&self, ins: &[Meta], _: Axis) -> Vec<Row> {
        let mut rows = reduction_rows(&ins[0], &self.dims, self.keep, ReduceOp::Sum);
        if self.dims.len() == ins[0].shape.len() {
            rows.push(Row::new([Slot::Ragged], [Slot::Terms(Leaf::Pairs)]));
        }
        rows.push(Row::same(Slot::SUM, 1));
        rows
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        // A part that is ragged over several dims has fewer dims than the whole; only a full sum admits it.
        let x = &ins[0];
        if self.dims.len() == at.ins[0].global.len() {
            let all: Dims = (0..x.shape().len()).collect();
            return Ok(smallvec![
                cpu::reduce(self.name(), x, &all, ReduceOp::Sum, false)?
                    .reshape(at.outs[0].local().clone())?
            ]);
        }
        Ok(smallvec![cpu::reduce(self.name(), x, &self.dims, ReduceOp::Sum, self.keep)?])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let x = &ins[0];
        if self.dims.len() == at.ins[0].global.len() {
            let all: Dims = (0..x.shape().len()).collect();
            let sum = cuda::reduce(self.name(), x, &all, ReduceOp::Sum, false)?;
            return Ok(smallvec![sum.reshape(at.outs[0].local().clone())?]);
        }
        Ok(smallvec![cuda::reduce(self.name(), x, &self.dims, ReduceOp::Sum, self.keep)?])
    }

    fn keeping(&self, outer: usize) -> Option<Box<dyn Op>> {
        let leading = self.dims[..outer].iter().copied().eq(0..outer);
        let dims = Dims::from_slice(&self.dims[outer..]);
        leading.then(|| Box::new(Sum { dims, keep: self.keep }) as Box<dyn Op>)
    }
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::reduction(ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let x = g.input_meta(0).shape.clone();
        let dy = g.grad(0);
        let kept = kept_shape(&x, &self.dims);
        let dy = if *g.meta(dy).shape == *kept { dy } else { g.apply(Reshape { shape: kept }, &[dy])? };
        let dx = g.apply(Expand { shape: x }, &[dy])?;
        g.set(0, dx);
        Ok(())
    }

    fn adds(&self) -> bool {
        true
    }
}

/// `shape` with extent 1 at `dims`.
pub(super) fn kept_shape(shape: &Shape, dims: &[usize]) -> Shape {
    shape.iter().enumerate().map(|(d, &n)| if dims.contains(&d) { 1 } else { n }).collect()
}

/// The shape after reducing `dims`; refuses dims that are not there, or not ascending.
pub(super) fn reduced_shape(verb: &str, x: &Meta, dims: &[usize], keep: bool) -> Result<Shape> {
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

/// Kept dims stay sharded; a sharded reduced dim leaves a partial.
pub(super) fn reduction_rows(x: &Meta, dims: &[usize], keep: bool, op: ReduceOp) -> Vec<Row> {
    let place = |d: usize| d - if keep { 0 } else { dims.iter().filter(|&&r| r < d).count() };
    let part = if op == ReduceOp::Sum { Slot::Terms(Leaf::Pairs) } else { Slot::P(op) };
    let out = |d: usize| if dims.contains(&d) { part } else { Slot::S(place(d)) };
    (0..x.shape.len()).map(|d| Row::new([Slot::S(d)], [out(d)])).collect()
}

pub(super) fn samples() -> Vec<Sample> {
    let sum = |dims: &[usize], keep| Sum { dims: dims.iter().copied().collect(), keep };
    vec![
        Sample::new(sum(&[0], false), [Input::ints([5, 3])]),
        Sample::new(sum(&[1], true), [Input::ints([7, 2, 3])]),
        Sample::new(sum(&[0, 2], false), [Input::ints([3, 1, 5])]),
        Sample::new(sum(&[0, 1], false), [Input::ints([7, 3])]),
        Sample::new(sum(&[0], false), [Input::ints([0, 3])]),
    ]
}
