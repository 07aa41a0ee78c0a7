//! Results of cheap calls that the tape does not keep: the backward pass computes them again from operands that it keeps anyway.

use std::rc::Rc;

use smallvec::SmallVec;

use crate::comm::ModulePath;
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::plan::call_plan::CallPlan;
use crate::dtensor::plan::derivative_program::DerivativeProgram;
use crate::dtensor::tensor::dtensor::DTensor;
use crate::dtensor::tensor::saved::{ComputedFrom, Origin, Saved};
use crate::error::Result;
use crate::ops::Op;

/// The most operations per byte of a cheap call: from about here on computing takes longer than reading and writing.
const FLOPS_PER_BYTE: u64 = 8;
/// The most calls that compute one value again. Each value of a long chain would be computed from the chain's start.
const DEPTH: usize = 2;
/// An operand with so many times fewer bytes than the result is kept for it.
const SMALL: usize = 16;

impl DeviceMesh {
    /// Until the returned guard is dropped, the tape does not keep the results of cheap calls if it keeps their operands
    /// anyway: the backward pass computes them again. So the results of activation functions, of norms and of products of
    /// elements are freed as soon as the forward pass has read them. The times of such calls are those of reading and writing
    /// memory; calls that communicate are not repeated. No bit changes.
    ///
    /// A call is cheap if its work ([`Op::work`]) is at most 8 operations per byte. Its result is computed again if
    /// the derivative reads all operands but small ones, and not the result: `gelu` and `layer_norm` are, `exp`, whose
    /// derivative reads its result, is not. [`nn::Plan::recompute_cheap`](crate::nn::Plan::recompute_cheap) does so for modules.
    /// [`DTensor::recompute`] drops the results of all calls in a function.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::{DType, storage}};
    /// let bytes = spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let x = DTensor::full(&mesh, DType::F32, [1 << 12], "()", 0.5)?.requires_grad()?;
    ///     let before = storage::pool_stats().live_bytes;
    ///     let kept = x.gelu()?.square()?;
    ///     let kept_bytes = storage::pool_stats().live_bytes - before;
    ///     let guard = mesh.recompute_cheap();
    ///     let again = x.gelu()?.square()?; // the derivative of a square reads its operand
    ///     drop(guard);
    ///     let dx = |y: DTensor| y.sum_all()?.backward()?.take(&x).expect("a leaf").local().to_vec::<f32>();
    ///     let bytes = (kept_bytes, storage::pool_stats().live_bytes - before - kept_bytes);
    ///     assert_eq!(dx(kept)?, dx(again)?);
    ///     Ok(bytes)
    /// })?;
    /// assert_eq!(bytes, [(32 << 10, 16 << 10)]); // the second keeps its last result alone
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn recompute_cheap(&self) -> RecomputeCheap {
        self.0.recompute_cheap.set(self.0.recompute_cheap.get() + 1);
        RecomputeCheap(self.clone())
    }
}

/// The guard of [`DeviceMesh::recompute_cheap`]: while it lives, results of cheap calls are not kept.
pub struct RecomputeCheap(DeviceMesh);

impl Drop for RecomputeCheap {
    fn drop(&mut self) {
        let guards = &self.0.0.recompute_cheap;
        guards.set(guards.get() - 1);
    }
}

