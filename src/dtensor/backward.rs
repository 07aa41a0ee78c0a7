//! The backward pass.
//!
//! Each gradient has whatever layout is cheapest until it reaches a leaf tensor, and there it takes the leaf's layout: a
//! data-parallel gradient is all-reduced there and an FSDP gradient reduce-scattered, each as soon as it is complete.

use std::collections::BinaryHeap;
use std::rc::Rc;

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::{SmallVec, smallvec};

use super::call_plan::CallPlan;
use super::device_mesh::DeviceMesh;
use super::dispatch::plan_for;
use super::gradients::{Gradients, add};
use super::reduction::Reduction;
use super::tensor::{CallDerivative, DTensor, Saved, TapeCall, TapeNode, TapeOutput, next_id};
use super::tensor_meta::TensorMeta;
use crate::comm::operator_scope;
use crate::error::{Error, Result};
use crate::ops::{Add, VjpProgram, VjpStep};
use crate::placement::Layout;

impl DTensor {
    /// Computes the gradients of this scalar with respect to every leaf tensor ([`DTensor::requires_grad`]) from
    /// which it was computed.
    ///
    /// Communicates the moves that the derivatives' operators need, and one redistribution of each gradient to its leaf's
    /// layout if the layouts differ.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let whole = Tensor::from_vec(vec![1.0f32, 2.0, 3.0], [3])?;
    ///     let w = DTensor::distribute(&mesh, &whole, "(S0)".parse()?)?.requires_grad()?;
    ///     let loss = w.mul(&w)?.sum_all()?;
    ///     let gradients = loss.backward()?;
    ///     let gradient = gradients.get(&w).expect("the loss depends on w");
    ///     assert_eq!(gradient.layout().to_string(), "(S0)"); // the leaf's layout
    ///     assert_eq!(gradient.full_tensor()?.to_vec::<f32>()?, [2.0, 4.0, 6.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a tensor that has more than one element or no history; returns an error if communication fails.
    pub fn backward(&self) -> Result<Gradients> {
        self.backward_from(one_of_scalar("backward", self)?)
    }

    /// Runs [`DTensor::backward`] for a tensor of any shape, given the gradient of the final result with respect to
    /// this tensor.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let w = DTensor::full(&mesh, DType::F32, [4], 3.0, "(S0)".parse()?)?.requires_grad()?;
    ///     let y = w.mul(&w)?;
    ///     let dy = DTensor::full(&mesh, DType::F32, [4], 10.0, "(S0)".parse()?)?;
    ///     let gradients = y.backward_from(dy)?;
    ///     assert_eq!(gradients.get(&w).expect("a leaf").full_tensor()?.to_vec::<f32>()?, [60.0; 4]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a `grad` of another shape, dtype or mesh, and a tensor without history; returns an error if
    /// communication fails.
    pub fn backward_from(&self, grad: DTensor) -> Result<Gradients> {
        let output = expect_history("backward", self, &grad)?;
        let _guard = self.mesh.no_grad();
        let mut pass = BackwardPass::new(&self.mesh, &output.node);
        pass.accumulate(output, grad.detach())?;
        pass.visit_all()?;
        Ok(pass.gradients)
    }
}

/// Returns the gradient of a scalar with respect to itself, or an error of `verb` if `x` is no scalar.
pub(super) fn one_of_scalar(verb: &str, x: &DTensor) -> Result<DTensor> {
    if x.shape().numel() != 1 {
        return Err(Error::invalid(verb, "wants one element", x.spec().to_string(), "sum it first"));
    }
    DTensor::full(&x.mesh, x.dtype(), x.shape(), 1.0, Layout::replicated(x.mesh.mesh().ndim()))
}

/// Returns the history of `x`. Refuses a `grad` of another shape, dtype or mesh, and an `x` without history.
pub(super) fn expect_history<'a>(verb: &str, x: &'a DTensor, grad: &DTensor) -> Result<&'a TapeOutput> {
    if grad.meta() != x.meta() || !grad.mesh.same(&x.mesh) {
        let given = format!("{} for {}", grad.spec(), x.spec());
        return Err(Error::invalid(verb, "the gradient does not fit", given, ""));
    }
    x.history.as_ref().ok_or_else(|| {
        let rule = "this tensor does not depend on a leaf that requires a gradient";
        let remedy = "call requires_grad() on a leaf, outside no_grad() and Forward::eval";
        Error::invalid(verb, rule, x.spec().to_string(), remedy)
    })
}

