//! Spans of the `tracing` crate: whether a subscriber wants them, and those of collectives.

use std::fmt::Display;

use tracing::level_filters::{LevelFilter, STATIC_MAX_LEVEL};
use tracing::{Level, Span, debug_span};

use super::call::Call;
use super::origin::CallOrigin;

/// Returns true if some subscriber may want spans: one comparison with a number that is 0 without a subscriber.
#[inline]
pub(crate) fn spans_enabled() -> bool {
    Level::DEBUG <= STATIC_MAX_LEVEL && Level::DEBUG <= LevelFilter::current()
}

/// Returns the span of a call that member `me` makes on a group of `members`, or none without a subscriber.
#[inline]
pub(in crate::comm) fn collective_span(
    call: &Call<'_>,
    group: &dyn Display,
    me: usize,
    members: usize,
) -> Span {
    if spans_enabled() { new_span(call, group, me, members) } else { Span::none() }
}

#[cold]
fn new_span(call: &Call<'_>, group: &dyn Display, me: usize, members: usize) -> Span {
    let CallOrigin { operator, path, phase } = CallOrigin::current();
    debug_span!(
        target: "isoshard::collective",
        "collective",
        call = call.name,
        %group,
        operator,
        path = path.as_str(),
        %phase,
        sent_bytes = call.sent_bytes(me, members),
        received_bytes = call.received_bytes(me),
    )
}
