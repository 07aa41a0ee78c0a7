//! The backward pass.
//!
//! Gradients are distributed tensors in whatever layout is cheapest until they reach a leaf, where they take the leaf's
//! own: there a data-parallel gradient is all-reduced, an FSDP one reduce-scattered, each as soon as it is complete.

use std::collections::BinaryHeap;
use std::fmt;
use std::rc::Rc;

use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

use super::device_mesh::DeviceMesh;
use super::dispatch::plan_for;
use super::plan::Plan;
use super::reduction::Reduction;
use super::tensor::{DTensor, Edge, Node, Saved, TapeCall, next_id};
use super::tensor_meta::TensorMeta;
use crate::comm::operator_scope;
use crate::error::{Error, Result};
use crate::ops::{Add, Step};
use crate::placement::Layout;

impl DTensor {
    /// The gradients of this scalar with respect to every leaf ([`DTensor::requires_grad`]) it was computed from.
    ///
    /// Communicates what the derivatives' operators move, and what takes each leaf's gradient to the leaf's layout.
    ///
    /// # Errors
    /// Refuses a tensor with more than one element or without history; a fault of communication.
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

    /// As [`DTensor::backward`], for a tensor of any shape, from the gradient of whatever follows with respect to it.
    ///
    /// # Errors
    /// Refuses a `grad` of another shape, dtype or mesh, and a tensor without history; a fault of communication.
    pub fn backward_from(&self, grad: DTensor) -> Result<Gradients> {
        if grad.meta() != self.meta() || !grad.mesh.same(&self.mesh) {
            return Err(Error::invalid(
                "backward",
                "the gradient does not fit",
                format!("{} for {}", grad.spec(), self.spec()),
                "",
            ));
        }
        let Some(edge) = &self.edge else {
            return Err(Error::invalid(
                "backward",
                "no leaf that requires a gradient stands behind this tensor",
                self.spec().to_string(),
                "call requires_grad() on a leaf, outside no_grad() and Forward::eval",
            ));
        };
        let _guard = self.mesh.no_grad();
        let mut pass = Pass::new(&self.mesh, &edge.node);
        pass.give(edge, grad.detach())?;
        while let Some(Waiting(node)) = pass.waiting.pop() {
            pass.visit(&node)?;
        }
        Ok(pass.done)
    }
}

/// Gradients by leaf.
#[derive(Default)]
pub struct Gradients(FxHashMap<u64, DTensor>);

impl Gradients {
    /// The gradient of `leaf`, in its layout; none if the result did not depend on it.
    pub fn get(&self, leaf: &DTensor) -> Option<&DTensor> {
        self.0.get(&leaf.edge.as_ref()?.node.id)
    }

    /// As [`Gradients::get`], moved out.
    pub fn take(&mut self, leaf: &DTensor) -> Option<DTensor> {
        self.0.remove(&leaf.edge.as_ref()?.node.id)
    }

    /// Makes `grad` the gradient of `leaf`: gives back what [`Gradients::take`] took, or takes another for it.
    ///
    /// # Errors
    /// Refuses a `leaf` without history, and a `grad` of another dtype, shape, layout or mesh than the leaf's.
    pub fn put(&mut self, leaf: &DTensor, grad: DTensor) -> Result<()> {
        let Some(edge) = &leaf.edge else {
            let (rule, remedy) = ("the tensor has no history", "pass a leaf that requires a gradient");
            return Err(Error::invalid("put", rule, leaf.spec().to_string(), remedy));
        };
        if grad.tensor_meta() != leaf.tensor_meta() {
            let rule = "a gradient has its leaf's dtype, shape, layout and mesh";
            return Err(Error::invalid(
                "put",
                rule,
                format!("{} for {}", grad.spec(), leaf.spec()),
                "redistribute it first",
            ));
        }
        self.0.insert(edge.node.id, grad);
        Ok(())
    }

    /// Adds the gradients of another pass: gradient accumulation.
    ///
    /// # Errors
    /// None that the passes have not had.
    pub fn merge(&mut self, other: Gradients) -> Result<()> {
        for (id, g) in other.0 {
            let sum = match self.0.remove(&id) {
                Some(mine) => add(mine, g)?,
                None => g,
            };
            self.0.insert(id, sum);
        }
        Ok(())
    }
}

/// A backward pass under way. Nodes are visited youngest first, so a node's gradients are complete when it is visited.
struct Pass {
    mesh: DeviceMesh,
    waiting: BinaryHeap<Waiting>,
    grads: FxHashMap<u64, SmallVec<[Option<DTensor>; 1]>>,
    done: Gradients,
}

struct Waiting(Rc<Node>);

