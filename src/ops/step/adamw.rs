//! `adamw`: one step of AdamW on a parameter, in place if no other tensor shares its buffers.

use half::{bf16, f16};
use isoshard_kernels::loops::{AdamWFactors, AdamWLoop, OptimizerStep};

use super::cuda;
use super::operands::{expect_step, have_one_scale, rounded_dtype, step_operands, step_results, step_rows};
use super::param_loop::each_chunk_of_part;
use crate::error::Result;
use crate::ops::{
    Batched, Bits, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Unkeyed, Vjp, Windows, Work,
};
use crate::tensor::cpu::{Real, Widen, prefetch_ahead};
use crate::tensor::{DType, Element, Float, Tensor, for_dtype};

/// One step of AdamW: `(p, g, m, v, scale) -> (p', m', v')` (Loshchilov and Hutter, *Decoupled Weight Decay
/// Regularization*, 2019, algorithm 2). [`optim::AdamW`](crate::optim::AdamW) applies it.
///
/// The gradient `g` is first multiplied by `scale`, of shape `[]`, the coefficient of gradient clipping. Then
/// `m' = β1 m + (1 - β1) g`, `v' = β2 v + (1 - β2) g²` and `p' = (1 - lr λ) p - lr (m' / c1) / (sqrt(v' / c2) + ε)`.
/// The moments and `scale` are f32 (f64 for f64 parameters), and so is the arithmetic. With one more operand before
/// `scale`, of the parameter's shape in f16 or bf16 beside an f32 parameter, the step also writes `p'` to it, rounded
/// once, and returns it last: a cast would read all of `p'` again. Communicates nothing.
///
/// ```
/// use isoshard::{ops::{AdamWStep, eval_whole}, tensor::{DType, Tensor}};
/// let full = |value| Tensor::full(DType::F64, [1], value);
/// let op = AdamWStep::at_step(1, 0.5, (0.9, 0.99), 0.0, 0.0);
/// let ins = [full(3.0), full(20.0), full(0.0), full(0.0), Tensor::scalar(1.0)];
/// let outs = eval_whole(&op, &ins)?; // the first step moves by the rate, whatever the gradient's size
/// assert!((outs[0].item()? - 2.5).abs() < 1e-12);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AdamWStep {
    /// β1, the decay of the running mean of gradients.
    pub(crate) beta1: Bits,
    /// β2, the decay of the running mean of their squares.
    pub(crate) beta2: Bits,
    /// ε, added to the square root.
    pub(crate) eps: Bits,
    /// λ, the weight decay.
    pub(crate) weight_decay: Bits,
    /// The learning rate.
    pub(crate) lr: Unkeyed<f64>,
    /// c1 = `1 - β1^t` at step t, which counts from 1.
    pub(crate) correction1: Unkeyed<f64>,
    /// c2 = `1 - β2^t`.
    pub(crate) correction2: Unkeyed<f64>,
}

impl AdamWStep {
    /// Creates the operator of step `t`, which counts from 1.
    pub fn at_step(t: u64, lr: f64, betas: (f64, f64), eps: f64, weight_decay: f64) -> AdamWStep {
        AdamWStep {
            beta1: Bits(betas.0),
            beta2: Bits(betas.1),
            eps: Bits(eps),
            weight_decay: Bits(weight_decay),
            lr: Unkeyed(lr),
            correction1: Unkeyed(1.0 - power(betas.0, t)),
            correction2: Unkeyed(1.0 - power(betas.1, t)),
        }
    }

    /// Makes the step on a parameter of `T`, which is also rounded to `R` if that was asked for.
    fn run<T, R>(&self, ins: &mut [Tensor]) -> Result<()>
    where
        T: Float + Widen<Wide = <T as Float>::Acc>,
        T::Acc: OptimizerStep,
        R: Element + Widen<Wide = T::Wide>,
    {
        let [p, g, m, v, rounded @ .., scale] = ins else { unreachable!("infer counted the operands") };
        let factors = self.factors::<T::Acc>(scale.item()?);
        let state = (m.make_mut::<T::Acc>()?, v.make_mut::<T::Acc>()?);
        let rounded = rounded.first_mut().map(|x| x.make_mut::<R>()).transpose()?;
        each_chunk_of_part::<T, R, _>(p, g, state, rounded, |(m, v), at, p, g, out| {
            let now = at..at + p.len();
            prefetch_ahead(m, &now);
            prefetch_ahead(v, &now);
            T::Acc::adamw(AdamWLoop { factors, p, g, m: &mut m[now.clone()], v: &mut v[now], out });
        })
    }

