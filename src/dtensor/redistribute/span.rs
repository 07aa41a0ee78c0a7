//! The span of a redistribution.

use tracing::{Span, debug_span};

use super::redistribution::Redistribution;
use crate::comm::{CallOrigin, spans_enabled};

/// Returns the span of a redistribution, or none without a subscriber.
#[inline]
pub(super) fn move_span(plan: &Redistribution) -> Span {
    if spans_enabled() { new_span(plan) } else { Span::none() }
}

#[cold]
fn new_span(plan: &Redistribution) -> Span {
    let Some((from, to)) = plan.ends() else { return Span::none() };
    let CallOrigin { operator, path, phase } = CallOrigin::current();
    debug_span!(
        target: "isoshard::move",
        "move",
        operator,
        path = path.as_str(),
        phase = %phase,
        from = %from,
        to = %to,
        calls = plan.calls(),
        received_bytes = plan.received_bytes(),
    )
}

/// Returns the span of redistributions that share a call, or none without a subscriber. Its field `to` tells how many
/// tensors there are.
#[inline]
pub(super) fn shared_span<'a>(plans: impl ExactSizeIterator<Item = &'a Redistribution>) -> Span {
    if spans_enabled() { new_shared_span(plans) } else { Span::none() }
}

#[cold]
fn new_shared_span<'a>(mut plans: impl ExactSizeIterator<Item = &'a Redistribution>) -> Span {
    let len = plans.len();
    let Some(first) = plans.next() else { return Span::none() };
    let Some((from, to)) = first.ends() else { return Span::none() };
    let CallOrigin { operator, path, phase } = CallOrigin::current();
    debug_span!(
        target: "isoshard::move",
        "move",
        operator,
        path = path.as_str(),
        phase = %phase,
        from = %from,
        to = format!("{to}, with {} other tensors", len - 1),
        calls = 1,
        received_bytes = first.received_bytes() + plans.map(Redistribution::received_bytes).sum::<u64>(),
    )
}
