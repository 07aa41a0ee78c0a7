//! `log_softmax` along a dim.

use smallvec::smallvec;

use super::{cpu, cuda, dim_last, expect_float_dim, other_dims};
use crate::error::Result;
use crate::ops::record::work::rows;
use crate::ops::{
    Input, LogSoftmaxGrad, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Vjp, Windows, Work, arity,
};
use crate::tensor::Tensor;

/// Computes `x - max - log(sum(exp(x - max)))` along a dim, which is not sharded. Applied by
/// [`DTensor::log_softmax`](crate::dtensor::DTensor::log_softmax).
///
/// ```
/// use isoshard::{ops::{LogSoftmax, eval_whole}, tensor::Tensor};
/// let x = Tensor::from_vec(vec![0.0, 3f64.ln()], [2])?;
/// let y = eval_whole(&LogSoftmax { dim: 0 }, &[x])?.remove(0);
/// assert_eq!(format!("{:.3?}", y.to_f64_vec()), "[-1.386, -0.288]"); // ln 1/4, ln 3/4
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LogSoftmax {
    /// The dim.
    pub dim: usize,
}

impl Op for LogSoftmax {
    fn name(&self) -> &'static str {
        "log_softmax"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x] = arity(self.name(), ins)?;
        expect_float_dim(self.name(), x, self.dim)?;
        Ok(smallvec![x.clone()])
    }

    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        other_dims(&ins[0], self.dim, 1)
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let y = cpu::log_softmax(self.name(), &dim_last(&ins[0], self.dim)?)?;
        Ok(smallvec![dim_last(&y, self.dim)?])
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let y = cuda::log_softmax(self.name(), &dim_last(&ins[0], self.dim)?)?;
        Ok(smallvec![dim_last(&y, self.dim)?])
    }

    /// The work of a softmax, and a logarithm per row.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        let rows = rows(&ins[0], self.dim);
        Work::elementwise(Work::SPECIAL + 4, ins, outs).plus(rows.saturating_mul(Work::SPECIAL))
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let (y, dy) = (g.output(0), g.grad(0));
        let dx = g.apply(LogSoftmaxGrad { dim: self.dim }, &[y, dy])?;
        g.set(0, dx);
        Ok(())
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(LogSoftmax { dim: 1 }, [Input::ints([5, 3])]),
        Sample::new(LogSoftmax { dim: 0 }, [Input::ints([7, 2])]),
        Sample::new(LogSoftmax { dim: 1 }, [Input::ints([2, 3, 0])]),
        Sample::new(LogSoftmax { dim: 0 }, [Input::ints([1])]),
    ]
}
