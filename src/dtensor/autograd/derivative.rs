//! Runs derivative programs: the steps that compute the gradients of one call's operands.

use std::rc::Rc;

use smallvec::SmallVec;

use super::kept_parts::joined;
use crate::comm::operator_scope;
use crate::dtensor::call::dispatch::execute;
use crate::dtensor::call::offloaded;
use crate::dtensor::call::operator_span::operator_span;
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::reduction::Reduction;
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::dtensor::plan::call_plan::CallPlan;
use crate::dtensor::plan::derivative_program::DerivativeProgram;
use crate::dtensor::plan::explain::note_move;
use crate::dtensor::redistribute;
use crate::dtensor::tensor::dtensor::DTensor;
use crate::dtensor::tensor::saved::Saved;
use crate::dtensor::tensor::tape::{TapeNode, TapeOutput};
use crate::error::Result;
use crate::ops::{Tensors, VjpStep, VjpValue};
use crate::placement::{Layout, Placement, SumGroups};
use crate::tensor::{Tensor, short_list};

/// The values that a node has kept for its derivative.
pub(in crate::dtensor) enum SavedValues<'a> {
    /// The node keeps them.
    Shared(&'a [Saved]),
    /// The node is dropped, so the derivative may write to them.
    Owned(std::vec::IntoIter<Saved>),
}

/// One run of a derivative program.
pub(in crate::dtensor) struct DerivativeRun<'a> {
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

/// The values of a program: operands, results, gradients of the results, and the results of steps.
#[derive(Default)]
pub(in crate::dtensor) struct DerivativeValues(SmallVec<[Option<DTensor>; 16]>);

impl DerivativeValues {
    /// Removes and returns the gradient of operand `i`, if the program computes it.
    pub fn take_gradient(&mut self, program: &DerivativeProgram, i: usize) -> Option<DTensor> {
        let grad = program.grads[i]?;
        let place = &mut self.0[grad.index()];
        if program.grads[i + 1..].contains(&Some(grad)) { place.clone() } else { place.take() }
    }

    fn get(&self, v: usize) -> &DTensor {
        self.0[v].as_ref().expect("programs read what they declared or computed")
    }

    fn take(&mut self, v: usize) -> DTensor {
        self.0[v].take().expect("programs read what they declared or computed")
    }

    /// Returns what step `k` gives if it adds a missing gradient, which is zero: the other term.
    fn other_term(&mut self, program: &DerivativeProgram, k: usize) -> Option<DTensor> {
        let [x, y] = program.steps[k].ins[..] else { return None };
        let missing = |v: VjpValue| program.is_only_added(v.index()) && self.0[v.index()].is_none();
        let (i, other) = if missing(y) { (0, x) } else { Some((1, y)).filter(|_| missing(x))? };
        let is_last = program.last_reads[k] >> i & 1 == 1;
        Some(if is_last { self.take(other.index()) } else { self.get(other.index()).clone() })
    }

    fn metas(&self, step: &VjpStep) -> SmallVec<[&Rc<TensorMeta>; 4]> {
        let mut metas = SmallVec::new();
        step.ins.iter().for_each(|r| metas.push(&self.get(r.index()).meta));
        metas
    }
}

impl SavedValues<'_> {
    /// Returns the next value, with the origin that it has in a recorded run, or `None` if it is not wanted.
    fn next(&mut self, wanted: bool, recording: bool) -> Result<Option<DTensor>> {
        let read = |saved: &Saved| {
            let origin = if recording { saved.origin_of_recorded() } else { None };
            Ok(Some(DTensor { origin, ..saved.value()? }))
        };
        match self {
            SavedValues::Shared(all) => {
                let (saved, others) = all.split_first().expect("the node keeps what its program reads");
                *all = others;
                if wanted { read(saved) } else { Ok(None) }
            }
            SavedValues::Owned(all) => match all.next().expect("the node keeps what its program reads") {
                _ if !wanted => Ok(None),
                Saved::Kept(x) => Ok(Some(x)),
                saved @ Saved::Again(_) => read(&saved),
            },
        }
    }
}