/// A running backward pass. It visits nodes youngest first, so that the gradients of a node are complete when it is
/// visited.
pub(super) struct BackwardPass {
    /// The pass's number, which nodes' counts of gradients refer to.
    id: u64,
    mesh: DeviceMesh,
    queue: BinaryHeap<QueuedNode>,
    grads: FxHashMap<u64, SmallVec<[Option<DTensor>; 1]>>,
    gradients: Gradients,
    /// The tensors whose gradients are wanted, if not those of all leaves.
    wanted: Option<WantedGradients>,
}

/// The gradients of chosen tensors. A pass that computes them records its steps unless the mesh records nothing.
pub(super) struct WantedGradients {
    /// The nodes from which a wanted tensor is reached, and those of the wanted tensors.
    reaching: FxHashSet<u64>,
    /// The wanted gradients, by node and number of the result.
    pub grads: FxHashMap<(u64, usize), Option<DTensor>>,
}

/// A node in the queue, ordered by its number.
struct QueuedNode(Rc<TapeNode>);

impl BackwardPass {
    /// Starts a pass from `root`, whose gradient has not been added yet.
    fn new(mesh: &DeviceMesh, root: &TapeNode) -> BackwardPass {
        let id = next_id();
        count_gradients(root, id);
        BackwardPass {
            id,
            mesh: mesh.clone(),
            queue: BinaryHeap::new(),
            grads: FxHashMap::default(),
            gradients: Gradients::default(),
            wanted: None,
        }
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
        let mut pass = BackwardPass {
            id: next_id(),
            mesh: mesh.clone(),
            queue: BinaryHeap::new(),
            grads: FxHashMap::default(),
            gradients: Gradients::default(),
            wanted: Some(WantedGradients { reaching, grads }),
        };
        pass.accumulate(root, grad)?;
        pass.visit_all()?;
        Ok(pass.wanted.expect("set above"))
    }

    fn visit_all(&mut self) -> Result<()> {
        while let Some(QueuedNode(node)) = self.queue.pop() {
            self.visit(&node)?;
        }
        Ok(())
    }

    /// Adds a gradient to those of a result, and queues its node.
    fn accumulate(&mut self, output: &TapeOutput, mut grad: DTensor) -> Result<()> {
        // In exact mode, adding two partial sums would change bits: each is reduced before a leaf adds it.
        let to_leaf = output.node.call.is_none() && grad.layout().has_partial();
        if to_leaf && self.mesh.reduction() == Reduction::Exact {
            let _label = operator_scope("backward");
            grad = grad.redistribute(output.node.outs[output.out].layout().clone())?;
        }
        let sums = self.grads.entry(output.node.id).or_insert_with(|| {
            self.queue.push(QueuedNode(output.node.clone()));
            SmallVec::from_elem(None, output.node.outs.len())
        });
        sums[output.out] = Some(match sums[output.out].take() {
            None => grad,
            // The sum is recorded if its terms are.
            Some(sum) if sum.has_history() || grad.has_history() => DTensor::apply_one(&Add, &[&sum, &grad])?,
            Some(sum) => add(sum, grad)?,
        });
        Ok(())
    }

    /// Runs the derivative of a node's call, or stores a leaf's gradient.
    fn visit(&mut self, node: &Rc<TapeNode>) -> Result<()> {
        // A leaf that was complete early has been stored already.
        let Some(mut grads) = self.grads.remove(&node.id) else { return Ok(()) };
        if let Some(wanted) = &mut self.wanted {
            wanted.keep(node, &grads);
        }
        let Some(call) = &node.call else { return self.store_leaf_gradient(node, grads) };
        let needed = self.wanted.as_ref().map(|wanted| wanted.needed(call));
        if needed.as_ref().is_some_and(|needed| !needed.contains(&true)) {
            return Ok(());
        }
        let result = match &call.derivative {
            CallDerivative::Program { program, saved } => {
                let plan = self.move_to_leaf_layout(call, program, saved.len(), &mut grads)?;
                self.run(node, grads, plan, needed.as_deref())?
            }
            CallDerivative::Custom(custom) => {
                let grads = grads.into_iter().zip(&node.outs);
                let grads = grads.map(|(g, meta)| g.map_or_else(|| self.zeros(meta), Ok));
                custom.run(node, &call.inputs, &grads.collect::<Result<Vec<_>>>()?)?
            }
        };
        for (i, (output, grad)) in call.inputs.iter().zip(result).enumerate() {
            let Some(output) = output else { continue };
            if let Some(grad) = grad.filter(|_| needed.as_ref().is_none_or(|needed| needed[i])) {
                self.accumulate(output, grad)?;
            }
            let (pass, left) = output.node.pending_grads.get();
            // Another pass that ran within this one may have counted anew; then the leaf is stored when it is visited.
            if pass != self.id {
                continue;
            }
            output.node.pending_grads.set((pass, left - 1));
            // A complete leaf need not wait for older nodes.
            if left == 1
                && output.node.call.is_none()
                && let Some(grads) = self.grads.remove(&output.node.id)
            {
                self.store_leaf_gradient(&output.node, grads)?;
            }
        }
        Ok(())
    }

