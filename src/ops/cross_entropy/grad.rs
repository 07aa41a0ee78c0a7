//! `cross_entropy_grad`: the derivative of `cross_entropy` with respect to the logits, in one pass.

use isoshard_kernels::rows::CrossEntropyRows;
use smallvec::smallvec;

use super::cuda;
use super::rows::expect_loss;
use crate::error::{Error, Result};
use crate::ops::index::cuda::HeldRange;
use crate::ops::index::segments::checked_index;
use crate::ops::record::work::elements;
use crate::ops::softmax::sum_exp::{row_maximum, statistic_shape};
use crate::ops::unfused::UnfusedExpression;
use crate::ops::{
    Add, AddScalar, Argmax, AxisPlacement, Bits, Compare, CompareKind, CrossEntropyTerms, Gather, Input,
    LogSoftmax, Mask, MeshAxis, Meta, Metas, Mul, MulScalar, Op, Row, Sample, Statistic, Sub, Tensors, Vjp,
    Windows, Work, ZeroGrad, arity, list,
};
use crate::tensor::cpu::{Num, Real, RowsMut, Widen, for_each_part};
use crate::tensor::{Float, Tensor, cpu, for_dtype};

/// The derivative of [`CrossEntropy`](crate::ops::CrossEntropy) with respect to the logits:
/// `(logits, target, m, s, dy) -> dy * ((a + 2 z lse) * exp(logits - m) / s - a * onehot(target))`, where `dy` `[..]`
/// is the loss's gradient, `a` and `z` are the factors of the [terms](CrossEntropyTerms), and `lse = ln(s) + m`. Its own
/// derivative treats m and s as functions of the logits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CrossEntropyGrad {
    /// The forward call's ignored rows and factors.
    pub terms: CrossEntropyTerms,
}

impl Op for CrossEntropyGrad {
    fn name(&self) -> &'static str {
        "cross_entropy_grad"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [logits, target, m, s, dy] = arity(self.name(), ins)?;
        let shape = expect_loss(self.name(), [logits, target, m, s], ins)?;
        if dy.shape != shape || dy.dtype != s.dtype {
            return Err(Error::invalid(
                self.name(),
                "dy does not have the loss's shape and dtype",
                list(ins),
                "",
            ));
        }
        Ok(smallvec![logits.clone()])
    }

    /// Linear in `dy`.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let last = ins[0].shape.len() - 1;
        let r = AxisPlacement::R;
        let mut rows: Vec<Row> = (0..last).map(|d| Row::same(AxisPlacement::S(d), 5)).collect();
        rows.push(Row::new([AxisPlacement::S(last), r, r, r, r], [AxisPlacement::S(last)]));
        rows.push(Row::new([r, r, r, r, AxisPlacement::SUM], [AxisPlacement::SUM]));
        rows
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let last = at.ins[0].global.len() - 1;
        let (classes, start) = (at.ins[0].global[last], at.ins[0].start(last));
        let held = ins[0].shape()[last];
        let (logits, target) = (ins[0].contiguous()?, ins[1].contiguous()?);
        let (m, s, dy) = (ins[2].contiguous()?, ins[3].contiguous()?, ins[4].contiguous()?);
        let out = for_dtype!(float self.name(), logits.dtype(), T => {
            type A = <T as Float>::Acc;
            let dy = dy.reshape(s.shape())?;
            let mut out = Tensor::uninit(logits.dtype(), logits.shape());
            let (x, m, target) = (logits.as_slice::<T>()?, m.as_slice::<T>()?, target.as_slice::<i64>()?);
            let (s, dy) = (s.as_slice::<A>()?, dy.as_slice::<A>()?);
            let grad = cpu::as_elements_mut::<T>(out.bytes_mut());
            let nll = <A as cpu::Widen>::Wide::of(self.terms.nll_factor.0);
            let ignored = |target: i64| self.terms.ignore_index == Some(target);
            for &target in target.iter().filter(|&&target| !ignored(target)) {
                checked_index(self.name(), target, classes, last)?;
            }
            let rows = RowsMut { data: grad, len: held };
            for_each_part(target.len(), x.len(), rows, |part, grad| {
                let mut buffers = [vec![A::ZERO; CHUNK], vec![A::ZERO; CHUNK]];
                for (r, grad) in part.zip(grad.data.chunks_exact_mut(held.max(1))) {
                    let x = &x[r * held..(r + 1) * held];
                    if ignored(target[r]) {
                        grad.fill(T::narrow(A::ZERO));
                        continue;
                    }
                    let m = m[r].widen();
                    let share = dy[r] * self.terms.softmax_factor(m, s[r]) / s[r];
                    shares::<T>(x, m, share, grad, &mut buffers);
                    let place = (target[r] as usize).wrapping_sub(start);
                    if place < held {
                        grad[place] = T::narrow(A::share(x[place].widen(), m, share) - dy[r] * nll);
                    }
                }
            });
            Ok(out)
        })?;
        Ok(smallvec![out])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let last = at.ins[0].global.len() - 1;
        let classes = HeldRange { n: at.ins[0].global[last], start: at.ins[0].start(last) };
        Ok(smallvec![cuda::cross_entropy_grad(
            [&ins[0], &ins[1], &ins[2], &ins[3], &ins[4]],
            classes,
            &self.terms
        )?])
    }

    /// Per element: a subtraction, an exponential, a product. Per row: `dy / s`, and the subtraction at the target.
    /// Factors other than the default ones are not counted.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::elementwise(Work::SPECIAL + 2, ins, outs).plus(elements(&ins[1]).saturating_mul(2))
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.none(1, "an index has no derivative");
        g.none(2, STATISTIC);
        g.none(3, STATISTIC);
        let loss = unfused(&self.terms, &g.input_meta(0).clone(), &g.input_meta(1).clone())?;
        loss.gradient(&[true, false])?.write_vjp(g, &[0, 1, 4])
    }

    fn statistics(&self, ins: &[Meta]) -> Vec<Statistic> {
        vec![row_maximum(2, &ins[0])]
    }
}

