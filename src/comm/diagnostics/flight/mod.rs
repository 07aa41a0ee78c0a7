//! The flight recorder: what a rank's last calls were, kept always and written where something fails.
//!
//! Every rank keeps its most recent calls in a ring of fixed size: group, sequence number, operation, dtype, shapes, the
//! operator that wanted the call, and how far it came. It is kept above all engines, costs some tens of nanoseconds a call
//! and allocates nothing once the ring is full. Ranks that share memory read each other's, which is how an error says what
//! each rank completed last, and how ranks that wait for each other in a circle are told from ranks that are late.
//!
//! At a rank's first failure its ring is written as `rank-<k>.json` to the folder that the environment variable
//! `ISOSHARD_FLIGHT_DIR` or [`Spmd::flight_dir`](crate::comm::Spmd::flight_dir) names. [`read`] merges a folder's files and says which rank
//! left the others where.
//!
//! Over NCCL, where the host does not wait for the device, a call counts as completed when the host has gone on.

mod read;
pub(super) mod record;
mod report;
mod slow;
pub(super) mod write;

pub use crate::comm::calls::ShapeList;
pub use read::read;
pub use record::{CallRecord, CallState, GroupRecord, RankRecord, RecordedSignature};
pub use report::{FlightReport, IncompleteCall, MismatchedCall};
pub use slow::SlowRank;
