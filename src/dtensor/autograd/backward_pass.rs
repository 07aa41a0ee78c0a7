//! A running backward pass.
//!
//! Each gradient has whatever layout is cheapest until it reaches a leaf tensor, and there it takes the leaf's layout: a
//! data-parallel gradient is all-reduced there and an FSDP gradient reduce-scattered, each as soon as it is complete.

use std::rc::Rc;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::derivative::{DerivativeRun, DerivativeValues, SavedValues, zeros};
use super::gradient_places::UnitBuffers;
use super::gradient_queue::{GradientQueue, QueuedNode, ResultGradients};
use super::gradient_sum::{add, add_in, cast_local, in_dtype};
use super::gradients::Gradients;
use super::kept_parts::{leaf_of, leaf_operands, moved_to_leaf};
use super::reached_nodes::{count_gradients, extend_reaching, reaching, split_nodes};
use super::unit_gradients::UnitGradients;
use super::waiting_gradients::WaitingGradients;
use super::wanted_gradients::WantedGradients;
use crate::comm::{Phase, operator_scope};
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::plan::call_plan::CallPlan;
use crate::dtensor::plan::derivative_program::DerivativeProgram;
use crate::dtensor::plan::gradient_needs::GradientNeeds;
use crate::dtensor::tensor::dtensor::DTensor;
use crate::dtensor::tensor::tape::{
    CallDerivative, CustomDerivative, GradientUnit, Recomputation, TapeCall, TapeNode, TapeOutput, next_id,
};
use crate::error::Result;
use crate::ops::{Cast, Reshape, VjpProgram};
use crate::placement::SumGroups;
use crate::tensor::short_list;

/// A running backward pass. It visits nodes youngest first, so that the gradients of a node are complete when it is
/// visited.
pub(in crate::dtensor) struct BackwardPass {
    /// The pass's number, which nodes' counts of gradients refer to.
    id: u64,
    mesh: DeviceMesh,
    queue: GradientQueue,
    waiting: WaitingGradients,
    units: UnitGradients,
    gradients: Gradients,
    /// The tensors whose gradients are wanted, if not those of all leaves.
    wanted: Option<WantedGradients>,
}

impl BackwardPass {
    /// Starts a pass from results whose gradients have not been added yet.
    #[inline]
    fn new(mesh: &DeviceMesh, roots: &[(TapeOutput, DTensor)]) -> BackwardPass {
        let id = next_id();
        mesh.0.backward_pass.set(id);
        count_gradients(roots.iter().map(|(root, _)| &*root.node), 0, id);
        BackwardPass {
            id,
            mesh: mesh.clone(),
            queue: GradientQueue::default(),
            waiting: WaitingGradients::default(),
            units: UnitGradients::default(),
            gradients: Gradients::default(),
            wanted: None,
        }
    }

    /// Computes the gradients of all leaves, given those of the results `roots`, and adds them to `gradients`. No step is
    /// recorded. The pass frees the nodes of results that it is given.
    pub fn add_gradients_of_leaves(
        mesh: &DeviceMesh,
        roots: SmallVec<[(TapeOutput, DTensor); 1]>,
        gradients: &mut Gradients,
    ) -> Result<()> {
        let _guard = mesh.no_grad();
        let mut pass = BackwardPass::new(mesh, &roots);
        pass.gradients = std::mem::take(gradients);
        pass.gradients.begin_pass();
        roots.into_iter().try_for_each(|(root, grad)| pass.accumulate(&root, grad))?;
        pass.visit_all()?;
        if !mesh.is_unsynchronised() {
            // Earlier passes may have left parts of leaves that this pass does not reach.
            pass.gradients.reduce(mesh)?;
        }
        *gradients = pass.gradients;
        Ok(())
    }

