//! `rms_norm` over the last dim.

use smallvec::smallvec;

use super::layer_norm::expect_norm;
use super::{cpu, cuda};
use crate::error::Result;
use crate::ops::record::work::elements;
use crate::ops::{
    AxisPlacement, Bits, Input, MeshAxis, Meta, Metas, Op, RmsNormGrad, Row, Sample, Tensors, Vjp, Windows,
    Work, accumulator, arity,
};
use crate::tensor::Tensor;

/// RMS norm over the last dim, which is not sharded (Zhang and Sennrich, *Root Mean Square Layer Normalization*, 2019).
/// Applied by [`DTensor::rms_norm`](crate::dtensor::DTensor::rms_norm).
///
/// `(x, w) -> (y, rstd)` with `y = x * rstd * w` and `rstd = 1 / sqrt(mean(x²) + eps)`. x and y are `[.., C]`, w `[C]`,
/// rstd `[.., 1]` in f32 (f64 for f64). The gradient of x includes the path through rstd; an incoming gradient of rstd
/// is dropped.
///
/// ```
/// use isoshard::{ops::{Bits, RmsNorm, eval_whole}, tensor::{DType, Tensor}};
/// let (x, w) = (Tensor::from_vec(vec![4.0, -4.0], [1, 2])?, Tensor::full(DType::F64, [2], 3.0));
/// let outs = eval_whole(&RmsNorm { eps: Bits(0.0) }, &[x, w])?;
/// assert_eq!((outs[0].to_f64_vec(), outs[1].to_f64_vec()), (vec![3.0, -3.0], vec![0.25]));
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RmsNorm {
    /// The number added to the mean of squares.
    pub eps: Bits,
}

impl Op for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x, w] = arity(self.name(), ins)?;
        let shape = expect_norm(self.name(), x, std::slice::from_ref(w), ins)?;
        Ok(smallvec![x.clone(), Meta { dtype: accumulator(x.dtype), shape }])
    }

    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let row =
            |d| Row::new([AxisPlacement::S(d), AxisPlacement::R], [AxisPlacement::S(d), AxisPlacement::S(d)]);
        (0..ins[0].shape.len() - 1).map(row).collect()
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let (y, rstd) = cpu::rms_norm(self.name(), &ins[0], Some(&ins[1]), self.eps.0)?;
        Ok(smallvec![y, rstd])
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let (y, rstd) = cuda::rms_norm(self.name(), &ins[0], Some(&ins[1]), self.eps.0)?;
        Ok(smallvec![y, rstd])
    }

    /// Per element: 2 for the mean of squares and 2 for the result. Per row: 4.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::elementwise(4, ins, outs).plus(elements(&outs[1]).saturating_mul(4))
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.constant(1, "a statistic, for the derivative of result 0");
        let ins = [g.grad(0), g.input(0), g.input(1), g.output(1)];
        let grads = g.apply_all(RmsNormGrad { eps: self.eps }, &ins)?;
        g.set(0, grads[0]);
        g.set(1, grads[1]);
        Ok(())
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let sample = |shape: &[usize]| {
        let w = [*shape.last().expect("a shape with a last dim")];
        Sample::new(RmsNorm { eps: Bits(1e-3) }, [Input::ints(shape), Input::ints(w)])
    };
    vec![sample(&[5, 3]), sample(&[2, 3, 7]), sample(&[5]), sample(&[3, 1]), sample(&[0, 3])]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::eval_whole;

    #[test]
    fn follows_its_definition() {
        let x = [3.0, -1.0, 2.0, 0.5, 0.25, -4.0];
        let w = [1.0, -2.0, 0.5];
        let (tx, tw) = (Tensor::from_slice(&x, [2, 3]).unwrap(), Tensor::from_slice(&w, [3]).unwrap());
        let outs = eval_whole(&RmsNorm { eps: Bits(0.01) }, &[tx, tw]).unwrap();
        for (r, row) in x.chunks(3).enumerate() {
            let rstd = 1.0 / (row.iter().map(|x| x * x).sum::<f64>() / 3.0 + 0.01).sqrt();
            assert!((outs[1].to_f64_vec()[r] - rstd).abs() < 1e-14);
            for c in 0..3 {
                assert!((outs[0].to_f64_vec()[r * 3 + c] - row[c] * rstd * w[c]).abs() < 1e-13);
            }
        }
    }
}
