//! The tape: what a backward pass needs, kept by the results that need it.
//!
//! A node belongs to one call of an operator and holds exactly the operands and results that the operator's derivative
//! reads. Gradients are distributed tensors in whatever layout is cheapest until they reach a leaf, where they take
//! the leaf's own: there a data-parallel gradient is all-reduced, an FSDP one reduce-scattered, each as soon as it is
//! complete.

use std::cell::{Cell, RefCell};
use std::collections::BinaryHeap;
use std::fmt;
use std::rc::{Rc, Weak};

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use super::device_mesh::DeviceMesh;
use super::dispatch::DTensors;
use super::facts::Facts;
use super::plan::{Needs, Plan};
use super::redistribute::{self, InFlight};
use super::tensor::DTensor;
use crate::error::{Error, Result};
use crate::ops::{Add, Op, Program, Step};
use crate::placement::{Layout, Placement};

/// One result of one node.
#[derive(Clone)]
pub(super) struct Edge {
    pub node: Rc<Node>,
    pub out: usize,
}

pub(super) struct Node {
    id: u64,
    outs: SmallVec<[Rc<Facts>; 1]>,
    /// None for a leaf.
    call: Option<Call>,
}

struct Call {
    program: Rc<Program>,
    /// One an operand, where its gradient is wanted and there is one.
    edges: SmallVec<[Option<Edge>; 3]>,
    /// In the numbering of the program's values.
    saved: SmallVec<[Option<Saved>; 4]>,
}

enum Saved {
    Kept(DTensor),
    Again(Rc<Origin>),
}

/// A gathered tensor that is not kept but gathered again when it is needed: FSDP's parameters in the backward pass.
pub(super) struct Origin {
    shard: DTensor,
    facts: Rc<Facts>,
    flight: RefCell<Option<InFlight>>,
    /// The origins of the unit that ran before: asked for while this one is used.
    before: Vec<Weak<Origin>>,
}

/// How a tensor can be had again after it was let go of, while a tape remembers it.
#[derive(Clone)]
pub(crate) struct Again(Weak<Origin>);

impl Node {
    pub fn leaf(x: &DTensor) -> Rc<Node> {
        let outs = [x.facts.clone()].into_iter().collect();
        Rc::new(Node { id: next_id(), outs, call: None })
    }
}

impl Drop for Node {
    /// Takes long chains apart in a loop: dropped recursively they could exhaust the stack.
    fn drop(&mut self) {
        let mut calls: Vec<Call> = self.call.take().into_iter().collect();
        while let Some(call) = calls.pop() {
            for edge in call.edges.into_iter().flatten() {
                if let Ok(mut node) = Rc::try_unwrap(edge.node) {
                    calls.extend(node.call.take());
                }
            }
        }
    }
}

impl Origin {
    pub(super) fn value(&self) -> Result<DTensor> {
        for earlier in self.before.iter().filter_map(Weak::upgrade) {
            earlier.prefetch()?;
        }
        self.prefetch()?;
        let flight = self.flight.borrow_mut().take().expect("just prefetched");
        let local = flight.finish(&self.shard.mesh)?;
        Ok(DTensor::wrap(&self.shard.mesh, local, self.facts.clone()))
    }

    fn prefetch(&self) -> Result<()> {
        let mut flight = self.flight.borrow_mut();
        if flight.is_none() {
            let mesh = &self.shard.mesh;
            *flight = Some(
                redistribute::find(mesh, &self.shard.facts, &self.facts)?
                    .start(mesh, self.shard.local.clone())?,
            );
        }
        Ok(())
    }
}

impl DTensor {
    /// `gathered`, which is this tensor redistributed, marked so that the backward pass gathers it again instead of
    /// keeping it; `before` are tensors so marked that ran earlier and will be needed next.
    pub(crate) fn gathered_again(&self, gathered: DTensor, before: &[Again]) -> DTensor {
        let before = before.iter().map(|a| a.0.clone()).collect();
        let origin = Origin {
            shard: self.detach(),
            facts: gathered.facts.clone(),
            flight: RefCell::new(None),
            before,
        };
        DTensor { origin: Some(Rc::new(origin)), ..gathered }
    }

