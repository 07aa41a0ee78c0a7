//! Redistribution: from any layout to any other of one mesh.
//!
//! A move is planned once per pair of facts, from what every rank knows, as a [`Redistribution`]: steps, each of at most
//! one call. Without `Partial` it is one exchange in which every rank receives exactly what it lacks. Ranks that are
//! replicas of each other each ask within their own replica, so the load is spread and the holder is the nearest.
//!
//! With `Partial` the order of reductions and moves is searched for (`search`), among all that there are up to the number
//! of axes: any axes may be folded together, to any layout, and what is folded may move at the same time, each rank
//! receiving the parts of exactly those elements that it will hold. Tests prove it cheapest on small meshes by trying
//! everything. An order that would change bits is not taken.
//!
//! Missing: a new `Partial` is opened from a replicated value, where a shard could be padded without receiving anything.

mod cost;
mod lower;
mod redistribution;
mod run;
mod search;
mod states;

#[cfg(test)]
mod exhaustive;
#[cfg(test)]
mod tests;

pub(super) use cost::peers;
pub use redistribution::Redistribution;
pub(crate) use run::Move;
pub(super) use run::{InFlight, find};
