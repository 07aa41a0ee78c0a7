//! The span of an operator call.

use std::fmt;

use tracing::debug_span;
use tracing::span::EnteredSpan;

use crate::comm::{CallOrigin, spans_enabled};
use crate::dtensor::plan::call_plan::CallPlan;
use crate::ops::Op;
use crate::placement::Spec;

/// Enters the span of a call, which covers its moves and its kernel. Returns `None` without a subscriber.
#[inline]
pub(in crate::dtensor) fn operator_span(op: &dyn Op, plan: &CallPlan) -> Option<EnteredSpan> {
    if spans_enabled() { enter(op, plan) } else { None }
}

#[cold]
fn enter(op: &dyn Op, plan: &CallPlan) -> Option<EnteredSpan> {
    let CallOrigin { path, phase, .. } = CallOrigin::current();
    let moved = plan.moves.iter().flatten().map(|(m, _)| m.plan().received_bytes());
    let span = debug_span!(
        target: "isoshard::op",
        "op",
        operator = op.name(),
        path = path.as_str(),
        phase = %phase,
        operands = %SpecList(|| plan.given()),
        results = %SpecList(|| plan.outs.iter().map(|m| m.spec())),
        received_bytes = moved.sum::<u64>(),
    );
    Some(span.entered())
}

/// Writes tensors in the one-line notation.
struct SpecList<F>(F);

impl<'a, I: Iterator<Item = &'a Spec>, F: Fn() -> I> fmt::Display for SpecList<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, spec) in (self.0)().enumerate() {
            write!(f, "{}{spec}", if i > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}
