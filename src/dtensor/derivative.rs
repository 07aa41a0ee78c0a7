//! Runs derivative programs: the steps that compute the gradients of one call's operands.

use std::rc::Rc;

use smallvec::SmallVec;

use super::call_plan::CallPlan;
use super::derivative_program::DerivativeProgram;
use super::device_mesh::DeviceMesh;
use super::dispatch::execute;
use super::explain::note_move;
use super::kept_parts::joined;
use super::list::DTensors;
use super::operator_span::operator_span;
use super::redistribute;
use super::reduction::Reduction;
use super::tensor::{DTensor, Saved, TapeNode, TapeOutput};
use super::tensor_meta::TensorMeta;
use crate::comm::operator_scope;
use crate::error::Result;
use crate::ops::{Tensors, VjpStep};
use crate::placement::{Layout, Placement, SumGroups};
use crate::tensor::Tensor;

/// The values that a node has kept for its derivative.
#[expect(clippy::large_enum_variant, reason = "it lives on the stack during one derivative")]
pub(super) enum SavedValues<'a> {
    /// The node keeps them.
    Shared(&'a [Option<Saved>]),
    /// The node is dropped, so the derivative may write to them.
    Owned(SmallVec<[Option<Saved>; 4]>),
}

/// One run of a derivative program.
pub(super) struct DerivativeRun<'a> {
    pub mesh: &'a DeviceMesh,
    /// The node whose derivative runs, and its operands' histories: a recorded run restores the history of saved values
    /// from them.
    pub node: &'a Rc<TapeNode>,
    pub inputs: &'a [Option<TapeOutput>],
    pub program: &'a DerivativeProgram,
    /// The first step's plan, if it is known.
    pub first_plan: Option<Rc<CallPlan>>,
    /// The operands whose gradients are wanted, if not all are.
    pub needed: Option<&'a [bool]>,
    /// The operands that lead to leaves, as a bit set, and the groups of their gradients, if these are not those of other
    /// sums.
    pub leaves: Option<(u64, SumGroups)>,
}

type Values = SmallVec<[Option<DTensor>; 16]>;

impl SavedValues<'_> {
    fn take(&mut self, v: usize) -> Result<Option<DTensor>> {
        match self {
            SavedValues::Shared(all) => all[v].as_ref().map(Saved::value).transpose(),
            SavedValues::Owned(all) => match all[v].take() {
                Some(Saved::Kept(x)) => Ok(Some(x)),
                other => other.as_ref().map(Saved::value).transpose(),
            },
        }
    }
}

