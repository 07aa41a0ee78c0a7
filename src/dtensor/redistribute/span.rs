//! The span of a redistribution.

use tracing::{Span, debug_span};

use super::redistribution::Redistribution;
use crate::comm::{CallOrigin, spans_enabled};

/// Returns the span of a redistribution, or none without a subscriber.
#[inline]
pub(super) fn move_span(plan: &Redistribution) -> Span {
    if spans_enabled() { new_span(plan, 0, plan.received_bytes()) } else { Span::none() }
}

/// Returns the span of redistributions that share a call, or none without a subscriber. Its fields are those of the first;
/// `to` tells how many others there are, and the bytes are those of all.
#[inline]
pub(super) fn shared_span<'a>(plans: impl ExactSizeIterator<Item = &'a Redistribution> + Clone) -> Span {
    match plans.clone().next() {
        Some(first) if spans_enabled() => new_span(
            first,
            plans.len() - 1,
            plans.map(Redistribution::received_bytes).fold(0, u64::saturating_add),
        ),
        _ => Span::none(),
    }
}

#[cold]
fn new_span(plan: &Redistribution, others: usize, received_bytes: u64) -> Span {
    let Some((from, to)) = plan.ends() else { return Span::none() };
    let CallOrigin { operator, path, phase } = CallOrigin::current();
    let others = if others == 0 { String::new() } else { format!(", with {others} other tensors") };
    debug_span!(
        target: "isoshard::move",
        "move",
        operator,
        path = path.as_str(),
        phase = %phase,
        from = %from,
        to = %format_args!("{to}{others}"),
        calls = plan.calls(),
        received_bytes,
    )
}
