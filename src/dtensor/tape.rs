//! The tape: what a backward pass needs, kept by the results that need it.
//!
//! A node belongs to one call of an operator and holds exactly the operands and results that the operator's derivative
//! reads. A result knows its node, a node those of its operands: letting go of a result lets go of its history.

use std::cell::Cell;
use std::rc::Rc;

use smallvec::SmallVec;

use super::again::Origin;
use super::dispatch::DTensors;
use super::facts::Facts;
use super::plan::{Needs, Plan};
use super::tensor::DTensor;
use crate::error::Result;
use crate::ops::{Op, Program};

/// One result of one node.
#[derive(Clone)]
pub(super) struct Edge {
    pub node: Rc<Node>,
    pub out: usize,
}

/// The history of a leaf, or of one call's results.
pub(super) struct Node {
    pub id: u64,
    pub outs: SmallVec<[Rc<Facts>; 1]>,
    /// None for a leaf.
    pub call: Option<Call>,
    /// In the backward pass of this number: how many gradients have still to come.
    pub awaited: Cell<(u64, usize)>,
}

/// A call of an operator, as its derivative needs it.
pub(super) struct Call {
    pub program: Rc<Program>,
    /// One an operand, where its gradient is wanted and there is one.
    pub edges: SmallVec<[Option<Edge>; 3]>,
    /// In the numbering of the program's values.
    pub saved: SmallVec<[Option<Saved>; 4]>,
}

/// A value that the derivative reads.
pub(super) enum Saved {
    Kept(DTensor),
    Again(Rc<Origin>),
}

impl Node {
    pub fn leaf(x: &DTensor) -> Rc<Node> {
        let outs = [x.facts.clone()].into_iter().collect();
        Rc::new(Node { id: next_id(), outs, call: None, awaited: Cell::default() })
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

impl DTensor {
    pub(super) fn record_identity(&self, same: DTensor) -> DTensor {
        DTensor { edge: self.edge.clone(), ..same }
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
    let program = plan.program(op, Needs::of(ins.iter().map(|x| x.has_history())))?;
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
    let node = Rc::new(Node { id: next_id(), outs: facts, call: Some(call), awaited: Cell::default() });
    for (out, o) in outs.iter_mut().enumerate().filter(|(out, _)| grad_reads[*out]) {
        o.edge = Some(Edge { node: node.clone(), out });
    }
    Ok(outs)
}

/// Younger nodes and passes have larger numbers, from 1. A rank is a thread, so the count is the rank's own.
pub(super) fn next_id() -> u64 {
    thread_local!(static NEXT: Cell<u64> = const { Cell::new(1) });
    NEXT.replace(NEXT.get() + 1)
}
