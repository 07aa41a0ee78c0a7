//! `sgd`: one step of gradient descent with momentum, in place if no other tensor shares its buffers.

use half::{bf16, f16};
use isoshard_kernels::loops::{OptimizerStep, SgdLoop};

use super::cuda;
use super::operands::{expect_step, have_one_scale, rounded_dtype, step_operands, step_results, step_rows};
use super::param_loop::each_chunk_of_part;
use crate::error::Result;
use crate::ops::{
    Batched, Bits, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Unkeyed, Vjp, Windows, Work,
};
use crate::tensor::cpu::{Real, Widen};
use crate::tensor::{DType, Element, Float, Tensor, for_dtype};

/// One step of gradient descent with momentum: `(p, g, b, scale) -> (p', b')` (Sutskever et al., *On the importance of
/// initialization and momentum*, 2013, in PyTorch's form). [`optim::Sgd`](crate::optim::Sgd) applies it.
///
/// With `d = scale g + λ p`: `b' = μ b + d` and `p' = p - lr b'`, or with Nesterov momentum `p' = p - lr (d + μ b')`.
/// The momentum `b` starts as zeros. `b` and `scale` (shape `[]`) are f32 (f64 for f64 parameters), and so is the
/// arithmetic. With one more operand before `scale`, `p'` is also rounded, as in [`AdamWStep`](crate::ops::AdamWStep).
/// Communicates nothing.
///
/// ```
/// use isoshard::{ops::{Bits, SgdStep, Unkeyed, eval_whole}, tensor::Tensor};
/// let op = SgdStep { momentum: Bits(0.5), weight_decay: Bits(0.0), nesterov: false, lr: Unkeyed(0.25) };
/// let outs = eval_whole(&op, &[1.0, 2.0, 4.0, 1.0].map(Tensor::scalar::<f64>))?; // p, g, b, scale
/// assert_eq!((outs[0].item()?, outs[1].item()?), (0.0, 4.0));
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SgdStep {
    /// μ, the decay of the momentum.
    pub momentum: Bits,
    /// λ, whose product with the parameter is added to the gradient.
    pub weight_decay: Bits,
    /// True for Nesterov momentum.
    pub nesterov: bool,
    /// The learning rate.
    pub lr: Unkeyed<f64>,
}

impl SgdStep {
    /// Makes the step on a parameter of `T`, which is also rounded to `R` if that was asked for.
    fn run<T, R>(&self, ins: &mut [Tensor]) -> Result<()>
    where
        T: Float + Widen<Wide = <T as Float>::Acc>,
        T::Acc: OptimizerStep,
        R: Element + Widen<Wide = T::Wide>,
    {
        let [p, g, b, rounded @ .., scale] = ins else { unreachable!("infer counted the operands") };
        let scale = T::Acc::of(scale.item()?);
        let (momentum, decay) = (T::Acc::of(self.momentum.0), T::Acc::of(self.weight_decay.0));
        let (step, nesterov) = (T::Acc::of(-self.lr.0), self.nesterov);
        let b = b.make_mut::<T::Acc>()?;
        let rounded = rounded.first_mut().map(|x| x.make_mut::<R>()).transpose()?;
        each_chunk_of_part::<T, R, _>(p, g, b, rounded, |b, at, p, g, out| {
            let b = &mut b[at..][..p.len()];
            T::Acc::sgd(SgdLoop { scale, momentum, decay, step, nesterov, p, g, b, out });
        })
    }

    /// Returns the attributes as kernels use them.
    pub(crate) fn rates(&self) -> cuda::SgdRates {
        cuda::SgdRates {
            momentum: self.momentum.0,
            decay: self.weight_decay.0,
            step: -self.lr.0,
            nesterov: u64::from(self.nesterov),
        }
    }
}

impl Op for SgdStep {
    fn name(&self) -> &'static str {
        "sgd"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let ([p, g, b, scale], rounded) = step_operands(self.name(), ins)?;
        expect_step(self.name(), p, g, &[b], scale, ins)?;
        Ok([p, b].into_iter().chain(rounded).cloned().collect())
    }

    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        step_rows(&ins[0], ins.len() - 1, ins.len() - 2)
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        match rounded_dtype(ins, 4) {
            Some(DType::BF16) => self.run::<f32, bf16>(ins),
            Some(_) => self.run::<f32, f16>(ins),
            None => for_dtype!(float self.name(), ins[0].dtype(), T => self.run::<T, T>(ins)),
        }?;
        Ok(step_results(ins))
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        Ok(Self::cuda_batch(&mut [(self, ins)], &[at])?.swap_remove(0))
    }

    /// Per element: 3 for d, 2 for b', 2 for p', and 2 more with Nesterov momentum.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::elementwise(if self.nesterov { 9 } else { 7 }, ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.no_gradients("an optimizer's step is not part of the function that is differentiated");
        Ok(())
    }
}

/// Makes one launch for all calls with equal attributes and the same scale.
impl Batched for SgdStep {
    const ROUNDS: bool = true;

    fn cuda_batch(calls: &mut [(&Self, &mut [Tensor])], _: &[&Windows]) -> Result<Vec<Tensors>> {
        for some in calls.chunk_by_mut(|a, b| a.0.rates() == b.0.rates() && have_one_scale(a.1, b.1)) {
            let (rates, scale) =
                (some[0].0.rates(), some[0].1.last().expect("infer counted the operands").clone());
            let mut steps = Vec::with_capacity(some.len());
            for (_, ins) in some.iter_mut() {
                let [p, g, b, rounded @ .., _] = &mut **ins else {
                    unreachable!("infer counted the operands")
                };
                let (state, rounded) = ([b], rounded.first_mut());
                steps.push(cuda::ParamStep { param: p, grad: g, state, rounded, value: 0.0 });
            }
            cuda::sgd(&mut steps, &scale, rates)?;
        }
        Ok(calls.iter().map(|(_, ins)| step_results(ins)).collect())
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let sample = |shape: &[usize], nesterov| {
        let op = SgdStep { momentum: Bits(0.875), weight_decay: Bits(0.5), nesterov, lr: Unkeyed(0.125) };
        let p = Input::ints(shape);
        Sample::new(op, [p.clone(), p.clone(), p, Input::positive([])]).not_smooth()
    };
    vec![sample(&[5, 3], false), sample(&[7], true), sample(&[], true), sample(&[0, 3], false)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::eval_whole;

    #[test]
    fn two_steps_by_hand() {
        let t = |x: f64| Tensor::from_vec(vec![x], [1]).unwrap();
        for (nesterov, want) in [(false, [0.68, 0.0784]), (true, [0.392, -0.452096])] {
            let op = SgdStep { momentum: Bits(0.9), weight_decay: Bits(0.2), nesterov, lr: Unkeyed(0.1) };
            let (mut p, mut b) = (t(1.0), t(0.0));
            for want in want {
                let ins = [p.clone(), t(6.0), b.clone(), Tensor::scalar(0.5)];
                let outs = eval_whole(&op, &ins).unwrap();
                (p, b) = (outs[0].clone(), outs[1].clone());
                assert!((p.item().unwrap() - want).abs() < 1e-12, "{nesterov} {p:?}");
            }
        }
    }
}
