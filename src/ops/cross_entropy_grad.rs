//! `cross_entropy_grad`: the derivative of `cross_entropy` with respect to the logits, in one pass.

use smallvec::smallvec;

use super::cross_entropy::expect_loss;
use super::segments::checked_index;
use super::sum_exp::row_maximum;
use super::{Axis, Input, Meta, Metas, Op, Row, Sample, Slot, Statistic, Tensors, Vjp, Windows, arity, list};
use crate::error::{Error, Result};
use crate::tensor::cpu::{Map3, Real};
use crate::tensor::{Float, Tensor, cpu, cuda, for_dtype};

/// `dy * (exp(logits - m) / s - onehot(target))`: operands as for `cross_entropy`, then the loss's gradient `dy` `[..]`.
///
/// Missing: its own derivative; asking for it is refused.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CrossEntropyGrad;

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
                "dy is not of the loss's shape and dtype",
                list(ins),
                "",
            ));
        }
        Ok(smallvec![logits.clone()])
    }

    /// Linear in `dy`.
    fn rows(&self, ins: &[Meta], _: Axis) -> Vec<Row> {
        let last = ins[0].shape.len() - 1;
        let r = Slot::R;
        let mut rows: Vec<Row> = (0..last).map(|d| Row::same(Slot::S(d), 5)).collect();
        rows.push(Row::new([Slot::S(last), r, r, r, r], [Slot::S(last)]));
        rows.push(Row::new([r, r, r, r, Slot::SUM], [Slot::SUM]));
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
            let share = cpu::map2::<A, A, A, _>(&dy, &s, |dy, s| dy / s)?;
            let (wide_m, wide_share) = (m.expand(logits.shape())?, share.expand(logits.shape())?);
            let mut out = cpu::map3_with::<T, T, A, T, _>(&logits, &wide_m, &wide_share, Share)?;
            let (x, m, target) = (logits.as_slice::<T>()?, m.as_slice::<T>()?, target.as_slice::<i64>()?);
            let (share, dy) = (share.as_slice::<A>()?, dy.as_slice::<A>()?);
            let grad = cpu::as_elements_mut::<T>(out.bytes_mut());
            for (r, &target) in target.iter().enumerate() {
                let place = checked_index(self.name(), target, classes, last)?.wrapping_sub(start);
                if place < held {
                    let at = r * held + place;
                    grad[at] = T::narrow(Share.at(x[at].widen(), m[r].widen(), share[r]) - dy[r]);
                }
            }
            Ok(out)
        })?;
        Ok(smallvec![out])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let last = at.ins[0].global.len() - 1;
        let classes = cuda::Held { n: at.ins[0].global[last], start: at.ins[0].start(last) };
        Ok(smallvec![cuda::cross_entropy_grad([&ins[0], &ins[1], &ins[2], &ins[3], &ins[4]], classes)?])
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.refuse("the second derivative of cross_entropy is not written")
    }

    fn statistics(&self, ins: &[Meta]) -> Vec<Statistic> {
        vec![row_maximum(2, &ins[0])]
    }

    fn adds(&self) -> bool {
        true
    }
}

/// `exp(x - m) * share`, inlined into the vectorised loop.
#[derive(Clone, Copy)]
struct Share;

impl<A: Real> Map3<A, A, A, A> for Share {
    #[inline(always)]
    fn at(self, x: A, m: A, share: A) -> A {
        (x - m).exp() * share
    }
}

pub(super) fn samples() -> Vec<Sample> {
    let sample = |outer: &[usize], classes: usize| {
        let with = |n: usize| -> Vec<usize> { outer.iter().copied().chain([n]).collect() };
        let target = Input::index(outer, classes);
        let (m, s) = (Input::ints(with(1)), Input::positive(with(1)));
        let ins = [Input::ints(with(classes)), target, m, s, Input::ints(outer)];
        Sample::new(CrossEntropyGrad, ins).rough()
    };
    vec![sample(&[5], 3), sample(&[2, 3], 7), sample(&[], 5), sample(&[0], 3)]
}