    /// Redistributes a `Partial` gradient straight to its leaf's layout, if only one operator that keeps this layout
    /// (such as a cast) is left before the leaf. Otherwise that operator would reduce the gradient to some layout,
    /// from which it would have to be redistributed again. Returns the operator's plan if it was looked up.
    fn move_to_leaf_layout(
        &self,
        call: &TapeCall,
        program: &VjpProgram,
        saved: usize,
        grads: &mut SmallVec<[Option<DTensor>; 1]>,
    ) -> Result<Option<Rc<CallPlan>>> {
        let ([Some(output)], [step], [Some(grad)]) = (&call.inputs[..], &program.steps[..], &grads[..])
        else {
            return Ok(None);
        };
        let leaf = &output.node.outs[output.out];
        let reads_it_alone = matches!(step.ins[..], [only] if only.0 as usize == saved);
        let fits = output.node.call.is_none() && leaf.shape() == grad.shape() && grad.layout().has_partial();
        if !(reads_it_alone && fits) {
            return Ok(None);
        }
        let plan = plan_for(step.op.as_ref(), &[grad])?;
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

    /// Redistributes a leaf's complete gradient to the leaf's layout and stores it.
    fn store_leaf_gradient(
        &mut self,
        leaf: &TapeNode,
        mut grads: SmallVec<[Option<DTensor>; 1]>,
    ) -> Result<()> {
        let Some(grad) = grads[0].take().filter(|_| self.wanted.is_none()) else { return Ok(()) };
        let _label = operator_scope("backward");
        let grad = grad.redistribute(leaf.outs[0].layout().clone())?;
        // A gradient may be a broadcast view; the stored one is contiguous.
        let local = grad.local.contiguous()?;
        self.gradients.0.insert(leaf.id, DTensor { local, ..grad });
        Ok(())
    }

    /// Runs a node's derivative program, its first step by `plan` if that is known, and only the steps for the `needed`
    /// operands if not all are. A `Partial` value that one step reduces is reduced once for all steps.
    fn run(
        &self,
        node: &Rc<TapeNode>,
        grads: SmallVec<[Option<DTensor>; 1]>,
        mut plan: Option<Rc<CallPlan>>,
        needed: Option<&[bool]>,
    ) -> Result<SmallVec<[Option<DTensor>; 4]>> {
        let Some(TapeCall { inputs, derivative: CallDerivative::Program { program, saved } }) = &node.call
        else {
            unreachable!("the caller has looked")
        };
        // All values are live if all gradients are wanted.
        let live = needed.map(|needed| program.live_values(needed));
        let is_live = |v: usize| live.as_ref().is_none_or(|live| live[v]);
        let recording = self.mesh.grad_enabled();
        let mut values: SmallVec<[Option<DTensor>; 16]> = SmallVec::from_elem(None, program.values_len);
        for (v, from) in saved.iter().enumerate() {
            let Some(from) = from.as_ref().filter(|_| is_live(v)) else { continue };
            let x = match from {
                Saved::Kept(x) => x.clone(),
                Saved::Regather(origin) => origin.value()?,
            };
            values[v] = Some(if !recording {
                x
            } else {
                let history = match v.checked_sub(inputs.len()) {
                    None => inputs[v].clone(),
                    Some(out) if program.reads[saved.len() + out] => {
                        Some(TapeOutput { node: node.clone(), out })
                    }
                    Some(_) => None,
                };
                DTensor { history, origin: from.origin_of_recorded(), ..x }
            });
        }
        for (k, grad) in grads.into_iter().enumerate() {
            let v = saved.len() + k;
            if program.reads[v] && is_live(v) {
                values[v] = Some(match grad {
                    Some(g) => g,
                    None => self.zeros(&node.outs[k])?,
                });
            }
        }
        for step in &program.steps {
            if live.as_ref().is_some_and(|live| !step.outs().any(|out| live[out])) {
                continue;
            }
            let plan = match plan.take() {
                Some(plan) => plan,
                None => plan_for(step.op.as_ref(), &operands(step, &values))?,
            };
            let plan = self.reduce_for(step, plan, &mut values)?;
            let outs = DTensor::apply_by(&plan, step.op.as_ref(), &operands(step, &values))?;
            for (k, out) in outs.into_iter().enumerate() {
                values[step.out.0 as usize + k] = Some(out);
            }
        }
        Ok(program.grads.iter().map(|g| g.and_then(|r| values[r.0 as usize].clone())).collect())
    }

    /// Reduces those `Partial` operands of `step` that `plan` would reduce, for all later steps too; returns the plan
    /// for the operands' new layouts.
    fn reduce_for(
        &self,
        step: &VjpStep,
        mut plan: Rc<CallPlan>,
        values: &mut [Option<DTensor>],
    ) -> Result<Rc<CallPlan>> {
        for (i, r) in step.ins.iter().enumerate() {
            let v = r.0 as usize;
            let x = value(values, v);
            // A value that is an operand twice is moved as its first use requires.
            let first = step.ins.iter().position(|r| r.0 as usize == v).unwrap_or(i);
            let Some((m, to)) = plan.moves[first].as_ref().filter(|_| x.layout().has_partial()) else {
                continue;
            };
            let label = operator_scope(step.op.name());
            let moved = DTensor::wrap(&self.mesh, m.run(&self.mesh, x.local.clone())?, to.clone());
            drop(label);
            values[v] = Some(DTensor { history: x.history.clone(), ..moved });
            let meta: SmallVec<[&Rc<TensorMeta>; 4]> =
                operands(step, values).into_iter().map(|x| &x.meta).collect();
            plan = plan.after(&self.mesh, step.op.as_ref(), &meta)?;
        }
        Ok(plan)
    }

    /// Returns zeros with this metadata, for a result without a gradient.
    fn zeros(&self, meta: &TensorMeta) -> Result<DTensor> {
        DTensor::zeros(&self.mesh, meta.dtype(), meta.shape(), meta.layout().reduced())
    }
}

impl WantedGradients {
    /// Stores those complete gradients of a node's results that are wanted.
    fn keep(&mut self, node: &TapeNode, grads: &[Option<DTensor>]) {
        for (out, grad) in grads.iter().enumerate() {
            if let (Some(place), Some(grad)) = (self.grads.get_mut(&(node.id, out)), grad) {
                *place = Some(grad.clone());
            }
        }
    }

