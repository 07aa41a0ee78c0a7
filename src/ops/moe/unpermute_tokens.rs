//! `unpermute_tokens`: rows of slots back to their tokens. The derivative of `permute_tokens`.

use smallvec::smallvec;

use super::cpu::with_batch;
use crate::error::{Error, Result};
use crate::ops::index::cuda::HeldRange;
use crate::ops::index::segments::expect_indices;
use crate::ops::index::{rows, rows_cuda};
use crate::ops::{
    Algebra, AxisPlacement, Input, MeshAxis, Meta, Metas, Op, PermuteTokens, Row, Sample, Tensors, Vjp,
    Windows, Work, arity, list,
};
use crate::tensor::cuda::fault::Fault;
use crate::tensor::{Shape, Tensor};

static SLOT: Fault = Fault::index(452, "unpermute_tokens");

/// Reads rows by slot: `(y, slot) -> x`, where `y` is `[.., slots, width]`, `slot` (i64) `[.., tokens, choices]`, and
/// `x[.., t, k, :] = y[.., slot[.., t, k], :]`. A row whose slot is -1 (dropped) is -0. At most one leading dim.
/// Applied by [`DTensor::unpermute_tokens`](crate::dtensor::DTensor::unpermute_tokens).
///
/// If the slots of `y` are sharded, the result is a partial sum. Rows may have equal slots; the derivative,
/// [`PermuteTokens`], refuses them.
///
/// ```
/// use isoshard::{ops::{UnpermuteTokens, eval_whole}, tensor::Tensor};
/// let y = Tensor::from_vec(vec![1.0, 2.0, 3.0], [3, 1])?;
/// let slot = Tensor::from_vec(vec![2i64, 0, -1, 1], [2, 2])?;
/// assert_eq!(eval_whole(&UnpermuteTokens, &[y, slot])?[0].to_f64_vec(), [3.0, 1.0, 0.0, 2.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct UnpermuteTokens;

impl Op for UnpermuteTokens {
    fn name(&self) -> &'static str {
        "unpermute_tokens"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [y, slot] = arity(self.name(), ins)?;
        expect_indices(self.name(), slot)?;
        let dims = slot.shape.len();
        if !matches!(dims, 2 | 3) || y.shape.len() != dims || y.shape[..dims - 2] != slot.shape[..dims - 2] {
            let rule = "wants rows [slots, width] and slots [tokens, choices], or both with a batch dim";
            return Err(Error::invalid(self.name(), rule, list(ins), "reshape or expand them"));
        }
        let shape: Shape = slot.shape.iter().copied().chain([y.shape[dims - 1]]).collect();
        Ok(smallvec![Meta { dtype: y.dtype, shape }])
    }

    /// Rows are only copied, so any partial operand is accepted. If the slots of `y` are sharded, each rank fills in
    /// the rows that it stores, which gives a partial sum.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let lead = ins[1].shape.len() - 2;
        let mut rows: Vec<Row> = (0..lead).map(|d| Row::same(AxisPlacement::S(d), 2)).collect();
        rows.push(Row::new([AxisPlacement::S(lead + 1), AxisPlacement::R], [AxisPlacement::S(lead + 2)]));
        for d in [lead, lead + 1] {
            rows.push(Row::new([AxisPlacement::R, AxisPlacement::S(d)], [AxisPlacement::S(d)]));
        }
        rows.push(Row::new([AxisPlacement::S(lead), AxisPlacement::R], [AxisPlacement::SUM]).exact());
        rows.extend(
            Algebra::Structural
                .rows(1)
                .iter()
                .map(|r| Row::new([r.ins[0], AxisPlacement::R], [r.outs[0]]).exact()),
        );
        rows
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let (y, slot) = (with_batch(&ins[0], 3)?, ins[1].contiguous()?);
        let places = rows::slot_places(self.name(), slot.as_slice()?, held(at))?;
        Ok(smallvec![rows::read_rows(&y, &places, at.outs[0].local())?])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let y = with_batch(&ins[0], 3)?;
        Ok(smallvec![rows_cuda::read_rows(&y, &ins[1], held(at), (true, &SLOT), at.outs[0].local())?])
    }

    /// Reads only the rows that are copied.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::by_index(&ins[1], outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.none(1, "a slot has no derivative");
        let y = &g.input_meta(0).shape;
        let slots = y[y.len() - 2];
        let (slot, dx) = (g.input(1), g.grad(0));
        let dy = g.apply(PermuteTokens { slots }, &[dx, slot])?;
        g.set(0, dy);
        Ok(())
    }
}

/// Returns the slots whose rows this rank stores.
fn held(at: &Windows) -> HeldRange {
    let (y, d) = (&at.ins[0], at.ins[0].global.len() - 2);
    HeldRange { n: y.global[d], start: y.start(d) }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let sample = |y: &[usize], slot: &[usize]| {
        let slots = y[y.len() - 2];
        Sample::new(UnpermuteTokens, [Input::ints(y), Input::slots(slot, slots)])
    };
    vec![
        sample(&[3, 10, 2], &[3, 5, 2]),
        sample(&[6, 3], &[7, 1]),
        sample(&[2, 4, 1], &[2, 1, 3]),
        sample(&[2, 3], &[0, 2]),
    ]
}
