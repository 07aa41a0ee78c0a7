//! The public side of communication: ranks, groups and their collectives, and the ways to run a program on ranks.

mod busy;
mod caught;
mod collectives;
mod dry_run;
mod group;
mod group_threads;
mod local_world;
mod pending;
mod phased_reduce;
mod process;
mod rank;
mod rank_failures;
mod rank_outcomes;
mod rank_threads;
mod spmd;
mod tally;
mod thread_room;
mod timeline;

pub use busy::BusyGuard;
pub use dry_run::{DryReport, DryRun};
pub use group::Group;
pub use pending::Pending;
pub(crate) use phased_reduce::PhasedReduce;
pub use process::Process;
pub use rank::Rank;
pub use spmd::{Spmd, spmd, spmd_first};
pub use tally::{ModuleTraffic, Tally, Total, Traffic};
pub use timeline::{DryTime, ModuleTime};