impl DerivativeRun<'_> {
    /// Computes the operands' gradients in `values`, which is empty, given those of the results; a missing one is zero.
    /// Runs only the steps for the needed operands. A value is freed after its last use, so that its step may write to it.
    pub fn run(
        mut self,
        mut saved: SavedValues<'_>,
        grads: &mut [Option<DTensor>],
        values: &mut DerivativeValues,
    ) -> Result<()> {
        let DerivativeRun { mesh, node, program, needed, .. } = self;
        // All values are live if all gradients are wanted.
        let live = needed.map(|needed| program.live_values(needed));
        let is_live = |v: usize| live.as_ref().is_none_or(|live| live[v]);
        let recording = mesh.grad_enabled();
        let saved_len = program.reads.len() - grads.len();
        values.0.resize_with(program.values_len, || None);
        for v in (0..saved_len).filter(|&v| program.reads[v]) {
            values.0[v] = saved.next(is_live(v), recording)?;
            if let Some(x) = values.0[v].as_mut().filter(|_| recording) {
                x.history = self.history_of_saved(v, saved_len);
            }
        }
        for (k, grad) in grads.iter_mut().enumerate() {
            let (v, grad) = (saved_len + k, grad.take());
            if program.reads[v] && is_live(v) {
                let fills = || !program.is_only_added(v);
                values.0[v] = match grad {
                    None if fills() => Some(zeros(mesh, &node.outs[k])?),
                    grad => grad,
                };
            }
        }
        for (k, out) in node.outs.iter().enumerate().filter(|(_, out)| out.layout().has_partial()) {
            let v = saved_len + k;
            let reads = |step: &&VjpStep| step.outs().any(is_live) && reads_value(step, v);
            if program.steps.iter().filter(reads).count() > 1 && !program.is_gradient(v) {
                self.gather_as_summed(out, &mut values.0[v])?;
            }
        }
        for (k, step) in program.steps.iter().enumerate() {
            if live.as_ref().is_some_and(|live| !step.outs().any(|out| live[out])) {
                continue;
            }
            if let Some(term) = values.other_term(program, k) {
                values.0[step.out.index()] = Some(term);
                continue;
            }
            let leaves =
                self.leaves.filter(|(of, _)| step.outs().any(|out| program.is_gradient_of(out, *of)));
            // The known plan is for other groups.
            let known = self.first_plan.take().filter(|_| leaves.is_none());
            match leaves {
                None => self.apply(k, known, recording, values)?,
                Some((_, groups)) => mesh.with_only_reduction(Reduction::Grouped(groups), || {
                    self.apply(k, known, recording, values)
                })?,
            }
            for out in step.outs() {
                let keeps_parts = || leaves.is_some_and(|(of, _)| program.is_gradient_of(out, of));
                if values.get(out).meta.has_kept_parts() && !keeps_parts() {
                    let parts = values.get(out);
                    values.0[out] = Some(joined(mesh, parts, parts.dtype())?);
                }
            }
        }
        for (v, place) in values.0.iter_mut().enumerate() {
            if place.is_some() && !program.is_gradient(v) {
                *place = None;
            }
        }
        Ok(())
    }

    /// Runs a step.
    fn apply(
        &self,
        k: usize,
        known: Option<Rc<CallPlan>>,
        recording: bool,
        values: &mut DerivativeValues,
    ) -> Result<()> {
        let DerivativeRun { mesh, program, .. } = *self;
        let (step, last_reads) = (&program.steps[k], program.last_reads[k]);
        let plan = match known {
            Some(plan) => plan,
            None => program.step_plan(mesh, k, &values.metas(step))?,
        };
        let _span = operator_span(&*step.op, &plan);
        let read_again = |i: usize| i < 64 && last_reads >> i & 1 == 0;
        let kept = |i: usize| read_again(i) && !program.is_gradient(step.ins[i].index());
        let plan = move_for_later(mesh, step, plan, values, kept)?;
        if recording {
            let ins: SmallVec<[&DTensor; 4]> = short_list(step.ins.iter().map(|r| values.get(r.index())));
            let outs = DTensor::apply_by(&plan, &*step.op, &ins)?;
            drop(ins);
            step.outs().zip(outs).for_each(|(out, x)| values.0[out] = Some(x));
            return Ok(());
        }
        let lineage = plan.lineage(step.ins.iter().map(|r| values.get(r.index()).lineage));
        let outs = run_step(mesh, step, last_reads, &plan, values)?;
        for (i, ((out, local), meta)) in step.outs().zip(outs).zip(&plan.outs).enumerate() {
            values.0[out] = Some(DTensor::wrap(mesh, local, meta.clone(), lineage.result(i)));
        }
        Ok(())
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
            let local = x.run_move(&gather)?;
            drop(label);
            *x = DTensor { history: x.history.clone(), ..DTensor::wrap(self.mesh, local, to, x.lineage) };
        }
        Ok(())
    }

    /// Returns the history of a saved value, which a recorded run gives back to it.
    fn history_of_saved(&self, v: usize, saved_len: usize) -> Option<TapeOutput> {
        match v.checked_sub(self.inputs.len()) {
            None => self.inputs[v].clone(),
            Some(out) if self.program.reads[saved_len + out] => {
                Some(TapeOutput { node: self.node.clone(), out })
            }
            Some(_) => None,
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
    values: &mut DerivativeValues,
    kept: impl Fn(usize) -> bool,
) -> Result<Rc<CallPlan>> {
    for (i, r) in step.ins.iter().enumerate() {
        let v = r.index();
        let x = values.get(v);
        let Some((m, to)) = plan.moves[i].as_ref().filter(|(_, to)| x.meta != *to) else { continue };
        if !(x.layout().has_partial() || is_gather(x.layout(), to.layout()) && kept(i)) {
            continue;
        }
        let label = operator_scope(step.op.name());
        let moved = DTensor::wrap(mesh, x.run_move(m)?, to.clone(), x.lineage);
        drop(label);
        values.0[v] = Some(DTensor { history: x.history.clone(), ..moved });
        // The plan may treat the other uses of a value that is an operand twice in another way.
        if step.ins.iter().filter(|other| *other == r).count() > 1 {
            plan = plan.after(mesh, step.op.as_ref(), &values.metas(step))?;
        }
    }
    Ok(plan)
}

fn reads_value(step: &VjpStep, v: usize) -> bool {
    step.ins.iter().any(|r| r.index() == v)
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
    values: &mut DerivativeValues,
) -> Result<Tensors> {
    let mut locals = Tensors::new();
    for (i, r) in step.ins.iter().enumerate() {
        let x = values.get(r.index());
        let by = match &plan.moves[i] {
            Some((_, to)) if x.meta != *to => Some(redistribute::find(mesh, &x.meta, to)?),
            _ => None,
        };
        let lineage = x.lineage;
        let is_last = i < 64 && last_reads >> i & 1 == 1;
        let local = if is_last { values.take(r.index()).local } else { x.local.clone() };
        let local = offloaded::on_device_of(mesh, local)?;
        locals.push(match by {
            Some(by) => {
                let _label = operator_scope(step.op.name());
                let _lineage = lineage.enter();
                by.run(mesh, local)?
            }
            None => local,
        });
    }
    // Without elements, a result would take over any operand that fits.
    let keeps = locals.first().is_some_and(Tensor::is_meta) && !step.op.writes_in_place();
    let _held = keeps.then(|| locals.clone());
    let mut outs = Tensors::new();
    execute(step.op.as_ref(), plan, mesh, &mut locals, &mut outs)?;
    Ok(outs)
}

/// Returns zeros with this metadata, for a result without a gradient.
pub(in crate::dtensor) fn zeros(mesh: &DeviceMesh, meta: &TensorMeta) -> Result<DTensor> {
    DTensor::zeros(mesh, meta.dtype(), meta.shape(), meta.layout().reduced())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::spmd;
    use crate::dtensor::call::dispatch::CALLS;
    use crate::dtensor::plan::call_plan::LOOKUPS;
    use crate::tensor::DType;

    /// One lookup suffices even if an operand is reduced first, and a repeated pass needs none.
    #[test]
    fn a_step_looks_for_its_plan_once() {
        let run = |rank, reduction| {
            let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
            mesh.set_reduction(reduction);
            let whole = |shape: [usize; 2], layout: &str| {
                DTensor::full(&mesh, DType::F32, shape, layout, 0.5)?.requires_grad()
            };
            let (x, w, v) = (whole([64, 4], "(S0)")?, whole([4, 6], "(R)")?, whole([6, 6], "(S0)")?);
            // The derivative of `w`'s cast reads a partial sum, and that of `v` has to reduce one.
            let weight = w.cast(DType::F16)?.cast(DType::F32)?.matmul(&v.exp()?)?.tanh()?;
            let loss = x.matmul(&weight)?.gelu()?.sum_all()?;
            let counts = || [LOOKUPS.get(), CALLS.get()];
            let pass = || -> Result<[usize; 2]> {
                let before = counts();
                loss.backward_keeping()?;
                Ok([0, 1].map(|i| counts()[i] - before[i]))
            };
            let (first, second) = (pass()?, pass()?);
            // The cast next to a leaf is planned for the gradient's layout and for the leaf's.
            assert!(first[0] <= first[1] + 1, "{reduction:?}: {first:?}");
            assert!(first[0] > 0 && second[1] > 0, "{reduction:?}: {first:?}, {second:?}");
            assert_eq!(second[0], 0, "{reduction:?}: the steps know their plans");
            Ok(())
        };
        for reduction in [Reduction::Exact, Reduction::Fast] {
            spmd(2, move |rank| run(rank, reduction)).unwrap_or_else(|e| panic!("{e}"));
        }
    }
}
