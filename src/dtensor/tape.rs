//! The tape: records what a backward pass needs.
//!
//! A node belongs to one call of an operator and keeps the operands and results that the operator's derivative reads.
//! A result refers to its node, and a node to those of its operands: dropping a result drops its history.

use std::cell::RefCell;
use std::rc::Rc;

use super::call_plan::{CallPlan, Needs};
use super::list::DTensors;
use super::tensor::{CallDerivative, DTensor, Saved, TapeCall, TapeNode, TapeOutput};
use crate::error::Result;
use crate::ops::Op;

impl Drop for TapeNode {
    /// Drops long chains in a loop: recursion could exhaust the stack. A node that only a user's closure holds joins the
    /// loop in which the closure is dropped.
    fn drop(&mut self) {
        thread_local!(static JOINING: RefCell<Option<Vec<TapeCall>>> = const { RefCell::new(None) });
        let Some(call) = self.call.take() else { return };
        let mut calls = vec![call];
        let joins = JOINING.try_with(|joining| match &mut *joining.borrow_mut() {
            Some(others) => {
                others.append(&mut calls);
                true
            }
            none => {
                *none = Some(Vec::new());
                false
            }
        });
        // An ending thread has no such list any more.
        if joins == Ok(true) {
            return;
        }
        while let Some(TapeCall { inputs, derivative }) = calls.pop() {
            for output in inputs.into_iter().flatten() {
                if let Ok(mut node) = Rc::try_unwrap(output.node) {
                    calls.extend(node.call.take());
                }
            }
            drop(derivative);
            let join = |joining: &RefCell<Option<Vec<_>>>| {
                joining.borrow_mut().iter_mut().for_each(|o| calls.append(o))
            };
            let _ = JOINING.try_with(join);
        }
        let _ = JOINING.try_with(|joining| *joining.borrow_mut() = None);
    }
}

/// Records what the derivative of this call needs, if a gradient is wanted.
pub(super) fn record(
    op: &dyn Op,
    plan: &CallPlan,
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
    // A result whose gradient the derivative does not read, such as a statistic, is a constant.
    let (result_reads, grad_reads) = program.reads[ins.len()..].split_at(outs.len());
    if !grad_reads.contains(&true) {
        return Ok(outs);
    }
    let keep = |i: usize| {
        // A reduced partial value is kept reduced. Any other redistributed operand is kept as given, and moves again.
        let x = match &moved[i] {
            Some(m) if ins[i].layout().has_partial() => m,
            _ => ins[i],
        };
        match &x.origin {
            Some(origin) => Saved::Regather(origin.clone()),
            None => Saved::Kept(DTensor { history: None, ..x.clone() }),
        }
    };
    let saved = program.reads[..ins.len()].iter().enumerate().map(|(i, &r)| r.then(|| keep(i)));
    let saved_outs = outs.iter().zip(result_reads).map(|(o, &r)| r.then(|| Saved::Kept(o.clone())));
    let call = TapeCall {
        inputs: ins.iter().zip(&program.grads).map(|(x, g)| g.and_then(|_| x.history.clone())).collect(),
        derivative: CallDerivative::Program {
            saved: saved.chain(saved_outs).collect(),
            program: program.clone(),
        },
    };
    let meta = outs.iter().map(|o| o.meta.clone()).collect();
    let node = TapeNode::new(meta, Some(call));
    for (out, o) in outs.iter_mut().enumerate().filter(|(out, _)| grad_reads[*out]) {
        o.history = Some(TapeOutput { node: node.clone(), out });
    }
    Ok(outs)
}
