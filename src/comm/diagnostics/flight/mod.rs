//! Finds out after a failure which rank left the others, from each rank's record of its last calls.
//!
//! ```
//! use isoshard::comm::{Spmd, flight};
//! let dir = std::env::temp_dir().join(format!("isoshard-records-{}", std::process::id()));
//! let error = Spmd::new(2).flight_dir(&dir).run(|rank| match rank.rank() {
//!     0 => rank.world().barrier(),
//!     _ => Err(isoshard::Error::invalid("step", "went wrong", "", "")),
//! });
//! assert!(error.is_err());
//! let report = flight::read(&dir)?;
//! assert_eq!(report.first, Some((1, "step: went wrong".to_string())));
//! # std::fs::remove_dir_all(&dir).unwrap();
//! # Ok::<(), isoshard::Error>(())
//! ```
//!
//! Every rank keeps its last 256 calls in a ring buffer: group, sequence number, collective, dtype, shapes, the
//! operator that the call was made for, and its state. Recording works on all engines, costs some tens of nanoseconds
//! per call, and allocates nothing once the ring is full. Ranks that share memory read each other's records: an error
//! can say what each rank completed last, and can tell ranks that wait for each other in a cycle from ranks that are
//! late.
//!
//! At its first failure a rank writes its record as `rank-<k>.json` to the folder that
//! [`Spmd::flight_dir`](crate::comm::Spmd::flight_dir) or the environment variable `ISOSHARD_FLIGHT_DIR` names.
//! [`read()`] merges the files of a folder.
//!
//! Over NCCL the host does not wait for the device, so a call counts as completed when the host has continued.

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