impl DerivativeRun<'_> {
    /// Returns the operands' gradients, given those of the results; a missing one is zero. Runs only the steps for the
    /// needed operands. A value is freed after its last use, so that its step may write to it.
    pub fn run(
        self,
        mut saved: SavedValues<'_>,
        grads: SmallVec<[Option<DTensor>; 1]>,
    ) -> Result<SmallVec<[Option<DTensor>; 4]>> {
        let DerivativeRun { mesh, node, program, needed, .. } = self;
        // All values are live if all gradients are wanted.
        let live = needed.map(|needed| program.live_values(needed));
        let is_live = |v: usize| live.as_ref().is_none_or(|live| live[v]);
        let recording = mesh.grad_enabled();
        let saved_len = program.reads.len() - grads.len();
        let mut values: Values = SmallVec::from_elem(None, program.values_len);
        for (v, place) in values.iter_mut().enumerate().take(saved_len) {
            if program.reads[v] && is_live(v) {
                *place = saved.take(v)?;
                if let Some(x) = place.as_mut().filter(|_| recording) {
                    self.restore_history(v, saved_len, &saved, x);
                }
            }
        }
        for (k, grad) in grads.into_iter().enumerate() {
            let v = saved_len + k;
            if program.reads[v] && is_live(v) {
                values[v] = Some(match grad {
                    Some(g) => g,
                    None => zeros(mesh, &node.outs[k])?,
                });
            }
        }
        for (k, out) in node.outs.iter().enumerate().filter(|(_, out)| out.layout().has_partial()) {
            let v = saved_len + k;
            let reads = |step: &&VjpStep| step.outs().any(is_live) && reads_value(step, v);
            if program.steps.iter().filter(reads).count() > 1 && !is_gradient(program, v) {
                self.gather_as_summed(out, &mut values[v])?;
            }
        }
        let mut first_plan = self.first_plan;
        for (step, &last_reads) in program.steps.iter().zip(&program.last_reads) {
            if live.as_ref().is_some_and(|live| !step.outs().any(|out| live[out])) {
                continue;
            }
            let leaves =
                self.leaves.filter(|(of, _)| step.outs().any(|out| program.is_gradient_of(out, *of)));
            // The known plan is for other groups.
            let known = first_plan.take().filter(|_| leaves.is_none());
            let apply = |values: &mut Values| -> Result<DTensors> {
                let plan = match known {
                    Some(plan) => plan,
                    None => CallPlan::find(mesh, step.op.as_ref(), &metas(step, values))?,
                };
                let _span = operator_span(step.op.as_ref(), &plan);
                let read_again = |i: usize| i < 64 && last_reads >> i & 1 == 0;
                let kept = |i: usize| read_again(i) && !is_gradient(program, step.ins[i].0 as usize);
                let plan = move_for_later(mesh, step, plan, values, kept)?;
                if recording {
                    let ins: SmallVec<[&DTensor; 4]> =
                        step.ins.iter().map(|r| value(values, r.0 as usize)).collect();
                    return DTensor::apply_by(&plan, step.op.as_ref(), &ins);
                }
                run_step(mesh, step, last_reads, &plan, values)
            };
            let outs = match leaves {
                None => apply(&mut values)?,
                Some((_, groups)) => {
                    mesh.with_only_reduction(Reduction::Grouped(groups), || apply(&mut values))?
                }
            };
            for (out, x) in step.outs().zip(outs) {
                let joins =
                    x.meta.has_kept_parts() && !leaves.is_some_and(|(of, _)| program.is_gradient_of(out, of));
                values[out] = Some(if joins { joined(mesh, &x, x.dtype())? } else { x });
            }
        }
        let grads = program.grads.iter().enumerate().map(|(i, grad)| {
            let v = (*grad)?;
            let again = program.grads[i + 1..].contains(grad);
            if again { values[v.0 as usize].clone() } else { values[v.0 as usize].take() }
        });
        Ok(grads.collect())
    }

    /// Gathers the gradient of a result along the axes along which the call left the result unreduced: the transpose of
    /// that reduction, with its bytes (Korthikanti et al. 2022). Then all steps run where the call's operands are. Each
    /// step by itself might find it cheaper to move something else.
    fn gather_as_summed(&self, out: &TensorMeta, grad: &mut Option<DTensor>) -> Result<()> {
        let Some(x) = grad.as_mut().filter(|x| !x.layout().has_partial()) else { return Ok(()) };
        let operands = || self.inputs.iter().flatten().map(|input| input.node.outs[input.out].layout());
        let is_summed =
            |&a: &usize| out.layout().axis(a).is_partial() && !operands().any(|o| o.axis(a).is_partial());
        let axes = (0..x.layout().ndim()).filter(is_summed);
        let to = axes.fold(x.layout().clone(), |layout, a| layout.set(a, Placement::Replicate));
        // In strict mode the steps refuse what they would have to move.
        if to != *x.layout() && !self.mesh.0.strict.get() {
            let label = operator_scope("backward");
            let to = self.mesh.intern(x.meta.spec().with_layout(to)?)?;
            let gather = redistribute::find(self.mesh, &x.meta, &to)?;
            note_move(self.mesh, &gather, &x.meta, &to);
            let local = gather.run(self.mesh, x.local.clone())?;
            drop(label);
            *x = DTensor { history: x.history.clone(), ..DTensor::wrap(self.mesh, local, to) };
        }
        Ok(())
    }

    /// Gives a saved value its history back, for a run that is recorded.
    fn restore_history(&self, v: usize, saved_len: usize, saved: &SavedValues<'_>, x: &mut DTensor) {
        x.history = match v.checked_sub(self.inputs.len()) {
            None => self.inputs[v].clone(),
            Some(out) if self.program.reads[saved_len + out] => {
                Some(TapeOutput { node: self.node.clone(), out })
            }
            Some(_) => None,
        };
        if let SavedValues::Shared(all) = saved {
            x.origin = all[v].as_ref().and_then(Saved::origin_of_recorded);
        }
    }
}

