//! Groups of ranks, and collectives over their local tensors.
//!
//! [`spmd`] runs one closure on every rank; each gets a [`Rank`], makes [`Group`]s from it and calls collectives on
//! them, blocking or as a [`Pending`]. Reductions fold the members' contributions by one fixed tree over the member
//! indices, so every rank gets the same bits on every engine.
//!
//! Tensors share their buffers and copy before they write, so the thread engine publishes one by cloning a
//! reference: peers read it in place, and what a gather returns may be a peer's own buffer.
//!
//! ```
//! use isoshard::comm::spmd;
//! use isoshard::tensor::{ReduceOp, Tensor};
//! let sums = spmd(3, |rank| {
//!     let mine = Tensor::full(isoshard::tensor::DType::F32, [2], rank.rank() as f32);
//!     rank.world().all_reduce(&mine, ReduceOp::Sum)?.to_vec::<f32>()
//! })?;
//! assert_eq!(sums, vec![vec![3.0, 3.0]; 3]);
//! # Ok::<(), isoshard::Error>(())
//! ```
//!
//! Ranks are threads, or processes over NCCL or MPI ([`Process`]).
//!
//! Missing: a reduction that an engine does itself, in an order of its own.

mod call;
mod crew;
pub mod dry;
mod engine;
pub mod flight;
mod fold;
mod group;
mod launch;
#[cfg(feature = "mpi")]
mod mpi;
pub mod nccl;
mod network;
mod office;
mod pending;
mod process;
mod rank;
mod spmd;
mod tally;
mod threads;

pub use call::{Call, Route};
pub use dry::DryRun;
pub use engine::{Channel, Engine, Reduce, Request, Tensors};
pub(crate) use flight::{during, during_at_least};
pub use group::Group;
pub use launch::Launch;
pub use network::{Cost, Grid, Level, Network, Peers};
pub use pending::Pending;
pub use process::Process;
pub use rank::Rank;
pub use spmd::{Spmd, spmd};
pub use tally::{Tally, Total, Traffic};