impl Pass {
    fn new(mesh: &DeviceMesh, root: &Node) -> Pass {
        count_gradients(root);
        Pass {
            mesh: mesh.clone(),
            waiting: BinaryHeap::new(),
            grads: FxHashMap::default(),
            done: Gradients::default(),
        }
    }

    fn give(&mut self, edge: &Edge, mut grad: DTensor) -> Result<()> {
        // Sums in parts cannot be added to each other by bits: a leaf's come to it one by one.
        let to_leaf = edge.node.call.is_none() && grad.layout().has_partial();
        if to_leaf && self.mesh.reduction() == Reduction::Exact {
            let _label = operator_scope("backward");
            grad = grad.redistribute(edge.node.outs[edge.out].layout().clone())?;
        }
        let slots = self.grads.entry(edge.node.id).or_insert_with(|| {
            self.waiting.push(Waiting(edge.node.clone()));
            SmallVec::from_elem(None, edge.node.outs.len())
        });
        slots[edge.out] = Some(match slots[edge.out].take() {
            None => grad,
            Some(sum) => add(sum, grad)?,
        });
        Ok(())
    }

    fn visit(&mut self, node: &Rc<Node>) -> Result<()> {
        // A leaf that was complete early has nothing left here.
        let Some(mut grads) = self.grads.remove(&node.id) else { return Ok(()) };
        let Some(call) = &node.call else { return self.land(node, grads) };
        let plan = self.send_home(call, &mut grads)?;
        let result = self.run(node, call, grads, plan)?;
        for (edge, grad) in call.edges.iter().zip(result) {
            let (Some(edge), Some(grad)) = (edge, grad) else { continue };
            self.give(edge, grad)?;
            let (pass, left) = edge.node.awaited.get();
            edge.node.awaited.set((pass, left - 1));
            // A leaf that is complete need not wait for older nodes.
            if left == 1
                && edge.node.call.is_none()
                && let Some(grads) = self.grads.remove(&edge.node.id)
            {
                self.land(&edge.node, grads)?;
            }
        }
        Ok(())
    }

    /// A sum in parts that a single step would have to reduce, on its way to a leaf, straight in the leaf's layout where the
    /// step keeps it, as a cast does: otherwise the step would choose a layout from which it has to move on. Returns the
    /// step's plan if it had to be known.
    fn send_home(
        &self,
        call: &TapeCall,
        grads: &mut SmallVec<[Option<DTensor>; 1]>,
    ) -> Result<Option<Rc<Plan>>> {
        let ([Some(edge)], [step], [Some(grad)]) = (&call.edges[..], &call.program.steps[..], &grads[..])
        else {
            return Ok(None);
        };
        let leaf = &edge.node.outs[edge.out];
        let reads_it_alone = matches!(step.ins[..], [only] if only.0 as usize == call.saved.len());
        let fits = edge.node.call.is_none() && leaf.shape() == grad.shape() && grad.layout().has_partial();
        if !(reads_it_alone && fits) {
            return Ok(None);
        }
        let plan = plan_for(step.op.as_ref(), &[grad])?;
        if plan.moves[0].is_none() {
            return Ok(Some(plan));
        }
        let home = self.mesh.intern(grad.meta.spec().with_layout(leaf.layout().clone())?)?;
        let stays = plan.after(&self.mesh, step.op.as_ref(), &[&home])?;
        let keeps = stays.moves.iter().all(Option::is_none) && stays.outs[0].layout() == leaf.layout();
        if !keeps {
            return Ok(Some(plan));
        }
        let moved = grad.redistribute(leaf.layout().clone())?;
        debug_assert_eq!(moved.meta, home, "it is where the plan expects it");
        grads[0] = Some(moved);
        Ok(Some(stays))
    }

    fn land(&mut self, leaf: &Node, mut grads: SmallVec<[Option<DTensor>; 1]>) -> Result<()> {
        let Some(grad) = grads[0].take() else { return Ok(()) };
        let _label = operator_scope("backward");
        let grad = grad.redistribute(leaf.outs[0].layout().clone())?;
        // A gradient may be a broadcast view, and what is kept per leaf should be as compact as the leaf.
        let local = grad.local.contiguous()?;
        self.done.0.insert(leaf.id, DTensor { local, ..grad });
        Ok(())
    }

