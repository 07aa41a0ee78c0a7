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

mod api;
mod calls;
mod coordinator;
mod deadline;
mod diagnostics;
mod launch;
mod lock;
mod network;
mod transport;

pub use api::{DryReport, DryRun, Group, Pending, Process, Rank, Spmd, Tally, Total, Traffic, spmd};
pub use calls::{Call, Route, Sequence};
pub(crate) use calls::{operator_scope, operator_scope_if_none};
pub use diagnostics::flight;
pub use launch::Launch;
pub use network::{Cost, Level, Network, Peers, RankGrid};
pub use transport::nccl;
pub use transport::{Channel, Engine, Reduce, Request, Tensors};