    /// Returns, per operand of a call, true if its gradient leads to a wanted one.
    fn needed(&self, call: &TapeCall) -> SmallVec<[bool; 4]> {
        let leads = |of: &TapeOutput| self.reaching.contains(&of.node.id);
        call.inputs.iter().map(|input| input.as_ref().is_some_and(leads)).collect()
    }
}

/// Returns the nodes behind `root` that are among `wanted`, or from which one of `wanted` is reached.
fn reaching(root: &TapeNode, wanted: &FxHashSet<u64>) -> FxHashSet<u64> {
    let first = wanted.iter().min().copied().unwrap_or(u64::MAX);
    let (mut nodes, mut seen) = (vec![root], FxHashSet::default());
    let mut next = 0;
    while let Some(&node) = nodes.get(next) {
        next += 1;
        for TapeOutput { node, .. } in node.call.iter().flat_map(|call| call.inputs.iter().flatten()) {
            // A call is younger than the nodes of its operands.
            if node.id >= first && seen.insert(node.id) {
                nodes.push(node);
            }
        }
    }
    nodes.sort_unstable_by_key(|node| node.id);
    let mut reaching = wanted.clone();
    for node in nodes {
        let mut inputs = node.call.iter().flat_map(|call| call.inputs.iter().flatten());
        if inputs.any(|input| reaching.contains(&input.node.id)) {
            reaching.insert(node.id);
        }
    }
    reaching
}

/// Sets, on each node behind `root`, the number of gradients that the pass with this number will add to it. Visits
/// every call once.
fn count_gradients(root: &TapeNode, pass: u64) {
    let mut nodes: SmallVec<[&TapeNode; 16]> = smallvec![root];
    while let Some(call) = nodes.pop().and_then(|node| node.call.as_ref()) {
        for TapeOutput { node, .. } in call.inputs.iter().flatten() {
            let (last, count) = node.pending_grads.get();
            let known = if last == pass { count } else { 0 };
            node.pending_grads.set((pass, known + 1));
            if known == 0 && node.call.is_some() {
                nodes.push(node);
            }
        }
    }
}

/// Returns the operands of a step.
fn operands<'a>(step: &VjpStep, values: &'a [Option<DTensor>]) -> SmallVec<[&'a DTensor; 4]> {
    step.ins.iter().map(|r| value(values, r.0 as usize)).collect()
}