    /// Runs the node's derivative, its first step by `plan` if that is known. A `Partial` value that one step had to reduce
    /// is reduced for all.
    fn run(
        &self,
        node: &Node,
        call: &TapeCall,
        grads: SmallVec<[Option<DTensor>; 1]>,
        mut plan: Option<Rc<Plan>>,
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

    /// Moves those of `step`'s operands that are partial and that `plan` reduces, for all steps; gives the plan for the
    /// operands as they lie then.
    fn reduce_for(
        &self,
        step: &Step,
        mut plan: Rc<Plan>,
        values: &mut [Option<DTensor>],
    ) -> Result<Rc<Plan>> {
        for (i, r) in step.ins.iter().enumerate() {
            let v = r.0 as usize;
            let x = value(values, v);
            // An operand that stands twice is moved as its first place asks.
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

    fn zeros(&self, meta: &TensorMeta) -> Result<DTensor> {
        DTensor::zeros(&self.mesh, meta.dtype(), meta.shape(), meta.layout().reduced())
    }
}

/// Tells each node behind `root` how many gradients a pass from there will give it: it visits every call once.
fn count_gradients(root: &Node) {
    let pass = next_id();
    let mut nodes: SmallVec<[&Node; 16]> = smallvec![root];
    while let Some(call) = nodes.pop().and_then(|node| node.call.as_ref()) {
        for Edge { node, .. } in call.edges.iter().flatten() {
            let (last, count) = node.awaited.get();
            let known = if last == pass { count } else { 0 };
            node.awaited.set((pass, known + 1));
            if known == 0 && node.call.is_some() {
                nodes.push(node);
            }
        }
    }
}

/// `a + b`, over one of them where nobody shares its buffer.
fn add(a: DTensor, b: DTensor) -> Result<DTensor> {
    Ok(DTensor::apply_owned(&Add, &mut [a, b].into())?.remove(0))
}

fn operands<'a>(step: &Step, values: &'a [Option<DTensor>]) -> SmallVec<[&'a DTensor; 4]> {
    step.ins.iter().map(|r| value(values, r.0 as usize)).collect()
}

fn value(values: &[Option<DTensor>], v: usize) -> &DTensor {
    values[v].as_ref().expect("programs read what they declared or computed")
}

impl PartialEq for Waiting {
    fn eq(&self, other: &Self) -> bool {
        self.0.id == other.0.id
    }
}

impl Eq for Waiting {}

impl PartialOrd for Waiting {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Waiting {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.id.cmp(&other.0.id)
    }
}

impl fmt::Debug for Gradients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.0.iter().map(|(id, g)| (id, g.spec().to_string()))).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::super::DeviceMesh;
    use super::super::dispatch::CALLS;
    use super::super::plan::LOOKUPS;
    use super::*;
    use crate::comm::spmd;
    use crate::ops::{Bits, RmsNorm, Sign};
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
    fn a_complete_leaf_lands_before_older_nodes_are_visited() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
            let (w, v) =
                (vector(&mesh, [1.0; 3])?.requires_grad()?, vector(&mesh, [2.0; 3])?.requires_grad()?);
            let y = v.exp()?.mul(&w)?.mul(&w)?;
            let edge = y.edge.as_ref().expect("history");
            let awaited = |leaf: &DTensor| leaf.edge.as_ref().expect("a leaf").node.awaited.get().1;
            let _guard = mesh.no_grad();
            let mut pass = Pass::new(&mesh, &edge.node);
            assert_eq!([&w, &v].map(awaited), [2, 1]);
            pass.give(edge, y.detach())?;
            let mut landed = Vec::new();
            while let Some(Waiting(node)) = pass.waiting.pop() {
                pass.visit(&node)?;
                landed.push([&w, &v].map(|leaf| pass.done.get(leaf).is_some()));
            }
            assert_eq!(landed[..3], [[false, false], [true, false], [true, true]]);
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }

    /// Holds also if an operand has to be reduced first: the plan that follows is known from the last pass.
    #[test]
    fn a_step_looks_for_its_plan_once() {
        let run = |rank, reduction| {
            let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
            mesh.set_reduction(reduction);
            let whole = |shape: [usize; 2], layout: &str| {
                DTensor::full(&mesh, DType::F32, shape, 0.5, layout.parse()?)?.requires_grad()
            };
            let (x, w, v) = (whole([64, 4], "(S0)")?, whole([4, 6], "(R)")?, whole([6, 6], "(S0)")?);
            // The derivative of `w`'s cast gets a sum in parts, and that of `v` has to reduce one.
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
            assert!(!x.lt(&x)?.has_history() && !DTensor::apply_one(&Sign, &[&x])?.has_history());
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
            let edges =
                &y.edge.as_ref().expect("one operand wants a gradient").node.call.as_ref().unwrap().edges;
            assert_eq!(edges.iter().position(Option::is_some), Some(66));
            let gradients = y.mul(&y)?.sum_all()?.backward()?;
            assert_eq!(gradients.get(&leaf).unwrap().full_tensor()?.to_f64_vec(), [132.0; 3]);
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }
}
