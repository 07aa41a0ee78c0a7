//! The backward pass.
//!
//! Each gradient has whatever layout is cheapest until it reaches a leaf tensor, and there it takes the leaf's layout: a
//! data-parallel gradient is all-reduced there and an FSDP gradient reduce-scattered, each as soon as it is complete.

use std::collections::BinaryHeap;
use std::rc::Rc;

use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

use super::call_plan::CallPlan;
use super::device_mesh::DeviceMesh;
use super::dispatch::plan_for;
use super::gradients::{Gradients, add};
use super::reduction::Reduction;
use super::tensor::{DTensor, Saved, TapeCall, TapeNode, TapeOutput, next_id};
use super::tensor_meta::TensorMeta;
use crate::comm::operator_scope;
use crate::error::{Error, Result};
use crate::ops::VjpStep;
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
        if self.shape().numel() != 1 {
            return Err(Error::invalid(
                "backward",
                "wants one element",
                self.spec().to_string(),
                "sum it first",
            ));
        }
        let ones = DTensor::full(
            &self.mesh,
            self.dtype(),
            self.shape(),
            1.0,
            Layout::replicated(self.mesh.mesh().ndim()),
        )?;
        self.backward_from(ones)
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
        if grad.meta() != self.meta() || !grad.mesh.same(&self.mesh) {
            return Err(Error::invalid(
                "backward",
                "the gradient does not fit",
                format!("{} for {}", grad.spec(), self.spec()),
                "",
            ));
        }
        let Some(output) = &self.history else {
            return Err(Error::invalid(
                "backward",
                "this tensor does not depend on a leaf that requires a gradient",
                self.spec().to_string(),
                "call requires_grad() on a leaf, outside no_grad() and Forward::eval",
            ));
        };
        let _guard = self.mesh.no_grad();
        let mut pass = BackwardPass::new(&self.mesh, &output.node);
        pass.accumulate(output, grad.detach())?;
        while let Some(QueuedNode(node)) = pass.queue.pop() {
            pass.visit(&node)?;
        }
        Ok(pass.gradients)
    }
}

/// A running backward pass. It visits nodes youngest first, so that the gradients of a node are complete when it is
/// visited.
struct BackwardPass {
    mesh: DeviceMesh,
    queue: BinaryHeap<QueuedNode>,
    grads: FxHashMap<u64, SmallVec<[Option<DTensor>; 1]>>,
    gradients: Gradients,
}

/// A node in the queue, ordered by its number.
struct QueuedNode(Rc<TapeNode>);

impl BackwardPass {
    /// Starts a pass from `root`, whose gradient has not been added yet.
    fn new(mesh: &DeviceMesh, root: &TapeNode) -> BackwardPass {
        count_gradients(root);
        BackwardPass {
            mesh: mesh.clone(),
            queue: BinaryHeap::new(),
            grads: FxHashMap::default(),
            gradients: Gradients::default(),
        }
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
            Some(sum) => add(sum, grad)?,
        });
        Ok(())
    }

    /// Runs the derivative of a node's call, or stores a leaf's gradient.
    fn visit(&mut self, node: &Rc<TapeNode>) -> Result<()> {
        // A leaf that was complete early has been stored already.
        let Some(mut grads) = self.grads.remove(&node.id) else { return Ok(()) };
        let Some(call) = &node.call else { return self.store_leaf_gradient(node, grads) };
        let plan = self.move_to_leaf_layout(call, &mut grads)?;
        let result = self.run(node, call, grads, plan)?;
        for (output, grad) in call.inputs.iter().zip(result) {
            let (Some(output), Some(grad)) = (output, grad) else { continue };
            self.accumulate(output, grad)?;
            let (pass, left) = output.node.pending_grads.get();
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
        grads: &mut SmallVec<[Option<DTensor>; 1]>,
    ) -> Result<Option<Rc<CallPlan>>> {
        let ([Some(output)], [step], [Some(grad)]) = (&call.inputs[..], &call.program.steps[..], &grads[..])
        else {
            return Ok(None);
        };
        let leaf = &output.node.outs[output.out];
        let reads_it_alone = matches!(step.ins[..], [only] if only.0 as usize == call.saved.len());
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
        let Some(grad) = grads[0].take() else { return Ok(()) };
        let _label = operator_scope("backward");
        let grad = grad.redistribute(leaf.outs[0].layout().clone())?;
        // A gradient may be a broadcast view; the stored one is contiguous.
        let local = grad.local.contiguous()?;
        self.gradients.0.insert(leaf.id, DTensor { local, ..grad });
        Ok(())
    }

    /// Runs a node's derivative program, its first step by `plan` if that is known. A `Partial` value that one step
    /// reduces is reduced once for all steps.
    fn run(
        &self,
        node: &TapeNode,
        call: &TapeCall,
        grads: SmallVec<[Option<DTensor>; 1]>,
        mut plan: Option<Rc<CallPlan>>,
    ) -> Result<SmallVec<[Option<DTensor>; 4]>> {
        let program = &call.program;
        let mut values: SmallVec<[Option<DTensor>; 16]> = SmallVec::from_elem(None, program.values_len);
        for (v, saved) in call.saved.iter().enumerate() {
            values[v] = match saved {
                None => None,
                Some(Saved::Kept(x)) => Some(x.clone()),
                Some(Saved::Regather(origin)) => Some(origin.value()?),
            };
        }
        for (k, grad) in grads.into_iter().enumerate() {
            let v = call.saved.len() + k;
            if program.reads[v] {
                values[v] = Some(match grad {
                    Some(g) => g,
                    None => self.zeros(&node.outs[k])?,
                });
            }
        }
        for step in &program.steps {
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
            values[v] = Some(moved);
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

/// Sets, on each node behind `root`, the number of gradients that a pass from there will add to it. Visits every call
/// once.
fn count_gradients(root: &TapeNode) {
    let pass = next_id();
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
