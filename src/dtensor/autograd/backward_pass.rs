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
use super::gradient_sum::add_in;
use super::gradients::Gradients;
use super::kept_parts::leaf_operands;
use super::leaf_gradients::LeafGradients;
use super::leaf_path::{LeafPath, reduce_before_step, widened_part};
use super::reached_nodes::{count_gradients, extend_reaching, reaching, split_nodes};
use super::wanted_gradients::WantedGradients;
use crate::comm::Phase;
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::plan::gradient_needs::GradientNeeds;
use crate::dtensor::tensor::dtensor::DTensor;
use crate::dtensor::tensor::tape::{
    CallDerivative, CustomDerivative, GradientUnit, Recomputation, TapeCall, TapeNode, TapeOutput, next_id,
};
use crate::error::Result;
use crate::placement::SumGroups;
use crate::tensor::short_list;

/// A running backward pass. It visits nodes youngest first, so that the gradients of a node are complete when it is
/// visited.
pub(in crate::dtensor) struct BackwardPass {
    /// The pass's number, which nodes' counts of gradients refer to.
    id: u64,
    mesh: DeviceMesh,
    queue: GradientQueue,
    leaves: LeafGradients,
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
            leaves: LeafGradients::default(),
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
        pass.leaves.gradients = std::mem::take(gradients);
        pass.leaves.gradients.begin_pass();
        roots.into_iter().try_for_each(|(root, grad)| pass.accumulate_at(&root, grad))?;
        pass.visit_all()?;
        if !mesh.is_unsynchronised() {
            // Earlier passes may have left parts of leaves that this pass does not reach.
            pass.leaves.gradients.reduce(mesh)?;
        }
        *gradients = pass.leaves.gradients;
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
        pass.accumulate_at(root, grad)?;
        pass.visit_all()?;
        Ok(pass.wanted.expect("set above"))
    }

    fn visit_all(&mut self) -> Result<()> {
        while let Some(queued) = self.queue.pop_youngest() {
            self.visit(queued)?;
        }
        self.leaves.start_unit(&self.mesh)?;
        self.leaves.store_started(&self.mesh)
    }

    /// Runs [`BackwardPass::accumulate`] for a result whose path is not known.
    fn accumulate_at(&mut self, output: &TapeOutput, grad: DTensor) -> Result<()> {
        self.accumulate(output, LeafPath::of(&output.node).as_ref(), grad)
    }

    /// Adds a gradient to those of a result, and queues its node.
    fn accumulate(&mut self, output: &TapeOutput, path: Option<&LeafPath<'_>>, grad: DTensor) -> Result<()> {
        let node = &*output.node;
        let (sum, mut grad) = (self.queue.sum_of(output), Some(grad));
        // In exact mode, adding two partial sums would change bits: they wait at a leaf, and are reduced together.
        if self.mesh.reduction().is_exact()
            && let Some(path) = path
            && self.leaves.takes_use(&self.mesh, node, path, (&mut grad, sum))?
        {
            return Ok(());
        }
        let Some(grad) = grad else { return Ok(()) };
        if let Some(sum) = sum.as_ref().filter(|_| node.call.is_none()) {
            self.leaves.note_added(node, sum, &grad);
        }
        *sum = Some(add_in(node.outs[output.out].dtype(), sum.take(), grad)?);
        Ok(())
    }

    /// Runs the derivative of a node's call, or stores a leaf's gradient.
    fn visit(&mut self, queued: QueuedNode) -> Result<()> {
        let QueuedNode { mut node, mut grads } = queued;
        let _scope = node.path.enter_in(Phase::Backward);
        self.leaves.add_uses(&self.mesh, &node, &mut grads[0], self.wanted.is_none())?;
        if let Some(wanted) = &mut self.wanted {
            wanted.keep(&node, &grads);
        }
        if self.wanted.is_none()
            && let Some(path) = LeafPath::of(&node)
            && self.completes_leaf(&path)
            && self.leaves.takes_of_unit(&self.mesh, &path, &mut grads[0])?
        {
            return Ok(());
        }
        let Some(call) = &node.call else {
            return match grads[0].take().filter(|_| self.wanted.is_none()) {
                Some(grad) => self.leaves.store(&self.mesh, &node, grad),
                None => Ok(()),
            };
        };
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
        let paths = LeafPath::of_operands(call);
        let kept = |leaf: &TapeNode| self.leaves.gradients.keeps_parts_of(leaf);
        let leaves = match self.wanted {
            None => leaf_operands(&self.mesh, &paths, kept),
            Some(_) => None,
        };
        match &call.derivative {
            CallDerivative::Program { program, saved } => {
                let before_leaf = match &paths[..] {
                    [Some(path)] if path.is_leaf() => Some(path),
                    _ => None,
                };
                let stays_unreduced = before_leaf.is_some_and(|path| self.stays_unreduced(path));
                if stays_unreduced && let Some(part) = widened_part(&self.mesh, program, &grads)? {
                    let mut part = Some(part);
                    return self.pass_on((call, &paths), needed, &mut |_| part.take());
                }
                let first_plan = match before_leaf.filter(|_| !stays_unreduced) {
                    Some(path) => reduce_before_step(&self.mesh, path.leaf(), program, &mut grads)?,
                    None => None,
                };
                let (mesh, inputs) = (&self.mesh, &call.inputs[..]);
                let run = DerivativeRun { mesh, node: &node, inputs, program, first_plan, needed, leaves };
                let saved = match owned {
                    Some(owned) => SavedValues::Owned(owned.into_iter()),
                    None => SavedValues::Shared(saved),
                };
                let mut values = DerivativeValues::default();
                let completed = self.completed_leaves(&paths);
                let run = || run.run(saved, &mut grads, &mut values);
                self.leaves.places.offer(&self.mesh, &completed, run)?;
                self.pass_on((call, &paths), needed, &mut |i| values.take_gradient(program, i))
            }
            CallDerivative::Custom(custom) => {
                let mut found = self.run_custom(custom, &node, call, grads, needed, leaves)?;
                self.pass_on((call, &paths), needed, &mut |i| found[i].take())
            }
            CallDerivative::Recomputed(recomputation) => {
                self.record_again(recomputation, &node, &call.inputs, grads)?;
                self.pass_on((call, &paths), needed, &mut |_| None)
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
        (call, paths): (&TapeCall, &[Option<LeafPath<'_>>]),
        needed: Option<&[bool]>,
        take_gradient: &mut dyn FnMut(usize) -> Option<DTensor>,
    ) -> Result<()> {
        for (i, (output, path)) in call.inputs.iter().zip(paths).enumerate() {
            let Some(output) = output else { continue };
            if needed.is_none_or(|needed| needed[i])
                && let Some(grad) = take_gradient(i)
            {
                match path.as_ref().filter(|_| grad.meta.has_kept_parts()) {
                    Some(path) => self.leaves.gradients.keep_parts(path.leaf(), path.move_parts(grad)?)?,
                    None => self.accumulate(output, path.as_ref(), grad)?,
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
        outputs.into_iter().try_for_each(|(output, grad)| self.accumulate_at(&output, grad))
    }

    /// Returns true for a leaf whose gradient is not reduced now, or that has an unreduced one to which this is added.
    /// The gradients of a pass for chosen tensors are not stored, and may be recorded.
    fn stays_unreduced(&self, path: &LeafPath<'_>) -> bool {
        self.wanted.is_none() && (self.mesh.keeps_parts() || self.leaves.gradients.has_part_of(path.leaf()))
    }

    /// Returns true if a node waits for no gradient but the one that is being computed.
    fn is_last(&self, node: &TapeNode) -> bool {
        node.pending_grads.get() == (self.id, 1) && !self.queue.holds(node)
    }

    /// Returns true if the complete gradient of a value is that of a leaf: of the leaf itself, or of its only cast.
    fn completes_leaf(&self, path: &LeafPath<'_>) -> bool {
        path.is_leaf() || (path.is_cast() && self.is_last(path.leaf()))
    }

    /// Returns the leaves of units whose gradients the derivative of a call completes alone, if these are reduced in this pass:
    /// the unit of each, and its number there.
    fn completed_leaves(&self, paths: &[Option<LeafPath<'_>>]) -> SmallVec<[(GradientUnit, usize); 2]> {
        let mut completed = SmallVec::new();
        let no_units = self.mesh.known_cache::<UnitBuffers>().is_none();
        if no_units || self.wanted.is_some() || self.mesh.keeps_parts() {
            return completed;
        }
        for path in paths.iter().flatten() {
            if let Some(to) = &path.leaf().destination
                && path.has_elements_of_leaf()
                && path.nodes().all(|node| self.is_last(node))
                && !self.leaves.gradients.has_part_of(path.leaf())
            {
                completed.push((to.unit, to.number));
            }
        }
        completed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::spmd;
    use crate::dtensor::DeviceMesh;
    use crate::tensor::Tensor;

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
            pass.accumulate_at(output, y.detach())?;
            let mut stored = Vec::new();
            while let Some(queued) = pass.queue.pop_youngest() {
                pass.visit(queued)?;
                stored.push([&w, &v].map(|leaf| pass.leaves.gradients.get(leaf).is_some()));
            }
            assert_eq!(stored[..3], [[false, false], [true, false], [true, true]]);
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }
}
