//! Redistribution: from any layout to any other layout of one mesh.
//!
//! A move is planned once per pair of layouts, from metadata that every rank has, as a [`Redistribution`]: steps of
//! at most one collective call each. Without `Partial` it is one exchange in which every rank receives exactly the
//! elements that it lacks. Ranks that hold the same elements each receive from within their own replica, which
//! spreads the load and uses the nearest sender.
//!
//! With `Partial`, the planner (`search`) finds the cheapest order of reductions and moves. Any of the axes may be
//! reduced together, to any layout, and a reduction may move at the same time: each rank receives the partial values
//! of just the elements that it will hold. Tests compare it with an exhaustive search on small meshes. Orders that
//! would change bits are not considered.
//!
//! Missing: making a `Partial` from a shard by padding, without communication. Today the value is replicated first.

mod cost;
mod even_shards;
pub(super) mod exchange_piece;
mod lower;
mod rank_samples;
mod redistribution;
mod run;
mod search;
mod shared_gather;
mod shared_positions;
mod shared_reduction;
mod span;
mod states;
mod unit_hops;

#[cfg(test)]
mod exhaustive;
#[cfg(test)]
mod tests;

pub(super) use crate::dtensor::redistribute::exchange_piece::communicating_axes;
pub(super) use cost::peers;
pub(crate) use even_shards::may_be_padding;
pub(super) use rank_samples::{RankDifferences, RankSamples};
pub use redistribution::Redistribution;
pub(crate) use run::Move;
pub(super) use run::{InFlight, find, find_in_unit};
pub(super) use search::cheapest_time;
pub(super) use shared_gather::{shard_places, shared_time, sharing, start_sharing};
pub(super) use shared_positions::GradientBuffer;
pub(super) use shared_reduction::{ReductionGroup, ReductionInFlight, reductions_sharing, run_stacked};
pub(super) use states::sample_coords;
