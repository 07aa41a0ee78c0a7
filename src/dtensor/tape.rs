//! The tape: what a backward pass needs, kept by the results that need it.
//!
//! A node belongs to one call of an operator and holds exactly the operands and results that the operator's derivative
//! reads. A result knows its node, a node those of its operands: letting go of a result lets go of its history.

use std::cell::Cell;
use std::rc::Rc;

use super::list::DTensors;
use super::plan::{Needs, Plan};
use super::tensor::{DTensor, Edge, Node, Saved, TapeCall, next_id};
use crate::error::Result;
use crate::ops::Op;

impl Drop for Node {
    /// Takes long chains apart in a loop: dropped recursively they could exhaust the stack.
    fn drop(&mut self) {
        let mut calls: Vec<TapeCall> = self.call.take().into_iter().collect();
        while let Some(call) = calls.pop() {
            for edge in call.edges.into_iter().flatten() {
                if let Ok(mut node) = Rc::try_unwrap(edge.node) {
                    calls.extend(node.call.take());
                }
            }
        }
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
            Some(origin) => Saved::Regather(origin.clone()),
            None => Saved::Kept(DTensor { edge: None, ..x.clone() }),
        }
    };
    let saved = program.reads[..ins.len()].iter().enumerate().map(|(i, &r)| r.then(|| keep(i)));
    let saved_outs = outs.iter().zip(result_reads).map(|(o, &r)| r.then(|| Saved::Kept(o.clone())));
    let call = TapeCall {
        edges: ins.iter().zip(&program.grads).map(|(x, g)| g.and_then(|_| x.edge.clone())).collect(),
        saved: saved.chain(saved_outs).collect(),
        program: program.clone(),
    };
    let meta = outs.iter().map(|o| o.meta.clone()).collect();
    let node = Rc::new(Node { id: next_id(), outs: meta, call: Some(call), awaited: Cell::default() });
    for (out, o) in outs.iter_mut().enumerate().filter(|(out, _)| grad_reads[*out]) {
        o.edge = Some(Edge { node: node.clone(), out });
    }
    Ok(outs)
}
