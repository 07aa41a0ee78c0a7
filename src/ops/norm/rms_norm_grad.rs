//! `rms_norm_grad`: the derivative of `rms_norm`, in one pass over x and dy.

use smallvec::smallvec;

use super::layer_norm::{expect_norm, unfused};
use super::layer_norm_grad::{STATISTIC, expect_saved, grad_rows};
use super::{cpu, cuda};
use crate::error::Result;
use crate::ops::{Bits, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Vjp, Windows, Work, arity};
use crate::tensor::Tensor;

/// The derivative of [`RmsNorm`](crate::ops::RmsNorm): `(dy, x, w, rstd) -> (dx, dw)`, each of its operand's shape.
///
/// Its own derivative treats rstd as a function of x.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RmsNormGrad {
    /// The number added to the mean of squares in the forward call. Only the derivative of this operator uses it.
    pub eps: Bits,
}

impl Op for RmsNormGrad {
    fn name(&self) -> &'static str {
        "rms_norm_grad"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [dy, x, w, rstd] = arity(self.name(), ins)?;
        let kept = expect_norm(self.name(), x, std::slice::from_ref(w), ins)?;
        expect_saved(self.name(), dy, x, &[rstd], kept, ins)?;
        Ok(smallvec![x.clone(), w.clone()])
    }

    /// Linear in `dy`. If rows are sharded, the gradient of the weight is a partial sum.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        grad_rows(&ins[1], 1, 1, 1)
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let (dx, dw) = cpu::rms_norm_backward(self.name(), &ins[0], &ins[1], Some(&ins[2]), &ins[3])?;
        Ok(smallvec![dx, dw])
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let (dx, dw) = cuda::rms_norm_backward(self.name(), &ins[0], &ins[1], Some(&ins[2]), &ins[3])?;
        Ok(smallvec![dx, dw])
    }

    /// Per element: 2 to normalize x and to weight dy, 2 for the mean, 3 for dx, 2 for dw.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::elementwise(9, ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let (x, w) = (g.input_meta(1).clone(), g.input_meta(2).clone());
        g.none(3, STATISTIC);
        unfused(&x, Some(&w), self.eps, false)?.gradient(&[true, true])?.write_vjp(g, &[1, 2, 0])
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let sample = |shape: &[usize]| {
        let (n, outer) = shape.split_last().expect("a shape with a last dim");
        let kept: Vec<usize> = outer.iter().copied().chain([1]).collect();
        let x = Input::ints(shape);
        let ins = [x.clone(), x, Input::ints([*n]), Input::positive(kept)];
        Sample::new(RmsNormGrad { eps: Bits(1e-3) }, ins)
            .rounded(outer.iter().product::<usize>() + n)
            .not_smooth()
    };
    vec![sample(&[5, 3]), sample(&[2, 3, 7]), sample(&[5]), sample(&[0, 3])]
}
