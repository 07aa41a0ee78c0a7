//! `softmax` along a dim, `log_softmax`, `sum_exp`, and their derivatives.

pub(super) mod cpu;
mod cuda;
mod grad;
mod log_softmax;
mod log_softmax_grad;
pub(super) mod sum_exp;

pub use grad::SoftmaxGrad;
pub use log_softmax::LogSoftmax;
pub use log_softmax_grad::LogSoftmaxGrad;
pub use sum_exp::SumExp;

use smallvec::smallvec;

use super::{
    AxisPlacement, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Vjp, Windows, Work, arity,
};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Computes `exp(x - max) / sum(exp(x - max))` along a dim, which is not sharded. Applied by
/// [`DTensor::softmax`](crate::dtensor::DTensor::softmax).
///
/// ```
/// use isoshard::{ops::{Softmax, eval_whole}, tensor::Tensor};
/// let x = Tensor::from_vec(vec![0.0, 0.0, 3f64.ln(), 0.0], [2, 2])?;
/// let y = eval_whole(&Softmax { dim: 1 }, &[x])?.remove(0);
/// assert_eq!(format!("{:.3?}", y.to_f64_vec()), "[0.500, 0.500, 0.750, 0.250]");
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Softmax {
    /// The dim.
    pub dim: usize,
}

impl Op for Softmax {
    fn name(&self) -> &'static str {
        "softmax"
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
        let y = cpu::softmax(self.name(), &dim_last(&ins[0], self.dim)?)?;
        Ok(smallvec![dim_last(&y, self.dim)?])
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let y = cuda::softmax(self.name(), &dim_last(&ins[0], self.dim)?)?;
        Ok(smallvec![dim_last(&y, self.dim)?])
    }

    /// Per element: a comparison, a subtraction, an exponential, an addition, a division.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::elementwise(Work::SPECIAL + 4, ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let (y, dy) = (g.output(0), g.grad(0));
        let dx = g.apply(SoftmaxGrad { dim: self.dim }, &[y, dy])?;
        g.set(0, dx);
        Ok(())
    }
}

/// Refuses integers and bools, and a dim that `x` does not have.
pub(super) fn expect_float_dim(verb: &str, x: &Meta, dim: usize) -> Result<()> {
    x.dtype.expect_float(verb)?;
    if dim < x.shape.len() {
        return Ok(());
    }
    Err(Error::invalid(verb, "no such dim", format!("dim {dim} of {x}"), ""))
}

/// Returns the rows that shard all operands and the result alike along any dim but `dim`.
pub(super) fn other_dims(x: &Meta, dim: usize, ins: usize) -> Vec<Row> {
    (0..x.shape.len()).filter(|&d| d != dim).map(|d| Row::same(AxisPlacement::S(d), ins)).collect()
}

/// Swaps `dim` and the last dim, as a view. A second call swaps them back.
pub(super) fn dim_last(x: &Tensor, dim: usize) -> Result<Tensor> {
    x.transpose(dim, x.shape().len() - 1)
}

pub(super) fn samples() -> Vec<Sample> {
    let own = vec![
        Sample::new(Softmax { dim: 1 }, [Input::ints([5, 3])]),
        Sample::new(Softmax { dim: 0 }, [Input::ints([7, 2])]),
        Sample::new(Softmax { dim: 1 }, [Input::ints([2, 3, 0])]),
        Sample::new(Softmax { dim: 0 }, [Input::ints([1])]),
    ];
    [own, grad::samples(), log_softmax::samples(), log_softmax_grad::samples(), sum_exp::samples()].concat()
}