    /// Returns the attributes in the dtype of the arithmetic.
    fn factors<A: Real>(&self, scale: f64) -> AdamWFactors<A> {
        let rates = self.rates();
        AdamWFactors {
            scale: A::of(scale),
            beta1: A::of(rates.beta1),
            beta2: A::of(rates.beta2),
            rest1: A::of(rates.rest1),
            rest2: A::of(rates.rest2),
            eps: A::of(rates.eps),
            keep: A::of(self.keep()),
            step: A::of(rates.step),
            root: A::of(rates.root),
        }
    }

    /// Returns `1 - lr λ`, the factor of the parameter.
    pub(crate) fn keep(&self) -> f64 {
        1.0 - self.lr.0 * self.weight_decay.0
    }

    /// Returns the attributes, the weight decay excepted, as kernels use them.
    pub(crate) fn rates(&self) -> cuda::AdamWRates {
        cuda::AdamWRates {
            beta1: self.beta1.0,
            beta2: self.beta2.0,
            rest1: 1.0 - self.beta1.0,
            rest2: 1.0 - self.beta2.0,
            eps: self.eps.0,
            step: -self.lr.0 / self.correction1.0,
            root: 1.0 / self.correction2.0.sqrt(),
        }
    }
}

impl Op for AdamWStep {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let ([p, g, m, v, scale], rounded) = step_operands(self.name(), ins)?;
        expect_step(self.name(), p, g, &[m, v], scale, ins)?;
        Ok([p, m, v].into_iter().chain(rounded).cloned().collect())
    }

    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        step_rows(&ins[0], ins.len() - 1, ins.len() - 2)
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        match rounded_dtype(ins, 5) {
            Some(DType::BF16) => self.run::<f32, bf16>(ins),
            Some(_) => self.run::<f32, f16>(ins),
            None => for_dtype!(float self.name(), ins[0].dtype(), T => self.run::<T, T>(ins)),
        }?;
        Ok(step_results(ins))
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        Ok(Self::cuda_batch(&mut [(self, ins)], &[at])?.swap_remove(0))
    }

    /// Per element: 1 to scale g, 3 for m', 4 for v', 7 for p'.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::elementwise(15, ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.no_gradients("an optimizer's step is not part of the function that is differentiated");
        Ok(())
    }
}

/// Makes one launch for all calls with equal attributes and the same scale.
impl Batched for AdamWStep {
    const ROUNDS: bool = true;

    fn cuda_batch(calls: &mut [(&Self, &mut [Tensor])], _: &[&Windows]) -> Result<Vec<Tensors>> {
        for some in calls.chunk_by_mut(|a, b| a.0.rates() == b.0.rates() && have_one_scale(a.1, b.1)) {
            let (rates, scale) =
                (some[0].0.rates(), some[0].1.last().expect("infer counted the operands").clone());
            let mut steps = Vec::with_capacity(some.len());
            for (op, ins) in some.iter_mut() {
                let [p, g, m, v, rounded @ .., _] = &mut **ins else {
                    unreachable!("infer counted the operands")
                };
                let (state, rounded) = ([m, v], rounded.first_mut());
                steps.push(cuda::ParamStep { param: p, grad: g, state, rounded, value: op.keep() });
            }
            cuda::adamw(&mut steps, &scale, rates)?;
        }
        Ok(calls.iter().map(|(_, ins)| step_results(ins)).collect())
    }
}

