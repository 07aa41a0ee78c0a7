//! What ranks tell each other beside their data: where they meet, what they brought to a call, and who failed.
//!
//! Engines whose transport compares nothing and names nobody (NCCL, MPI) have one *office* a world, in rank 0's process. Each
//! rank has a [`Desk`]: it sends notes there, which never wait, and gets news from there. The office compares what the
//! members of a call brought and tells everyone the first fault. Ranks that are threads of one process share the office; other
//! processes reach it by TCP, over the connections they met by.
//!
//! A frame is its length (4 bytes) and its bytes; all numbers are little-endian.

mod desk;
mod ledger;
mod link;
mod meet;
mod note;
mod wire;

pub(super) use desk::{Desk, Office};
pub(super) use meet::{Meeting, meet};
#[cfg(feature = "mpi")]
pub(super) use meet::{Place, meet_at};
pub(super) use note::{Lane, Note, Verdict};
