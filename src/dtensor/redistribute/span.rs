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