    /// How this tensor can be had again, if it was marked so.
    pub(crate) fn again(&self) -> Option<Again> {
        self.origin.as_ref().map(|o| Again(Rc::downgrade(o)))
    }

    pub(super) fn record_identity(&self, same: DTensor) -> DTensor {
        DTensor { edge: self.edge.clone(), ..same }
    }

    /// The gradients of this scalar with respect to every leaf ([`DTensor::requires_grad`]) it was computed from.
    ///
    /// Communicates what the derivatives' operators move, and what takes each leaf's gradient to the leaf's layout.
    ///
    /// # Errors
    /// Refuses a tensor with more than one element or without history; a fault of communication.
    pub fn backward(&self) -> Result<Gradients> {
        if self.shape().numel() != 1 {
            return Err(Error::invalid("backward", "wants one element", self.to_string(), "sum it first"));
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
    /// Refuses a `grad` of another shape or dtype, and a tensor without history; a fault of communication.
    pub fn backward_from(&self, grad: DTensor) -> Result<Gradients> {
        if grad.meta() != self.meta() {
            return Err(Error::invalid(
                "backward",
                "the gradient does not fit",
                format!("{grad} for {self}"),
                "",
            ));
        }
        let Some(edge) = &self.edge else {
            return Err(Error::invalid(
                "backward",
                "no leaf that requires a gradient stands behind this tensor",
                self.to_string(),
                "call requires_grad() on a leaf, outside no_grad()",
            ));
        };
        let _guard = self.mesh.no_grad();
        let mut pass = Pass {
            mesh: self.mesh.clone(),
            waiting: BinaryHeap::new(),
            grads: FxHashMap::default(),
            readers: readers(&edge.node),
            done: Gradients::default(),
        };
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

    /// Adds the gradients of another pass: gradient accumulation.
    ///
    /// # Errors
    /// None that the passes have not had.
    pub fn merge(&mut self, other: Gradients) -> Result<()> {
        for (id, g) in other.0 {
            let sum = match self.0.remove(&id) {
                Some(mine) => DTensor::apply_owned(&Add, [mine, g].into_iter().collect())?.swap_remove(0),
                None => g,
            };
            self.0.insert(id, sum);
        }
        Ok(())
    }
}

/// Keeps what the derivative of this call needs, if a gradient is wanted.
pub(super) fn record(
    op: &dyn Op,
    plan: &Plan,
    ins: &[&DTensor],
    moved: &[Option<DTensor>],
    mut outs: DTensors,
) -> Result<DTensors> {
    if !ins[0].mesh.grad_enabled()
        || !ins.iter().any(|x| x.has_history())
        || !outs.iter().any(|o| o.dtype().is_float())
    {
        return Ok(outs);
    }
    let needs: Needs = ins.iter().map(|x| x.has_history()).collect();
    let program = plan.program(op, &needs)?;
    // A result whose gradient no derivative asks for, such as a statistic, is a constant.
    let (result_reads, grad_reads) = program.reads[ins.len()..].split_at(outs.len());
    if !grad_reads.contains(&true) {
        return Ok(outs);
    }
    let keep = |i: usize| {
        // A partial that was reduced is kept reduced; whatever else moved is kept as it was, and moves again.
        let x = match &moved[i] {
            Some(m) if ins[i].layout().has_partial() => m,
            _ => ins[i],
        };
        match &x.origin {
            Some(origin) => Saved::Again(origin.clone()),
            None => Saved::Kept(DTensor { edge: None, ..x.clone() }),
        }
    };
    let saved = program.reads[..ins.len()].iter().enumerate().map(|(i, &r)| r.then(|| keep(i)));
    let saved_outs = outs.iter().zip(result_reads).map(|(o, &r)| r.then(|| Saved::Kept(o.clone())));
    let call = Call {
        edges: ins.iter().zip(&program.grads).map(|(x, g)| g.and_then(|_| x.edge.clone())).collect(),
        saved: saved.chain(saved_outs).collect(),
        program: program.clone(),
    };
    let facts = outs.iter().map(|o| o.facts.clone()).collect();
    let node = Rc::new(Node { id: next_id(), outs: facts, call: Some(call) });
    for (out, o) in outs.iter_mut().enumerate().filter(|(out, _)| grad_reads[*out]) {
        o.edge = Some(Edge { node: node.clone(), out });
    }
    Ok(outs)
}

/// A backward pass under way. Nodes are visited youngest first, so a node's gradients are complete when it is visited.
struct Pass {
    mesh: DeviceMesh,
    waiting: BinaryHeap<Waiting>,
    grads: FxHashMap<u64, SmallVec<[Option<DTensor>; 1]>>,
    /// How many gradients each leaf has still to get: with the last one it is complete, and need not wait for older nodes.
    readers: FxHashMap<u64, usize>,
    done: Gradients,
}

struct Waiting(Rc<Node>);

impl Pass {
    fn give(&mut self, edge: &Edge, grad: DTensor) -> Result<()> {
        let slots = self.grads.entry(edge.node.id).or_insert_with(|| {
            self.waiting.push(Waiting(edge.node.clone()));
            SmallVec::from_elem(None, edge.node.outs.len())
        });
        slots[edge.out] = Some(match slots[edge.out].take() {
            None => grad,
            Some(sum) => DTensor::apply_owned(&Add, [sum, grad].into_iter().collect())?.swap_remove(0),
        });
        Ok(())
    }

    fn visit(&mut self, node: &Rc<Node>) -> Result<()> {
        // A leaf that was complete early has nothing left here.
        let Some(grads) = self.grads.remove(&node.id) else { return Ok(()) };
        let Some(call) = &node.call else { return self.land(node, grads) };
        let result = self.run(node, call, grads)?;
        for (edge, grad) in call.edges.iter().zip(result) {
            let (Some(edge), Some(grad)) = (edge, grad) else { continue };
            self.give(edge, grad)?;
            if let Some(left) = self.readers.get_mut(&edge.node.id) {
                *left -= 1;
                if *left == 0
                    && let Some(grads) = self.grads.remove(&edge.node.id)
                {
                    self.land(&edge.node, grads)?;
                }
            }
        }
        Ok(())
    }

    fn land(&mut self, leaf: &Node, mut grads: SmallVec<[Option<DTensor>; 1]>) -> Result<()> {
        let Some(grad) = grads[0].take() else { return Ok(()) };
        let grad = grad.redistribute(leaf.outs[0].layout().clone())?;
        // A gradient may be a broadcast view, and what is kept per leaf should be as compact as the leaf.
        let local = grad.local.contiguous();
        self.done.0.insert(leaf.id, DTensor { local, ..grad });
        Ok(())
    }

    /// Runs the node's derivative. A `Partial` value that one step had to reduce is reduced for all.
    fn run(
        &self,
        node: &Node,
        call: &Call,
        grads: SmallVec<[Option<DTensor>; 1]>,
    ) -> Result<SmallVec<[Option<DTensor>; 4]>> {
        let program = &call.program;
        let mut values: SmallVec<[Option<DTensor>; 16]> = SmallVec::from_elem(None, program.values_len);
        for (v, saved) in call.saved.iter().enumerate() {
            values[v] = match saved {
                None => None,
                Some(Saved::Kept(x)) => Some(x.clone()),
                Some(Saved::Again(origin)) => Some(origin.value()?),
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
            for r in &step.ins {
                if let Some(reduced) = self.reduced_for(step, &values, r.0 as usize)? {
                    values[r.0 as usize] = Some(reduced);
                }
            }
            let ins: SmallVec<[&DTensor; 4]> =
                step.ins.iter().map(|r| value(&values, r.0 as usize)).collect();
            let outs = DTensor::apply(step.op.as_ref(), &ins)?;
            drop(ins);
            for (k, out) in outs.into_iter().enumerate() {
                values[step.out.0 as usize + k] = Some(out);
            }
        }
        Ok(program.grads.iter().map(|g| g.and_then(|r| values[r.0 as usize].clone())).collect())
    }

    /// Value `v` moved as `step` will want it, if it is a partial that `step` reduces.
    fn reduced_for(&self, step: &Step, values: &[Option<DTensor>], v: usize) -> Result<Option<DTensor>> {
        let x = value(values, v);
        if !x.layout().has_partial() {
            return Ok(None);
        }
        let facts: SmallVec<[&Rc<Facts>; 4]> =
            step.ins.iter().map(|r| &value(values, r.0 as usize).facts).collect();
        let plan = Plan::find(&self.mesh, step.op.as_ref(), &facts)?;
        let at = step.ins.iter().position(|r| r.0 as usize == v).expect("asked for an operand of the step");
        let Some((m, to)) = &plan.moves[at] else { return Ok(None) };
        Ok(Some(DTensor::wrap(&self.mesh, m.run(&self.mesh, x.local.clone())?, to.clone())))
    }

    fn zeros(&self, facts: &Facts) -> Result<DTensor> {
        let layout = facts.layout();
        let placements = layout.placements().iter().map(|p| match p {
            Placement::Partial(_) => Placement::Replicate,
            other => other.clone(),
        });
        let layout = Layout::new(placements).with_order(layout.order())?;
        DTensor::zeros(&self.mesh, facts.dtype(), facts.shape(), layout)
    }
}

/// For each leaf behind `root`, how many operands of calls it is: a pass from `root` visits every one of these once.
fn readers(root: &Node) -> FxHashMap<u64, usize> {
    let mut readers = FxHashMap::default();
    let mut seen = FxHashSet::default();
    let mut nodes = vec![root];
    while let Some(call) = nodes.pop().and_then(|node| node.call.as_ref()) {
        for Edge { node, .. } in call.edges.iter().flatten() {
            if node.call.is_none() {
                *readers.entry(node.id).or_insert(0) += 1;
            } else if seen.insert(node.id) {
                nodes.push(node);
            }
        }
    }
    readers
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
        f.debug_map().entries(self.0.iter().map(|(id, g)| (id, g.to_string()))).finish()
    }
}

/// Younger nodes have larger numbers. A rank is a thread, so the count is the rank's own.
fn next_id() -> u64 {
    thread_local!(static NEXT: Cell<u64> = const { Cell::new(0) });
    NEXT.replace(NEXT.get() + 1)
}

#[cfg(test)]
mod tests {
    use super::super::DeviceMesh;
    use super::*;
    use crate::comm::spmd;
    use crate::ops::{Bits, RmsNorm, Sign};
    use crate::tensor::Tensor;

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
            let parts: Vec<DTensor> = (0..40).map(|i| vector(&mesh, [i as f32; 3])).collect::<Result<_>>()?;
            let leaf = parts[39].requires_grad()?;
            let ins: Vec<&DTensor> = parts[..39].iter().chain([&leaf]).collect();
            let y = DTensor::cat(&ins, 0)?;
            let edges =
                &y.edge.as_ref().expect("one operand wants a gradient").node.call.as_ref().unwrap().edges;
            assert_eq!(edges.iter().position(Option::is_some), Some(39));
            let gradients = y.mul(&y)?.sum_all()?.backward()?;
            assert_eq!(gradients.get(&leaf).unwrap().full_tensor()?.to_f64_vec(), [78.0; 3]);
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }
}