/// Reduces those `Partial` operands of `step` that `plan` would reduce, for all later steps too, and gathers those that
/// it would gather if later steps read them (`kept`): both products of a linear map's derivative read one gathered
/// gradient. Returns the plan for the step.
fn move_for_later(
    mesh: &DeviceMesh,
    step: &VjpStep,
    mut plan: Rc<CallPlan>,
    values: &mut Values,
    kept: impl Fn(usize) -> bool,
) -> Result<Rc<CallPlan>> {
    for (i, r) in step.ins.iter().enumerate() {
        let v = r.0 as usize;
        let x = value(values, v);
        let Some((m, to)) = plan.moves[i].as_ref().filter(|(_, to)| x.meta != *to) else { continue };
        if !(x.layout().has_partial() || is_gather(x.layout(), to.layout()) && kept(i)) {
            continue;
        }
        let label = operator_scope(step.op.name());
        let moved = DTensor::wrap(mesh, m.run(mesh, x.local.clone())?, to.clone());
        drop(label);
        values[v] = Some(DTensor { history: x.history.clone(), ..moved });
        // The plan may treat the other uses of a value that is an operand twice in another way.
        if step.ins.iter().filter(|other| *other == r).count() > 1 {
            plan = plan.after(mesh, step.op.as_ref(), &metas(step, values))?;
        }
    }
    Ok(plan)
}

/// Returns true if a value is the gradient of an operand, unchanged.
fn is_gradient(program: &DerivativeProgram, v: usize) -> bool {
    program.grads.iter().flatten().any(|r| r.0 as usize == v)
}

fn reads_value(step: &VjpStep, v: usize) -> bool {
    step.ins.iter().any(|r| r.0 as usize == v)
}

/// Returns true if a move only adds elements to those that a rank has.
fn is_gather(from: &Layout, to: &Layout) -> bool {
    (0..from.ndim()).all(|a| to.axis(a) == from.axis(a) || to.axis(a).is_replicate())
}

/// Runs a step that is not recorded. Operands that no later step reads are its own.
fn run_step(
    mesh: &DeviceMesh,
    step: &VjpStep,
    last_reads: u64,
    plan: &CallPlan,
    values: &mut Values,
) -> Result<DTensors> {
    let mut locals = Tensors::new();
    for (i, r) in step.ins.iter().enumerate() {
        let x = values[r.0 as usize].as_mut().expect("programs read what they declared or computed");
        let is_last = i < 64 && last_reads >> i & 1 == 1;
        let local = if is_last { std::mem::take(&mut x.local) } else { x.local.clone() };
        locals.push(match &plan.moves[i] {
            Some((_, to)) if x.meta != *to => {
                let _label = operator_scope(step.op.name());
                redistribute::find(mesh, &x.meta, to)?.run(mesh, local)?
            }
            _ => local,
        });
    }
    // Without elements, a result would take over any operand that fits.
    let keeps = locals.first().is_some_and(Tensor::is_meta) && !step.op.writes_in_place();
    let _held = keeps.then(|| locals.clone());
    execute(step.op.as_ref(), plan, mesh, &mut locals)
}

/// Returns zeros with this metadata, for a result without a gradient.
pub(super) fn zeros(mesh: &DeviceMesh, meta: &TensorMeta) -> Result<DTensor> {
    DTensor::zeros(mesh, meta.dtype(), meta.shape(), meta.layout().reduced())
}

fn metas<'a>(step: &VjpStep, values: &'a Values) -> SmallVec<[&'a Rc<TensorMeta>; 4]> {
    step.ins.iter().map(|r| &value(values, r.0 as usize).meta).collect()
}

fn value(values: &Values, v: usize) -> &DTensor {
    values[v].as_ref().expect("programs read what they declared or computed")
}