fn value(values: &[Option<DTensor>], v: usize) -> &DTensor {
    values[v].as_ref().expect("programs read what they declared or computed")
}

impl PartialEq for QueuedNode {
    fn eq(&self, other: &Self) -> bool {
        self.0.id == other.0.id
    }
}

impl Eq for QueuedNode {}

impl PartialOrd for QueuedNode {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for QueuedNode {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.id.cmp(&other.0.id)
    }
}

#[cfg(test)]
mod tests {
    use super::super::DeviceMesh;
    use super::super::call_plan::LOOKUPS;
    use super::super::dispatch::CALLS;
    use super::*;
    use crate::comm::spmd;
    use crate::ops::{Bits, RmsNorm};
    use crate::tensor::{DType, Tensor};

    fn vector(mesh: &DeviceMesh, values: [f32; 3]) -> Result<DTensor> {
        let whole = Tensor::from_vec(values.to_vec(), [3])?;
        DTensor::distribute(mesh, &whole, "(S0)".parse()?)
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
                l.backward()?.get(&w).expect("w is a leaf").full_tensor()?.to_vec()
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
            let y = v.exp()?.mul(&w)?.mul(&w)?;
            let output = y.history.as_ref().expect("history");
            let pending_grads =
                |leaf: &DTensor| leaf.history.as_ref().expect("a leaf").node.pending_grads.get().1;
            let _guard = mesh.no_grad();
            let mut pass = BackwardPass::new(&mesh, &output.node);
            assert_eq!([&w, &v].map(pending_grads), [2, 1]);
            pass.accumulate(output, y.detach())?;
            let mut stored = Vec::new();
            while let Some(QueuedNode(node)) = pass.queue.pop() {
                pass.visit(&node)?;
                stored.push([&w, &v].map(|leaf| pass.gradients.get(leaf).is_some()));
            }
            assert_eq!(stored[..3], [[false, false], [true, false], [true, true]]);
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }

    /// One lookup suffices even if an operand is reduced first: the next plan is known from the last pass.
    #[test]
    fn a_step_looks_for_its_plan_once() {
        let run = |rank, reduction| {
            let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
            mesh.set_reduction(reduction);
            let whole = |shape: [usize; 2], layout: &str| {
                DTensor::full(&mesh, DType::F32, shape, 0.5, layout.parse()?)?.requires_grad()
            };
            let (x, w, v) = (whole([64, 4], "(S0)")?, whole([4, 6], "(R)")?, whole([6, 6], "(S0)")?);
            // The derivative of `w`'s cast reads a partial sum, and that of `v` has to reduce one.
            let weight = w.cast(DType::F16)?.cast(DType::F32)?.matmul(&v.exp()?)?.tanh()?;
            let loss = x.matmul(&weight)?.gelu()?.sum_all()?;
            let counts = || [LOOKUPS.get(), CALLS.get()];
            let pass = || -> Result<[usize; 2]> {
                let before = counts();
                loss.backward()?;
                Ok([0, 1].map(|i| counts()[i] - before[i]))
            };
            let (first, second) = (pass()?, pass()?);
            assert!(first[0] > first[1], "{reduction:?}: some operand is reduced first: {first:?}");
            assert_eq!(second[0], second[1], "{reduction:?}: one look a step");
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
            let w = DTensor::full(&mesh, x.dtype(), [1], 1.0, Layout::replicated(1))?;
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
