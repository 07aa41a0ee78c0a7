//! Runs one program on many ranks and lets them exchange tensors.
//!
//! [`spmd`] runs a closure on every rank. Each call gets a [`Rank`]; from it the program makes [`Group`]s and calls
//! collectives on them, blocking or as a [`Pending`] that is waited for later.
//!
//! ```
//! use isoshard::comm::spmd;
//! use isoshard::tensor::{ReduceOp, Tensor};
//! let sums = spmd(3, |rank| {
//!     let mine = Tensor::from_vec(vec![rank.rank() as f32, 1.0], [2])?;
//!     rank.world().all_reduce(&mine, ReduceOp::Sum)?.to_vec::<f32>()
//! })?;
//! assert_eq!(sums, vec![vec![3.0, 3.0]; 3]);
//! # Ok::<(), isoshard::Error>(())
//! ```
//!
//! Ranks are threads of this process ([`spmd`], [`Spmd`]) or processes over MPI or NCCL ([`Process`]). A [`DryRun`]
//! runs one rank of a world of any size without peers, and a [`Tally`] counts calls and bytes, also by operator and
//! [module](ModulePath). Each call has a `tracing` span.
//!
//! A reduction folds the members' tensors by one fixed tree over the member indices, so every rank gets the same bits
//! on every engine. Tensors share their buffers and copy them before they write: with threads a gather copies
//! nothing, and its results may be the peers' own buffers.
//!
//! Errors say which rank differs, is late or failed: see [`CommFault`](crate::CommFault) and [`flight`]. A rank that
//! works on its own for longer than the deadline announces it by [`Rank::busy`].
//!
//! Missing: reductions that an engine computes itself in an order of its own.
//!
//! The [glossary](crate::glossary) defines the words used here.

mod api;
mod calls;
mod coordinator;
mod deadline;
mod diagnostics;
mod launch;
mod machine;
mod network;
mod transport;

pub(crate) use api::PhasedReduce;
pub use api::{
    BusyGuard, DryReport, DryRun, DryTime, Group, ModuleTime, ModuleTraffic, Pending, Process, Rank, Spmd,
    Tally, Total, Traffic, spmd, spmd_first,
};
pub(crate) use calls::path_matches;
pub use calls::{BusyWork, Call, Lineage, ModulePath, ModuleScope, Phase, Route};
pub(crate) use calls::{CallContext, CallOrigin, operator_scope, operator_scope_if_none, spans_enabled};
pub use diagnostics::flight;
pub use launch::Launch;
pub use machine::Machine;
pub use network::{Cost, Level, Network};
pub(crate) use network::{Peers, RankGrid};
pub use transport::nccl;
pub use transport::{CallResults, Channel, Engine, Reduce, Request};
