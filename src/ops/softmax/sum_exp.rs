//! `sum_exp`: the denominators of a softmax over the last dim, which may be sharded. `cross_entropy` needs them.

use std::sync::Arc;

use isoshard_kernels::rows::CrossEntropyRows;
use smallvec::smallvec;

use super::cuda;
use crate::error::{Error, Result};
use crate::ops::{
    AxisPlacement, Cast, Exp, Expand, Input, Max, MeshAxis, Meta, Metas, Mul, Neg, Op, Row, Sample,
    Statistic, Sub, Tensors, Vjp, VjpValue, Windows, Work, accumulator, arity, list,
};
use crate::placement::Leaf;
use crate::tensor::{ReduceOp, Tensor, cpu, for_dtype};

/// Computes `sum(exp(x - m))` over the last dim: x is `[.., C]`, its maximum m `[.., 1]`, the result `[.., 1]` in f32
/// (f64 for f64).
///
/// A sharded last dim gives a partial sum, so ranks exchange one number per row.
/// [`DTensor::cross_entropy`](crate::dtensor::DTensor::cross_entropy) applies it.
///
/// ```
/// use isoshard::{ops::{SumExp, eval_whole}, tensor::Tensor};
/// let x = Tensor::from_vec(vec![5.0, 5.0, 5.0], [1, 3])?;
/// let m = Tensor::from_vec(vec![5.0], [1, 1])?;
/// assert_eq!(eval_whole(&SumExp, &[x, m])?[0].to_f64_vec(), [3.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SumExp;

impl Op for SumExp {
    fn name(&self) -> &'static str {
        "sum_exp"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x, m] = arity(self.name(), ins)?;
        x.dtype.expect_float(self.name())?;
        if x.shape.is_empty() || m.dtype != x.dtype || m.shape != statistic_shape(x) {
            let rule = "wants a maximum for each row of the last dim, kept with extent 1";
            return Err(Error::invalid(self.name(), rule, list(ins), ""));
        }
        Ok(smallvec![Meta { dtype: accumulator(x.dtype), shape: m.shape.clone() }])
    }

    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let last = ins[0].shape.len() - 1;
        let mut rows: Vec<Row> = (0..last).map(|d| Row::same(AxisPlacement::S(d), 2)).collect();
        rows.push(Row::new(
            [AxisPlacement::S(last), AxisPlacement::R],
            [AxisPlacement::TreeSum(Leaf::Pairs)],
        ));
        rows
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let x = &ins[0];
        let m = ins[1].expand(x.shape())?;
        let exponentials = for_dtype!(float self.name(), x.dtype(), T => {
            type A = <T as crate::tensor::Float>::Acc;
            cpu::map::<T, A>(&[x, &m], &|ins, out| A::exp_differences(ins[0], ins[1], out))
        })?;
        Ok(smallvec![cpu::reduce(self.name(), &exponentials, &[x.shape().len() - 1], ReduceOp::Sum, true)?])
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        Ok(smallvec![cuda::sum_exp(self.name(), &ins[0], &ins[1])?])
    }

    /// Per element: a subtraction, an exponential, an addition.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::elementwise(Work::SPECIAL + 2, ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let (meta, sum) = (g.input_meta(0).clone(), g.output_meta(0).clone());
        let dtype = sum.dtype;
        let wide = |g: &mut Vjp, x: VjpValue| {
            if g.meta(x).dtype == dtype { Ok(x) } else { g.apply(Cast { dtype }, &[x]) }
        };
        if g.needs(0) {
            let (x, m) = (g.input(0), g.input(1));
            let (x, m, dy) = (wide(g, x)?, wide(g, m)?, g.grad(0));
            let shape = || Expand { shape: meta.shape.clone() };
            let (m, dy) = (g.apply(shape(), &[m])?, g.apply(shape(), &[dy])?);
            let below = g.apply(Sub, &[x, m])?;
            let terms = g.apply(Exp, &[below])?;
            let dx = g.apply(Mul, &[terms, dy])?;
            let dx = if meta.dtype == dtype { dx } else { g.apply(Cast { dtype: meta.dtype }, &[dx])? };
            g.set(0, dx);
        }
        if g.needs(1) {
            let (y, dy) = (g.output(0), g.grad(0));
            let dm = g.apply(Mul, &[y, dy])?;
            let dm = g.apply(Neg, &[dm])?;
            let dm = if meta.dtype == dtype { dm } else { g.apply(Cast { dtype: meta.dtype }, &[dm])? };
            g.set(1, dm);
        }
        Ok(())
    }

    fn statistics(&self, ins: &[Meta]) -> Vec<Statistic> {
        vec![row_maximum(1, &ins[0])]
    }
}

/// Returns the statement that an operand is the maximum of operand 0, which is `x`, over its last dim.
pub(in crate::ops) fn row_maximum(operand: usize, x: &Meta) -> Statistic {
    let max = Max { dims: [x.shape.len() - 1].into_iter().collect(), keep: true };
    Statistic { operand, op: Arc::new(max), of: vec![0], result: 0 }
}

/// Returns the shape of a statistic per row: that of `x` with last extent 1.
pub(in crate::ops) fn statistic_shape(x: &Meta) -> crate::tensor::Shape {
    crate::ops::reduce::dims::kept_shape(&x.shape, &[x.shape.len() - 1])
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(SumExp, [Input::ints([3, 7]), Input::ints([3, 1])]).rounded(7).not_smooth(),
        Sample::new(SumExp, [Input::ints([2, 1, 5]), Input::ints([2, 1, 1])]).rounded(5).not_smooth(),
        Sample::new(SumExp, [Input::ints([0, 3]), Input::ints([0, 1])]).rounded(3).not_smooth(),
    ]
}