/// The reason why an operand that is a statistic has no gradient.
pub(super) const STATISTIC: &str = "a statistic: the gradient of the logits includes it";

/// Returns the expression of the loss of each row, from the logits and the targets.
fn unfused(terms: &CrossEntropyTerms, logits: &Meta, target: &Meta) -> Result<UnfusedExpression> {
    let mut e = UnfusedExpression::of(&[logits, target]);
    let (x, mut target) = (e.wide_input(0)?, e.input(1));
    let last = logits.shape.len() - 1;
    let ignored = match terms.ignore_index {
        None => None,
        Some(index) => {
            let zeros = e.apply(ZeroGrad, &[target])?;
            let index = e.apply(AddScalar { by: Bits(index as f64) }, &[zeros])?;
            let ignored = e.apply(Compare { kind: CompareKind::Eq }, &[target, index])?;
            target = e.apply(Mask { on: false }, &[ignored, target])?;
            Some(ignored)
        }
    };
    let outer = e.meta(target).shape.clone();
    let index = e.reshape(target, statistic_shape(logits))?;
    let log_rows = e.apply(LogSoftmax { dim: last }, &[x])?;
    let log = e.apply(Gather { dim: last }, &[log_rows, index])?;
    let mut loss = e.apply(MulScalar { factor: Bits(-terms.nll_factor.0) }, &[log])?;
    if terms.z_factor.0 != 0.0 {
        // ln sum exp x = x - log_softmax x at every class. At the largest one both are finite and small, while the
        // target's logit may be -inf.
        let largest = match logits.shape[last] {
            0 => index,
            _ => {
                let argmax = e.apply(Argmax { dim: last }, &[x])?;
                e.reshape(argmax, statistic_shape(logits))?
            }
        };
        let at_largest = e.apply(Gather { dim: last }, &[x, largest])?;
        let log_at_largest = e.apply(Gather { dim: last }, &[log_rows, largest])?;
        let lse = e.apply(Sub, &[at_largest, log_at_largest])?;
        let square = e.apply(Mul, &[lse, lse])?;
        let z = e.apply(MulScalar { factor: terms.z_factor }, &[square])?;
        loss = e.apply(Add, &[loss, z])?;
    }
    let mut loss = e.reshape(loss, outer)?;
    if let Some(ignored) = ignored {
        loss = e.apply(Mask { on: false }, &[ignored, loss])?;
    }
    e.returns(loss);
    Ok(e)
}

/// The number of elements that are converted in one pass, so that the buffers stay in the first-level cache.
const CHUNK: usize = 512;

/// Computes `exp(x - m) * share` of a row.
fn shares<T: Widen<Wide: CrossEntropyRows>>(
    x: &[T],
    m: T::Wide,
    share: T::Wide,
    out: &mut [T],
    [wide, narrow]: &mut [Vec<T::Wide>; 2],
) {
    for (x, out) in x.chunks(CHUNK).zip(out.chunks_mut(CHUNK)) {
        let x = T::load(x, wide);
        T::store(out, narrow, |out| T::Wide::shares(x, m, share, out));
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let sample = |outer: &[usize], classes: usize, terms| {
        let with = |n: usize| -> Vec<usize> { outer.iter().copied().chain([n]).collect() };
        let target = Input::index(outer, classes);
        let (m, s) = (Input::ints(with(1)), Input::positive(with(1)));
        let ins = [Input::ints(with(classes)), target, m, s, Input::ints(outer)];
        Sample::new(CrossEntropyGrad { terms }, ins).not_smooth()
    };
    let plain = CrossEntropyTerms::default();
    let all = CrossEntropyTerms { ignore_index: Some(2), nll_factor: Bits(0.5), z_factor: Bits(0.25) };
    vec![sample(&[5], 3, plain), sample(&[2, 3], 7, all), sample(&[], 5, plain), sample(&[0], 3, plain)]
}
