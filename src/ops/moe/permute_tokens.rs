//! `permute_tokens`: rows of tokens to slots. The derivative of `unpermute_tokens`.

use smallvec::smallvec;

use super::cpu::with_batch;
use crate::error::{Error, Result};
use crate::ops::index::cuda::HeldRange;
use crate::ops::index::segments::expect_indices;
use crate::ops::index::{rows, rows_cuda};
use crate::ops::{
    Algebra, AxisPlacement, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, UnpermuteTokens, Vjp,
    Windows, Work, arity, list,
};
use crate::tensor::cuda::fault::Fault;
use crate::tensor::{Shape, Tensor};

static SLOT: Fault = Fault::index(451, "permute_tokens");
static EQUAL_SLOTS: Fault = Fault::slot(453, "permute_tokens", "two rows have the same slot");

/// Copies rows to slots: `(x, slot) -> y`, where `x` is `[.., tokens, choices, width]`, `slot` (i64)
/// `[.., tokens, choices]`, and `y[.., slot[.., t, k], :] = x[.., t, k, :]` `[.., slots, width]`. At most one leading
/// dim. The derivative of [`UnpermuteTokens`](crate::ops::UnpermuteTokens); applied by
/// [`DTensor::permute_tokens`](crate::dtensor::DTensor::permute_tokens).
///
/// Two rows of a batch entry with the same slot are an error on every mesh and device: each rank has all slots of its
/// batch entries and compares them. A row with slot -1 is dropped. A slot without a row is -0, which a sum ignores. If
/// the tokens are sharded, the result is a partial sum.
///
/// ```
/// use isoshard::{ops::{PermuteTokens, eval_whole}, tensor::Tensor};
/// let x = Tensor::from_vec(vec![1.0, 2.0, 3.0], [3, 1, 1])?;
/// let slot = Tensor::from_vec(vec![3i64, -1, 0], [3, 1])?;
/// assert_eq!(eval_whole(&PermuteTokens { slots: 4 }, &[x, slot])?[0].to_f64_vec(), [3.0, 0.0, 0.0, 1.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PermuteTokens {
    /// The number of slots of a batch entry.
    pub slots: usize,
}

impl Op for PermuteTokens {
    fn name(&self) -> &'static str {
        "permute_tokens"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x, slot] = arity(self.name(), ins)?;
        expect_indices(self.name(), slot)?;
        let dims = slot.shape.len();
        if !matches!(dims, 2 | 3) || x.shape.len() != dims + 1 || x.shape[..dims] != slot.shape[..] {
            let rule =
                "wants rows [tokens, choices, width] and slots [tokens, choices], or both with a batch dim";
            return Err(Error::invalid(self.name(), rule, list(ins), "reshape or expand them"));
        }
        let shape: Shape = x.shape[..dims - 2].iter().copied().chain([self.slots, x.shape[dims]]).collect();
        Ok(smallvec![Meta { dtype: x.dtype, shape }])
    }

    /// Rows are only copied, so any partial operand is accepted. If tokens are sharded, each rank fills the slots of
    /// its tokens, which gives a partial sum; if slots are sharded, each rank fills its own. Every rank has all slots of
    /// its batch entries, so that it finds equal ones.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let lead = ins[1].shape.len() - 2;
        let mut rows: Vec<Row> = (0..lead).map(|d| Row::same(AxisPlacement::S(d), 2)).collect();
        rows.push(Row::new([AxisPlacement::S(lead + 2), AxisPlacement::R], [AxisPlacement::S(lead + 1)]));
        for d in [lead, lead + 1] {
            rows.push(Row::new([AxisPlacement::S(d), AxisPlacement::R], [AxisPlacement::SUM]).exact());
        }
        rows.push(Row::new([AxisPlacement::R, AxisPlacement::R], [AxisPlacement::S(lead)]));
        rows.extend(
            Algebra::Structural
                .rows(1)
                .iter()
                .map(|r| Row::new([r.ins[0], AxisPlacement::R], [r.outs[0]]).exact()),
        );
        rows
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let (x, slot) = (with_batch(&ins[0], 4)?, ins[1].contiguous()?);
        rows::expect_distinct(self.name(), slot.as_slice()?, each(&slot), self.slots)?;
        let slot = of_rows(&slot, at)?;
        let places = rows::slot_places(self.name(), slot.as_slice()?, self.held(at))?;
        Ok(smallvec![rows::write_rows(&x, &places, at.outs[0].local())?])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let (x, slot, fault) = (with_batch(&ins[0], 4)?, &ins[1], &SLOT);
        rows_cuda::expect_distinct(slot, each(slot), self.slots, [fault, &EQUAL_SLOTS])?;
        let slot = of_rows(slot, at)?;
        Ok(smallvec![rows_cuda::write_rows(&x, &slot, self.held(at), fault, at.outs[0].local())?])
    }

    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::moves(ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.none(1, "a slot has no derivative");
        let (slot, dy) = (g.input(1), g.grad(0));
        let dx = g.apply(UnpermuteTokens, &[dy, slot])?;
        g.set(0, dx);
        Ok(())
    }
}

impl PermuteTokens {
    /// Returns the slots that this rank fills.
    fn held(&self, at: &Windows) -> HeldRange {
        let out = &at.outs[0];
        HeldRange { n: self.slots, start: out.start(out.global.len() - 2) }
    }
}

/// Returns the number of slots of a batch entry's rows.
fn each(slot: &Tensor) -> usize {
    slot.shape().iter().rev().take(2).product()
}

/// Returns the slots of the rows that this rank stores, out of those of all rows of its batch entries.
fn of_rows(slot: &Tensor, at: &Windows) -> Result<Tensor> {
    let (x, lead) = (&at.ins[0], slot.shape().len() - 2);
    let tokens = slot.narrow(lead, x.start(lead), x.local()[lead])?;
    tokens.narrow(lead + 1, x.start(lead + 1), x.local()[lead + 1])?.contiguous()
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let sample = |slots, x: &[usize]| {
        let slot = Input::slots(&x[..x.len() - 1], slots);
        Sample::new(PermuteTokens { slots }, [Input::ints(x), slot])
    };
    vec![sample(10, &[3, 5, 2, 2]), sample(6, &[7, 1, 3]), sample(4, &[2, 1, 3, 1]), sample(2, &[0, 2, 3])]
}
