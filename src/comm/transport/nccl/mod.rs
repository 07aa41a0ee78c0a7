//! The NCCL engine: one GPU a rank, ranks being threads of one process or processes.
//!
//! Every group has a communicator and a stream of its own beside its rank's, so transfers run while kernels do: a call starts
//! after what the rank has put on its stream before, and [`Pending::wait`](crate::comm::Pending::wait) makes the rank's stream wait
//! for it, never the host. Bytes are moved, nothing is reduced: reductions are the exchange and the fold that all engines
//! share, so they have the same bits. The host waits where ranks connect, at a group's first call to a peer, and in
//! [`Group::barrier`](crate::comm::Group::barrier).
//!
//! **What can go wrong is reported by name.** A thread per rank, its *watchdog*, watches what is in flight: a call that has not
//! finished within the deadline after the rank's stream has come to it, and errors that NCCL notices meanwhile. Communicators do
//! not block, so connecting keeps the deadline too. The first fault gives up the whole world: everywhere the communicators are
//! aborted, later calls give the fault, and so does reading a value, since what was being received is arbitrary.
//!
//! **What members bring is compared** in a coordinator that they tell of every call, in passing (the caller copies the shapes
//! and goes on; a few hundred bytes a call go to rank 0's process): name, reduction, dtype, shapes, order. Since nobody waits
//! for the comparison, what a wrong call received may have been used in kernels before the fault is known, never in a value that
//! was read after it. The deadline then also names who has not come. [`Library::compared`] turns this off, where thousands of
//! ranks would crowd the coordinator; a wrong call is then whatever NCCL makes of it, a hang up to the deadline or a wrong value.
//! Never compared: the values themselves, and which attributes an operator had.
//!
//! NCCL takes one rank a GPU. Several ranks on one GPU are threads without NCCL: [`spmd`](crate::comm::spmd) with
//! [`Spmd::on`](crate::comm::Spmd::on).
//!
//! The library is looked for as `libnccl.so.2` and `libnccl.so`, or where `ISOSHARD_NCCL` says.
//!
//! Missing: reductions inside NCCL for fast mode; messages that do not take their group's turn (see
//! [`Group::send`](crate::comm::Group::send)); CUDA graphs.

mod api;
mod channel;
mod connect;
mod engine;
mod group;
mod library;
#[cfg(feature = "nccl")]
mod nvidia;
mod transfers;
mod watch;
mod world;

pub use api::{Communicator, Nccl, NcclError, NcclResult, Progress};
pub(in crate::comm) use engine::{NcclEngine, NcclSetup};
pub use library::Library;