    /// Computes the gradients of the tensors `wrt`, given that of the result `root`. The steps are recorded unless the
    /// mesh records nothing. A tensor that is not reached has no gradient.
    pub fn find_wanted<'a>(
        mesh: &DeviceMesh,
        root: &TapeOutput,
        grad: DTensor,
        wrt: impl Iterator<Item = &'a TapeOutput>,
    ) -> Result<WantedGradients> {
        let grads: FxHashMap<_, _> = wrt.map(|of| ((of.node.id, of.out), None)).collect();
        let reaching = reaching(&root.node, &grads.keys().map(|&(id, _)| id).collect());
        let wanted = Some(WantedGradients { reaching, grads });
        let mut pass = BackwardPass { wanted, ..BackwardPass::new(mesh, &[]) };
        pass.accumulate(root, grad)?;
        pass.visit_all()?;
        Ok(pass.wanted.expect("set above"))
    }

    fn visit_all(&mut self) -> Result<()> {
        while let Some(queued) = self.queue.pop_youngest() {
            self.visit(queued)?;
        }
        self.start_unit()?;
        self.store_started()
    }

    /// Adds a gradient to those of a result, and queues its node.
    fn accumulate(&mut self, output: &TapeOutput, grad: DTensor) -> Result<()> {
        let node = &*output.node;
        let sum = self.queue.sum_of(output);
        // In exact mode, adding two partial sums would change bits: they wait at a leaf, and are reduced together.
        if self.mesh.reduction().is_exact() && self.waiting.takes(node, &grad) {
            if self.waiting.push(node, grad) {
                let _scope = node.path.enter_in(Phase::Backward);
                self.waiting.add_to(&self.mesh, node, sum, false)?;
            }
            return Ok(());
        }
        if let Some(sum) = sum.as_ref().filter(|_| node.call.is_none()) {
            self.units.note_added(node, sum, &grad);
        }
        *sum = Some(add_in(node.outs[output.out].dtype(), sum.take(), grad)?);
        Ok(())
    }

    /// Runs the derivative of a node's call, or stores a leaf's gradient.
    fn visit(&mut self, queued: QueuedNode) -> Result<()> {
        let QueuedNode { mut node, mut grads } = queued;
        let _scope = node.path.enter_in(Phase::Backward);
        self.waiting.add_to(&self.mesh, &node, &mut grads[0], self.wanted.is_none())?;
        if let Some(wanted) = &mut self.wanted {
            wanted.keep(&node, &grads);
        }
        if self.wanted.is_none() && self.waits_for_unit(&node, &mut grads[0])? {
            return Ok(());
        }
        let Some(call) = &node.call else { return self.store_leaf_gradient(&node, &mut grads[0]) };
        let needed = self.wanted.as_ref().map(|wanted| wanted.needed(call));
        let needed = needed.as_deref();
        if needed.is_some_and(|needed| !needed.contains(&true)) {
            return Ok(());
        }
        // A node that only the queue held, such as one that was recorded during this pass, gives its values away.
        let recording = self.mesh.grad_enabled();
        let mut taken = if recording { None } else { Rc::get_mut(&mut node).and_then(|n| n.call.take()) };
        let owned = taken.as_mut().and_then(|call| match &mut call.derivative {
            CallDerivative::Program { saved, .. } => Some(std::mem::take(saved)),
            CallDerivative::Custom(_) | CallDerivative::Recomputed(_) => None,
        });
        let call = taken.as_ref().or(node.call.as_ref()).expect("a leaf was stored above");
        let kept = |leaf: &TapeNode| self.gradients.keeps_parts_of(leaf);
        let leaves = match self.wanted {
            None => leaf_operands(&self.mesh, &call.inputs, kept),
            Some(_) => None,
        };
        match &call.derivative {
            CallDerivative::Program { program, saved } => {
                if let Some(part) = self.widen_part(call, program, &grads)? {
                    let mut part = Some(part);
                    return self.pass_on(call, needed, &mut |_| part.take());
                }
                let first_plan = self.move_to_leaf_layout(call, program, &mut grads)?;
                let (mesh, inputs) = (&self.mesh, &call.inputs[..]);
                let run = DerivativeRun { mesh, node: &node, inputs, program, first_plan, needed, leaves };
                let saved = match owned {
                    Some(owned) => SavedValues::Owned(owned.into_iter()),
                    None => SavedValues::Shared(saved),
                };
                let mut values = DerivativeValues::default();
                let leaves = completed_leaves(self, call);
                self.units.places.offer(&self.mesh, &leaves, || run.run(saved, &mut grads, &mut values))?;
                self.pass_on(call, needed, &mut |i| values.take_gradient(program, i))
            }
            CallDerivative::Custom(custom) => {
                let mut found = self.run_custom(custom, &node, call, grads, needed, leaves)?;
                self.pass_on(call, needed, &mut |i| found[i].take())
            }
            CallDerivative::Recomputed(recomputation) => {
                self.record_again(recomputation, &node, &call.inputs, grads)?;
                self.pass_on(call, needed, &mut |_| None)
            }
        }
    }

    /// Runs the derivative of a user's function.
    fn run_custom(
        &self,
        custom: &CustomDerivative,
        node: &Rc<TapeNode>,
        call: &TapeCall,
        grads: ResultGradients,
        needed: Option<&[bool]>,
        leaves: Option<(u64, SumGroups)>,
    ) -> Result<SmallVec<[Option<DTensor>; 4]>> {
        let grads = grads.into_iter().zip(&node.outs);
        let grads = grads.map(|(grad, meta)| grad.map_or_else(|| zeros(&self.mesh, meta), Ok));
        let with_history: SmallVec<[bool; 4]> = short_list(call.inputs.iter().map(Option::is_some));
        let needs = GradientNeeds { needed: needed.unwrap_or(&with_history), leaves };
        custom.run(node, &call.inputs, &grads.collect::<Result<Vec<_>>>()?, &needs)
    }

    /// Adds the gradients of a call's operands to those of the nodes behind them. Visits nodes that need not wait for
    /// older ones.
    fn pass_on(
        &mut self,
        call: &TapeCall,
        needed: Option<&[bool]>,
        take_gradient: &mut dyn FnMut(usize) -> Option<DTensor>,
    ) -> Result<()> {
        for (i, output) in call.inputs.iter().enumerate() {
            let Some(output) = output else { continue };
            if needed.is_none_or(|needed| needed[i])
                && let Some(grad) = take_gradient(i)
            {
                let leaf = if grad.meta.has_kept_parts() { leaf_of(output) } else { None };
                match leaf {
                    Some(leaf) => self.gradients.keep_parts(leaf, moved_to_leaf(output, grad)?)?,
                    None => self.accumulate(output, grad)?,
                }
            }
            let (pass, left) = output.node.pending_grads.get();
            // Another pass that ran within this one may have counted anew; then the node waits until it is visited.
            if pass != self.id {
                continue;
            }
            output.node.pending_grads.set((pass, left - 1));
            if left == 1
                && self.is_next_to_leaf(&output.node)
                && let Some(queued) = self.queue.remove(&output.node)
            {
                self.visit(queued)?;
            }
        }
        Ok(())
    }

    /// Returns true if a complete node need not wait for older ones: a leaf, or the only node that a leaf still waits
    /// for, such as a parameter's cast.
    fn is_next_to_leaf(&self, node: &TapeNode) -> bool {
        let Some(call) = &node.call else { return true };
        let [Some(input)] = &call.inputs[..] else { return false };
        input.node.call.is_none() && input.node.pending_grads.get() == (self.id, 1)
    }

    /// Runs a function again whose values were dropped, and adds the gradients of its results to those of the nodes
    /// that this records. The pass visits these next, since they are the youngest.
    fn record_again(
        &mut self,
        recomputation: &Recomputation,
        node: &TapeNode,
        inputs: &[Option<TapeOutput>],
        grads: ResultGradients,
    ) -> Result<()> {
        let first = next_id();
        let outputs = {
            let _scope = node.path.enter_in(Phase::Recomputation);
            recomputation.run_again(&self.mesh, &node.outs, inputs, first)?
        };
        let outputs = outputs.into_iter().zip(grads).filter_map(|(output, grad)| Some((output?, grad?)));
        let outputs: SmallVec<[(TapeOutput, DTensor); 1]> = outputs.collect();
        match &mut self.wanted {
            None => count_gradients(outputs.iter().map(|(of, _)| &*of.node), first, self.id),
            Some(wanted) => {
                let (nodes, _) = split_nodes(outputs.iter().map(|(of, _)| of), |node| node.id >= first);
                extend_reaching(&nodes, &mut wanted.reaching);
            }
        }
        outputs.into_iter().try_for_each(|(output, grad)| self.accumulate(&output, grad))
    }

    /// Returns the gradient of a leaf that stays unreduced, if only a cast to a wider dtype is left before the leaf. Each
    /// rank casts its part: no value changes, and parts of several passes are added in the leaf's dtype.
    fn widen_part(
        &self,
        call: &TapeCall,
        program: &VjpProgram,
        grads: &[Option<DTensor>],
    ) -> Result<Option<DTensor>> {
        let ([Some(output)], [step], [Some(grad)]) = (&call.inputs[..], &program.steps[..], grads) else {
            return Ok(None);
        };
        let Some(Cast { dtype }) = step.op.as_any().downcast_ref() else { return Ok(None) };
        let widens = dtype.is_float() && dtype.size_bytes() > grad.dtype().size_bytes();
        if !(widens && grad.layout().has_partial() && self.stays_unreduced(&output.node)) {
            return Ok(None);
        }
        cast_local(&self.mesh, grad, *dtype).map(Some)
    }

    /// Returns true for a leaf whose gradient is not reduced now, or that has an unreduced one to which this is added.
    /// The gradients of a pass for chosen tensors are not stored, and may be recorded.
    fn stays_unreduced(&self, node: &TapeNode) -> bool {
        let is_stored = node.call.is_none() && self.wanted.is_none();
        is_stored && (self.mesh.keeps_parts() || self.gradients.has_part_of(node))
    }

    /// Redistributes a `Partial` gradient straight to its leaf's layout, if only one operator that keeps this layout
    /// (such as a cast) is left before the leaf. Otherwise that operator would reduce the gradient to some layout,
    /// from which it would have to be redistributed again. Returns the operator's plan if it was looked up.
    fn move_to_leaf_layout(
        &self,
        call: &TapeCall,
        program: &DerivativeProgram,
        grads: &mut [Option<DTensor>],
    ) -> Result<Option<Rc<CallPlan>>> {
        let ([Some(output)], [step], [Some(grad)]) = (&call.inputs[..], &program.steps[..], &grads[..])
        else {
            return Ok(None);
        };
        let leaf = if output.node.call.is_none() {
            output.node.gradient_meta()
        } else {
            &output.node.outs[output.out]
        };
        let saved_len = program.reads.len() - grads.len();
        let reads_it_alone = matches!(step.ins[..], [only] if only.0 as usize == saved_len);
        let fits = output.node.call.is_none() && leaf.shape() == grad.shape() && grad.layout().has_partial();
        if !(reads_it_alone && fits) || self.stays_unreduced(&output.node) {
            return Ok(None);
        }
        let plan = program.step_plan(&self.mesh, 0, &[&grad.meta])?;
        if plan.moves[0].is_none() {
            return Ok(Some(plan));
        }
        let at_leaf = self.mesh.intern(grad.meta.spec().with_layout(leaf.layout().clone())?)?;
        let stays = plan.after(&self.mesh, step.op.as_ref(), &[&at_leaf])?;
        let keeps = stays.moves.iter().all(Option::is_none) && stays.outs[0].layout() == leaf.layout();
        if !keeps {
            return Ok(Some(plan));
        }
        let moved = grad.redistribute(leaf.layout().clone())?;
        debug_assert_eq!(moved.meta, at_leaf, "it has the layout that the plan expects");
        grads[0] = Some(moved);
        Ok(Some(stays))
    }

    /// Takes a complete gradient that is to be reduced with those of its leaf's unit. When another unit's gradients begin
    /// to arrive, the reductions of this one start; they are waited for when those of the next one are to start. Returns
    /// false, and takes nothing, if the gradient does not wait.
    fn waits_for_unit(&mut self, node: &Rc<TapeNode>, grad: &mut Option<DTensor>) -> Result<bool> {
        let Some(leaf) = self.unit_leaf(node) else { return Ok(false) };
        let unit = leaf.destination.as_ref().map(|destination| destination.unit);
        let (Some(unit), Some(partial)) = (unit, grad.take_if(|grad| grad.layout().has_partial())) else {
            return Ok(false);
        };
        let (at_leaf, has_part) = (Rc::ptr_eq(&leaf, node), self.gradients.has_part_of(&leaf));
        if self.mesh.keeps_parts() || has_part && !at_leaf {
            *grad = Some(partial);
            return Ok(false);
        }
        let partial = match self.gradients.remove(&leaf) {
            Some(part) if has_part => add(part, in_dtype(partial, leaf.outs[0].dtype())?)?,
            earlier => {
                earlier.into_iter().for_each(|earlier| self.gradients.store(&leaf, earlier));
                self.units.as_used(&self.mesh, &leaf, partial)?
            }
        };
        if self.units.is_another(unit) {
            self.start_unit()?;
        }
        if self.units.push(&self.mesh, unit, leaf, partial)? {
            self.start_unit()?;
        }
        Ok(true)
    }

    /// Returns the leaf of a unit whose gradient a node completes: its own node, or that of its only cast.
    fn unit_leaf(&self, node: &Rc<TapeNode>) -> Option<Rc<TapeNode>> {
        let Some(call) = &node.call else { return node.destination.is_some().then(|| node.clone()) };
        let ([Some(leaf)], CallDerivative::Program { program, .. }) = (&call.inputs[..], &call.derivative)
        else {
            return None;
        };
        let casts = matches!(&program.steps[..], [step] if step.op.as_any().is::<Cast>());
        let is_last = leaf.node.pending_grads.get() == (self.id, 1) && !self.queue.holds(&leaf.node);
        (casts && is_last && leaf.node.destination.is_some() && leaf.node.call.is_none())
            .then(|| leaf.node.clone())
    }

    /// Waits for the unit that is being reduced, so that a rank holds no third one, and starts the reductions of the unit that
    /// has arrived.
    fn start_unit(&mut self) -> Result<()> {
        self.store_started()?;
        self.units.start(&self.mesh)
    }

    /// Waits for the gradients of the unit that is being reduced, and stores them.
    fn store_started(&mut self) -> Result<()> {
        let Some(unit) = self.units.take_started() else { return Ok(()) };
        for (leaf, grad) in unit.finish(&self.mesh)? {
            let _scope = leaf.path.enter_in(Phase::Backward);
            let grad = cast_local(&self.mesh, &grad, leaf.outs[0].dtype())?;
            self.store_leaf_gradient(&leaf, &mut Some(grad))?;
        }
        Ok(())
    }

    /// Redistributes a leaf's complete gradient to the leaf's layout, adds it to that of earlier passes and stores it.
    fn store_leaf_gradient(&mut self, leaf: &TapeNode, grad: &mut Option<DTensor>) -> Result<()> {
        let Some(mut grad) = grad.take().filter(|_| self.wanted.is_none()) else { return Ok(()) };
        let _label = operator_scope("backward");
        let at_leaf = leaf.gradient_meta();
        let mut earlier = self.gradients.remove(leaf);
        if let Some(part) = earlier.take_if(|earlier| earlier.layout().has_partial()) {
            grad = add(part, in_dtype(grad, at_leaf.dtype())?)?;
        }
        let stays = self.mesh.keeps_parts() && grad.layout().has_partial();
        if !stays && grad.layout() != at_leaf.layout() {
            grad = grad.redistribute(at_leaf.layout().clone())?;
        }
        grad = in_dtype(grad, at_leaf.dtype())?;
        debug_assert!(stays || grad.meta == *at_leaf, "a gradient has its leaf's dtype and shape");
        if let Some(earlier) = earlier {
            grad = add(earlier, grad)?;
        }
        // A gradient may be a broadcast view; the stored one is contiguous.
        if !grad.local.is_contiguous() {
            grad.local = grad.local.contiguous()?;
        }
        self.gradients.store(leaf, grad);
        Ok(())
    }
}