/// Returns `x` to the power `n`, by repeated squaring. The standard library's function does not promise the same bits
/// on all platforms.
fn power(x: f64, n: u64) -> f64 {
    let (mut result, mut square, mut n) = (1.0, x, n);
    while n > 0 {
        if n & 1 == 1 {
            result *= square;
        }
        square *= square;
        n >>= 1;
    }
    result
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let sample = |shape: &[usize], t| {
        let op = AdamWStep::at_step(t, 0.125, (0.875, 0.75), 1e-8, 0.5);
        let (p, v) = (Input::ints(shape), Input::positive(shape));
        Sample::new(op, [p.clone(), p.clone(), p, v, Input::positive([])]).not_smooth()
    };
    vec![sample(&[5, 3], 1), sample(&[7], 3), sample(&[], 1), sample(&[0, 3], 2)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::accumulator;
    use crate::ops::{Windows, eval_whole};
    use crate::tensor::{DType, Element};

    fn operands(n: usize, dtype: DType) -> Vec<Tensor> {
        let wave = |k: usize| move |i| ((i * k) as f64 * 0.37).sin();
        let fill = |dtype, f: &dyn Fn(usize) -> f64| {
            for_dtype!(any dtype, T => Tensor::build([n], |out: &mut [T]| {
                out.iter_mut().enumerate().for_each(|(i, o)| *o = T::from_f64(f(i)));
            }))
        };
        let state = accumulator(dtype);
        vec![
            fill(dtype, &wave(1)),
            fill(dtype, &wave(2)),
            fill(state, &wave(3)),
            fill(state, &|i| wave(5)(i).abs()),
            Tensor::full(state, [], 0.5),
        ]
    }

    #[test]
    fn follows_algorithm_2() {
        let (lr, b1, b2, eps, decay, t) = (0.01, 0.9, 0.99, 1e-8, 0.1, 3);
        let op = AdamWStep::at_step(t as u64, lr, (b1, b2), eps, decay);
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let ins = operands(1037, dtype);
            let outs = eval_whole(&op, &ins).unwrap();
            let [p, g, m, v] = [0, 1, 2, 3].map(|i| ins[i].to_f64_vec());
            let [p1, m1, v1] = [0, 1, 2].map(|i| outs[i].to_f64_vec());
            let tolerance = match dtype {
                DType::F64 => 1e-14,
                DType::F32 => 1e-6,
                DType::F16 => 1e-3,
                _ => 1e-2,
            };
            for i in 0..p.len() {
                let g = g[i] * 0.5;
                let (m, v) = (b1 * m[i] + (1.0 - b1) * g, b2 * v[i] + (1.0 - b2) * g * g);
                let (mh, vh) = (m / (1.0 - b1.powi(t)), v / (1.0 - b2.powi(t)));
                let want = p[i] - lr * (mh / (vh.sqrt() + eps) + decay * p[i]);
                assert!(
                    (p1[i] - want).abs() < tolerance * want.abs().max(0.1),
                    "{dtype} {i}: {} {want}",
                    p1[i]
                );
                assert!((m1[i] - m).abs() < 1e-6 && (v1[i] - v).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn writes_in_place_and_never_into_a_clone() {
        let op = AdamWStep::at_step(1, 0.1, (0.9, 0.99), 1e-8, 0.0);
        let mut ins = operands(5, DType::F32);
        let metas: Vec<Meta> = ins.iter().map(Meta::of).collect();
        let windows = Windows::whole(&metas, &op.infer(&metas).unwrap());
        let before: Vec<_> = ins.iter().map(|t| t.data::<f32>().unwrap().as_ptr()).collect();
        let outs = op.eval(&mut ins, &windows).unwrap();
        let after = outs.iter().map(|t| t.data::<f32>().unwrap().as_ptr());
        assert!(after.eq([before[0], before[2], before[3]]));
        let kept: Vec<Vec<f64>> = outs.iter().map(Tensor::to_f64_vec).collect();
        op.eval(&mut ins, &windows).unwrap();
        assert!(
            outs.iter().map(Tensor::to_f64_vec).eq(kept),
            "the results above share the operands' buffers"
        );
    }
}
