//! `expert_slots`: the slots of tokens in a list that is sorted by expert.

use smallvec::smallvec;

use super::{cpu, cuda};
use crate::error::{Error, Result};
use crate::ops::index::segments::expect_indices;
use crate::ops::record::work::elements;
use crate::ops::{
    AxisPlacement, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Vjp, Windows, Work, arity,
};
use crate::tensor::{DType, Shape, Tensor, cpu::as_elements_mut};

/// The slot of each assignment of a token to an expert, and the number of assignments per expert. Applied by
/// [`DTensor::expert_slots`](crate::dtensor::DTensor::expert_slots).
///
/// The operand, i64 `[.., tokens, choices]` with at most one leading dim, holds expert numbers. The results are the
/// slots, of the same shape, and the counts `[.., experts]`, both i64. Each entry of the leading dim has slots of its
/// own. Assignments to one expert have consecutive slots in row-major order; the experts' ranges of slots follow one
/// another.
///
/// ```
/// use isoshard::{ops::{ExpertSlots, eval_whole}, tensor::Tensor};
/// let expert = Tensor::from_vec(vec![2i64, 0, 0, 2], [2, 2])?; // two tokens, each with two experts of three
/// let of = |capacity| eval_whole(&ExpertSlots { experts: 3, capacity }, std::slice::from_ref(&expert));
/// let sorted = of(None)?;
/// assert_eq!(sorted[0].to_vec::<i64>()?, [2, 0, 1, 3]);
/// assert_eq!(sorted[1].to_vec::<i64>()?, [2, 0, 2]);
/// assert_eq!(of(Some(1))?[0].to_vec::<i64>()?, [2, 0, -1, -1]); // one slot per expert: the later ones are dropped
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ExpertSlots {
    /// The number of experts.
    pub experts: usize,
    /// The number of slots per expert. Later assignments to an expert are dropped: their slot is -1. If `None`, each
    /// expert has as many slots as assignments.
    pub capacity: Option<usize>,
}

impl Op for ExpertSlots {
    fn name(&self) -> &'static str {
        "expert_slots"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [expert] = arity(self.name(), ins)?;
        expect_indices(self.name(), expert)?;
        let leading = match &expert.shape[..] {
            [_, _] => None,
            [batch, _, _] => Some(*batch),
            _ => {
                let rule = "wants expert numbers [tokens, choices] or [batch, tokens, choices]";
                return Err(Error::invalid(self.name(), rule, expert.to_string(), "reshape them"));
            }
        };
        if self.experts == 0 {
            let rule = "there is no expert to send tokens to";
            return Err(Error::invalid(self.name(), rule, expert.to_string(), "pass the number of experts"));
        }
        let slots = self.capacity.map_or(Some(0), |c| c.checked_mul(self.experts));
        if slots.is_none_or(|n| i64::try_from(n).is_err()) {
            let given = format!("{} experts with {} slots each", self.experts, self.capacity.unwrap_or(0));
            let rule = "the slots' numbers exceed i64";
            return Err(Error::invalid(self.name(), rule, given, "pass a smaller capacity"));
        }
        let counts: Shape = leading.into_iter().chain([self.experts]).collect();
        Ok(smallvec![expert.clone(), Meta::new(DType::I64, counts)])
    }

    /// A slot depends on all tokens of its batch entry.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let batch = ins[0].shape.len() == 3;
        let row = Row::new([AxisPlacement::S(0)], [AxisPlacement::S(0), AxisPlacement::S(0)]);
        batch.then_some(row).into_iter().collect()
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let expert = ins[0].contiguous()?;
        let mut slots = Tensor::zeros(DType::I64, at.outs[0].local());
        let mut counts = Tensor::zeros(DType::I64, at.outs[1].local());
        let each = expert.shape().iter().rev().take(2).product::<usize>();
        if each > 0 {
            let (slots, counts) =
                (as_elements_mut::<i64>(slots.bytes_mut()), as_elements_mut::<i64>(counts.bytes_mut()));
            let entries = expert.as_slice::<i64>()?.chunks_exact(each);
            let outs = slots.chunks_exact_mut(each).zip(counts.chunks_exact_mut(self.experts));
            for (expert, (slots, counts)) in entries.zip(outs) {
                cpu::number_slots(expert, self.capacity, slots, counts)?;
            }
        }
        Ok(smallvec![slots, counts])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let (slots, counts) = cuda::expert_slots(&ins[0], self.experts, self.capacity, at.outs[1].local())?;
        Ok(smallvec![slots, counts])
    }

    /// A count and a slot per assignment.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::new(elements(&ins[0]).saturating_mul(2), ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.none(0, "an index has no derivative");
        Ok(())
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let sample = |capacity, shape: &[usize], experts| {
        Sample::new(ExpertSlots { experts, capacity }, [Input::index(shape, experts)]).not_smooth()
    };
    vec![
        sample(None, &[5, 7, 2], 3),
        sample(Some(2), &[3, 5, 2], 3),
        sample(Some(1), &[7, 1], 2),
        sample(None, &[2, 0, 2], 3),
    ]
}