/// Marks those results of a call that are to be computed again. `saved` has what the derivative keeps of the operands.
pub(in crate::dtensor) fn mark_cheap(
    op: &dyn Op,
    plan: &CallPlan,
    program: &DerivativeProgram,
    ins: &[&DTensor],
    saved: &[Saved],
    outs: &mut [DTensor],
) -> Result<()> {
    let mesh = &ins[0].mesh;
    let (operand_reads, result_reads) = program.reads.split_at(ins.len());
    let unread = || (0..outs.len()).filter(|&out| !result_reads[out]);
    let Some(largest) = unread().map(|out| plan.outs[out].meta().len_bytes()).max() else { return Ok(()) };
    let [work, _] = plan.work_of(mesh, op);
    let is_cheap = work.flops <= work.bytes.saturating_mul(FLOPS_PER_BYTE);
    // A view takes no memory of its own.
    let is_kept_view = op.is_view() && !matches!(ins[0].origin, Some(Origin::Computed(_)));
    if !is_cheap || is_kept_view || plan.moves.iter().any(Option::is_some) || !plan.can_repeat() {
        return Ok(());
    }
    let (mut kept, mut again) = (saved.iter(), SmallVec::new());
    for ((x, meta), reads) in ins.iter().zip(&plan.metas).zip(operand_reads) {
        let saved = if *reads { kept.next() } else { None };
        let is_small = meta.len_bytes() <= largest / SMALL;
        again.push(match (&x.origin, saved) {
            // A view would hold the memory of all that was gathered with it.
            (Some(Origin::Gathered(_)), _) if is_small => {
                let local = x.local.to_owned_copy()?;
                Saved::Kept(DTensor::wrap(mesh, local, x.meta.clone(), x.lineage))
            }
            (Some(Origin::Gathered(_)), _) => return Ok(()),
            (Some(Origin::Computed(from)), _) if from.depth < DEPTH => Saved::of(x),
            (None, Some(saved)) => saved.clone(),
            (None, None) if is_small => Saved::Kept(x.detach()),
            _ => return Ok(()),
        });
    }
    let depths = again.iter().map(|saved| match saved {
        Saved::Again(Origin::Computed(from)) => from.depth,
        _ => 0,
    });
    let depth = 1 + depths.max().unwrap_or(0);
    for (out, y) in outs.iter_mut().enumerate().filter(|(out, _)| !result_reads[*out]) {
        let (op, ins, mesh, path) = (plan.op.clone(), again.clone(), mesh.clone(), ModulePath::current());
        let from = ComputedFrom { op, ins, out, mesh, path, reduction: plan.mode.reduction, depth };
        y.origin = Some(Origin::Computed(Rc::new(from)));
    }
    Ok(())
}

/// Marks a result of a call that computed more than it, as what `op` gives for `ins`: these must be what the tape keeps, or
/// small.
pub(in crate::dtensor) fn mark_as_computed(y: &mut DTensor, op: &dyn Op, ins: &[&DTensor]) -> Result<()> {
    if y.mesh.0.recompute_cheap.get() == 0 || !y.has_history() {
        return Ok(());
    }
    let keep = |x: &&DTensor| {
        // A view would hold the memory of all that was gathered with it.
        let local = if x.origin.is_some() { x.local.to_owned_copy()? } else { x.local.clone() };
        Ok(Saved::Kept(DTensor::wrap(&x.mesh, local, x.meta.clone(), x.lineage)))
    };
    let ins = ins.iter().map(keep).collect::<Result<_>>()?;
    let (mesh, path, reduction) = (y.mesh.clone(), ModulePath::current(), y.mesh.reduction());
    let from = ComputedFrom { op: op.to_shared(), ins, out: 0, mesh, path, reduction, depth: 1 };
    y.origin = Some(Origin::Computed(Rc::new(from)));
    Ok(())
}

impl Saved {
    /// Keeps a value, or how it is had again if it is so marked.
    pub(in crate::dtensor) fn of(x: &DTensor) -> Saved {
        x.origin.clone().map_or_else(|| Saved::Kept(x.detach()), Saved::Again)
    }

    /// Returns the value, without history.
    pub(in crate::dtensor) fn value(&self) -> Result<DTensor> {
        match self {
            Saved::Kept(x) => Ok(x.clone()),
            Saved::Again(Origin::Gathered(from)) => from.value(),
            Saved::Again(Origin::Computed(from)) => from.value(),
        }
    }

    /// Returns how a recorded pass gets the value again, if it is not kept.
    pub(in crate::dtensor) fn origin_of_recorded(&self) -> Option<Origin> {
        match self {
            Saved::Kept(_) => None,
            Saved::Again(Origin::Gathered(from)) => Some(Origin::Gathered(from.of_recorded())),
            Saved::Again(computed) => Some(computed.clone()),
        }
    }
}

impl ComputedFrom {
    fn value(&self) -> Result<DTensor> {
        let ins = self.ins.iter().map(Saved::value).collect::<Result<SmallVec<[DTensor; 3]>>>()?;
        let ins: SmallVec<[&DTensor; 3]> = ins.iter().collect();
        let _scope = self.path.enter();
        let _no_grad = self.mesh.no_grad();
        let mut outs = self.mesh.with_only_reduction(self.reduction, || DTensor::apply(&*self.op, &ins))?;
        Ok(outs.remove(self.out))
    }
}