/// Returns true for the derivative of a reshape.
fn reshapes(program: &DerivativeProgram) -> bool {
    matches!(&program.steps[..], [step] if step.op.as_any().is::<Reshape>())
}

/// Returns the leaves of units whose gradients the derivative of a call completes alone, if these are reduced in this pass.
fn completed_leaves(pass: &BackwardPass, call: &TapeCall) -> SmallVec<[(GradientUnit, usize); 2]> {
    let no_units = pass.mesh.known_cache::<UnitBuffers>().is_none();
    if no_units || pass.wanted.is_some() || pass.mesh.keeps_parts() {
        return SmallVec::new();
    }
    let is_last = |node: &TapeNode| node.pending_grads.get() == (pass.id, 1) && !pass.queue.holds(node);
    let leaf = |input: &Option<TapeOutput>| {
        let mut node = input.as_ref().map(|output| &output.node)?;
        // The gradient of a reshaped leaf is the same elements.
        while let Some(call) = node.call.as_ref().filter(|_| is_last(node)) {
            match (&call.inputs[..], &call.derivative) {
                ([Some(of)], CallDerivative::Program { program, .. }) if reshapes(program) => node = &of.node,
                _ => break,
            }
        }
        let leaf = if is_last(node) { pass.unit_leaf(node) } else { None };
        let leaf = leaf.filter(|leaf| !pass.gradients.has_part_of(leaf))?;
        leaf.destination.as_ref().map(|to| (to.unit, to.number))
    };
    call.inputs.iter().filter_map(leaf).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::spmd;
    use crate::dtensor::DeviceMesh;
    use crate::dtensor::Reduction;
    use crate::dtensor::call::dispatch::CALLS;
    use crate::dtensor::plan::call_plan::LOOKUPS;
    use crate::ops::{Bits, RmsNorm};
    use crate::placement::Layout;
    use crate::tensor::{DType, Tensor};

    fn vector(mesh: &DeviceMesh, values: [f32; 3]) -> Result<DTensor> {
        let whole = Tensor::from_vec(values.to_vec(), [3])?;
        DTensor::distribute(mesh, &whole, "(S0)")
    }

    /// The gradient `a + b` of `sum(w a + w b)`.
    fn loss(w: &DTensor, a: [f32; 3], b: [f32; 3]) -> Result<DTensor> {
        w.mul(&vector(w.mesh(), a)?)?.add(&w.mul(&vector(w.mesh(), b)?)?)?.sum_all()
    }

    #[test]
    fn a_leaf_is_complete_when_this_pass_has_given_it_everything() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
            let w = vector(&mesh, [1.0, 2.0, 3.0])?.requires_grad()?;
            let gradient = |l: &DTensor| -> Result<Vec<f32>> {
                l.backward_keeping()?.get(&w).expect("w is a leaf").full_tensor()?.to_vec()
            };
            let first = loss(&w, [1.0, 0.0, 5.0], [2.0, 7.0, 0.0])?;
            let second = loss(&w, [0.0, 1.0, 1.0], [4.0, 0.0, 1.0])?;
            assert_eq!(gradient(&first)?, [3.0, 7.0, 5.0]);
            assert_eq!(gradient(&first)?, [3.0, 7.0, 5.0], "a second pass over one tape");
            drop(first);
            assert_eq!(gradient(&second)?, [4.0, 1.0, 2.0], "after another tape was let go of");
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }

    #[test]
    fn a_complete_leaf_is_stored_before_older_nodes_are_visited() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
            let (w, v) =
                (vector(&mesh, [1.0; 3])?.requires_grad()?, vector(&mesh, [2.0; 3])?.requires_grad()?);
            let y = v.exp()?.tanh()?.mul(&w)?.mul(&w)?;
            let output = y.history.as_ref().expect("history");
            let pending_grads =
                |leaf: &DTensor| leaf.history.as_ref().expect("a leaf").node.pending_grads.get().1;
            let _guard = mesh.no_grad();
            let mut pass = BackwardPass::new(&mesh, &[(output.clone(), y.detach())]);
            assert_eq!([&w, &v].map(pending_grads), [2, 1]);
            pass.accumulate(output, y.detach())?;
            let mut stored = Vec::new();
            while let Some(queued) = pass.queue.pop_youngest() {
                pass.visit(queued)?;
                stored.push([&w, &v].map(|leaf| pass.gradients.get(leaf).is_some()));
            }
            assert_eq!(stored[..3], [[false, false], [true, false], [true, true]]);
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }

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

    #[test]
    fn constants_have_no_history() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
            let x = vector(&mesh, [1.0, 2.0, 4.0])?.reshape([3, 1])?.requires_grad()?;
            let w = DTensor::full(&mesh, x.dtype(), [1], Layout::replicated(1), 1.0)?;
            let outs = DTensor::apply(&RmsNorm { eps: Bits(0.0) }, &[&x, &w])?;
            let history: Vec<bool> = outs.iter().map(DTensor::has_history).collect();
            assert_eq!(history, [true, false], "the statistic is a constant to the derivative");
            assert!(!x.lt(&x)?.has_history(), "bools have no derivative");
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }

    #[test]
    fn any_number_of_operands() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
            let parts: Vec<DTensor> = (0..70).map(|i| vector(&mesh, [i as f32; 3])).collect::<Result<_>>()?;
            let leaf = parts[66].requires_grad()?;
            let ins: Vec<&DTensor> = parts[..66].iter().chain([&leaf]).chain(&parts[67..]).collect();
            let y = DTensor::cat(&ins, 0)?;
            let inputs =
                &y.history.as_ref().expect("one operand wants a gradient").node.call.as_ref().unwrap().inputs;
            assert_eq!(inputs.iter().position(Option::is_some), Some(66));
            let gradients = y.mul(&y)?.sum_all()?.backward()?;
            assert_eq!(gradients.get(&leaf).unwrap().full_tensor()?.to_f64_vec(), [132.0; 3]);
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }
}
