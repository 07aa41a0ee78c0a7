//! `max`: the largest element over any dims.

use smallvec::smallvec;

use super::sum::{kept_shape, reduced_shape, reduction_rows};
use super::{
    Axis, Cast, Compare, CompareKind, Div, Expand, Input, Mask, Meta, Metas, Op, Reshape, Row, Sample, Slot,
    Sum, Tensors, Vjp, Windows, Work, arity,
};
use crate::error::{Error, Result};
use crate::tensor::{DType, Dims, ReduceOp, Tensor, cpu, cuda};

/// The maximum over `dims`, where -0 is less than 0; NaN, always the same one, if any element is: in any order the same
/// bits (IEEE 754-2019's `maximum`). The gradient is shared equally among equal maxima, zeros
/// of both signs among them, as by PyTorch's `amax`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Max {
    /// The dims to reduce, ascending.
    pub dims: Dims,
    /// Whether they stay, with extent 1.
    pub keep: bool,
}

impl Op for Max {
    fn name(&self) -> &'static str {
        "max"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        infer(self.name(), ins, &self.dims, self.keep)
    }

    fn rows(&self, ins: &[Meta], _: Axis) -> Vec<Row> {
        rows(ins, &self.dims, self.keep, ReduceOp::Max)
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        eval(&ins[0], at, &self.dims, self.keep, ReduceOp::Max)
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        eval_cuda(&ins[0], at, &self.dims, self.keep, ReduceOp::Max)
    }
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::reduction(ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        vjp(g, &self.dims)
    }
}

pub(super) fn infer(verb: &str, ins: &[Meta], dims: &[usize], keep: bool) -> Result<Metas> {
    let [x] = arity(verb, ins)?;
    let shape = reduced_shape(verb, x, dims, keep)?;
    if x.dtype == DType::Bool {
        return Err(Error::invalid(verb, "bool has no order here", x.to_string(), "cast it first"));
    }
    if dims.iter().any(|&d| x.shape[d] == 0) {
        return Err(Error::invalid(verb, "no elements to choose from", format!("dims {dims:?} of {x}"), ""));
    }
    Ok(smallvec![Meta { dtype: x.dtype, shape }])
}

/// A partial extreme of the same kind passes: extremes of extremes are extremes. A partial sum does not.
pub(super) fn rows(ins: &[Meta], dims: &[usize], keep: bool, op: ReduceOp) -> Vec<Row> {
    let mut rows = reduction_rows(&ins[0], dims, keep, op);
    if dims.len() == ins[0].shape.len() {
        rows.push(Row::new([Slot::Ragged], [Slot::P(op)]));
    }
    rows.push(Row::same(Slot::P(op), 1));
    rows
}

pub(super) fn eval(x: &Tensor, at: &Windows, dims: &[usize], keep: bool, op: ReduceOp) -> Result<Tensors> {
    let verb = if op == ReduceOp::Max { "max" } else { "min" };
    // A part that is ragged over several dims has fewer dims than the whole; only a full reduction admits it.
    if dims.len() == at.ins[0].global.len() {
        let all: Dims = (0..x.shape().len()).collect();
        return Ok(smallvec![cpu::reduce(verb, x, &all, op, false)?.reshape(at.outs[0].local().clone())?]);
    }
    Ok(smallvec![cpu::reduce(verb, x, dims, op, keep)?])
}

pub(super) fn eval_cuda(
    x: &Tensor,
    at: &Windows,
    dims: &[usize],
    keep: bool,
    op: ReduceOp,
) -> Result<Tensors> {
    let verb = if op == ReduceOp::Max { "max" } else { "min" };
    if dims.len() == at.ins[0].global.len() {
        let all: Dims = (0..x.shape().len()).collect();
        return Ok(smallvec![cuda::reduce(verb, x, &all, op, false)?.reshape(at.outs[0].local().clone())?]);
    }
    Ok(smallvec![cuda::reduce(verb, x, dims, op, keep)?])
}

/// `dx = dy / count(x == y)` where `x == y`, else 0.
pub(super) fn vjp(g: &mut Vjp, dims: &[usize]) -> Result<()> {
    let Meta { dtype, shape } = g.input_meta(0).clone();
    let kept = kept_shape(&shape, dims);
    let dims: Dims = dims.iter().copied().collect();
    let (x, mut y, mut dy) = (g.input(0), g.output(0), g.grad(0));
    if g.meta(y).shape != kept {
        y = g.apply(Reshape { shape: kept.clone() }, &[y])?;
        dy = g.apply(Reshape { shape: kept }, &[dy])?;
    }
    let y = g.apply(Expand { shape: shape.clone() }, &[y])?;
    let chosen = g.apply(Compare { kind: CompareKind::Eq }, &[x, y])?;
    let ones = g.apply(Cast { dtype }, &[chosen])?;
    let count = g.apply(Sum { dims, keep: true }, &[ones])?;
    let share = g.apply(Div, &[dy, count])?;
    let share = g.apply(Expand { shape }, &[share])?;
    let dx = g.apply(Mask { on: true }, &[chosen, share])?;
    g.set(0, dx);
    Ok(())
}

pub(super) fn samples() -> Vec<Sample> {
    let max = |dims: &[usize], keep| Max { dims: dims.iter().copied().collect(), keep };
    vec![
        Sample::new(max(&[0], false), [Input::ints([5, 3])]).rough(),
        Sample::new(max(&[1], true), [Input::ints([7, 2, 3])]).rough(),
        Sample::new(max(&[0, 2], false), [Input::ints([3, 1, 5])]).rough(),
        Sample::new(max(&[0, 1], false), [Input::ints([7, 3])]).rough(),
        Sample::new(max(&[1], false), [Input::ints([0, 3])]).rough(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::eval_whole;

    #[test]
    fn nan_wins() {
        let x = Tensor::from_vec(vec![1.0f32, f32::NAN, 3.0, -2.0, f32::NEG_INFINITY, -2.0], [2, 3]).unwrap();
        let max = Max { dims: [1].into_iter().collect(), keep: false };
        let y = eval_whole(&max, std::slice::from_ref(&x)).unwrap()[0].to_vec::<f32>().unwrap();
        assert!(y[0].is_nan() && y[1] == -2.0, "{y:?}");
    }

    #[test]
    fn equal_maxima_share_the_gradient() {
        let x = Tensor::from_vec(vec![3.0, 1.0, 3.0, -1.0], [4]).unwrap();
        let max = Max { dims: [0].into_iter().collect(), keep: false };
        let program = Vjp::write(&max, &[Meta::of(&x)], &[true]).unwrap();
        let y = eval_whole(&max, std::slice::from_ref(&x)).unwrap()[0].clone();
        let mut values = vec![Some(x), Some(y), Some(Tensor::scalar(6.0))];
        values.resize(program.values_len, None);
        for step in &program.steps {
            let value = |r: &crate::ops::Ref| values[r.0 as usize].clone().expect("steps come in order");
            let ins: Vec<Tensor> = step.ins.iter().map(value).collect();
            values[step.out.0 as usize] = Some(eval_whole(&*step.op, &ins).unwrap()[0].clone());
        }
        let grad = values[program.grads[0].unwrap().0 as usize].clone().unwrap();
        assert_eq!(grad.to_f64_vec(), [3.0, 0.0, 3.0, 0.0]);
    }
}
