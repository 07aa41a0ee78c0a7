//! Engines: each moves tensors between the members of a group, asynchronously, over threads, MPI or NCCL. A dry run's
//! engine moves none.

mod coordinated;
mod dry;
mod engine;
mod fold;
mod member_place;
#[cfg(feature = "mpi")]
pub(super) mod mpi;
pub mod nccl;
pub(super) mod threads;

pub(super) use dry::DryEngine;
pub use engine::{CallResults, Channel, Engine, Request};
pub use fold::Reduce;
pub(super) use fold::fold;
