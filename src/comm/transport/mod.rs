//! The engines: an asynchronous exchange among the members of a group, over threads, MPI, NCCL, or nobody.

mod coordinated;
mod dry;
mod engine;
mod fold;
#[cfg(feature = "mpi")]
pub(super) mod mpi;
pub mod nccl;
pub(super) mod threads;

pub(super) use dry::DryEngine;
pub use engine::{CallResults, Channel, Engine, Request};
pub use fold::Reduce;
pub(super) use fold::fold;
