//! The NCCL engine: one rank per GPU. Ranks are threads of one process, or processes.
//!
//! ```
//! use isoshard::comm::{Spmd, nccl::Library};
//! use isoshard::tensor::{DType, ReduceOp, Tensor, cuda};
//!
//! match (Library::load(), cuda::unavailable_reason()) {
//!     (Ok(library), None) => {
//!         let sums = Spmd::new(cuda::devices_len()).on(isoshard::tensor::Device::Cuda).nccl(library).run(|rank| {
//!             let x = Tensor::full(DType::F32, [4], 1.0).to_device(rank.device())?;
//!             rank.world().all_reduce(&x, ReduceOp::Sum)?.to_vec::<f32>()
//!         })?;
//!         assert_eq!(sums[0], [cuda::devices_len() as f32; 4]);
//!     }
//!     (Err(e), _) => println!("no NCCL: {e}"),
//!     (_, Some(reason)) => println!("no GPU: {reason}"),
//! }
//! # Ok::<(), isoshard::Error>(())
//! ```
//!
//! Every group has a communicator and a stream of its own, in addition to its rank's stream, so transfers overlap
//! with kernels. A call starts after the work that the rank has put on its stream so far, and
//! [`Pending::wait`](crate::comm::Pending::wait) makes the rank's stream wait for the call, not the host. NCCL moves
//! bytes and reduces nothing: reductions are the exchange and the fold that all engines share, and so have the same
//! bits. The host waits only when ranks connect, at a group's first call to a peer, and in
//! [`Group::barrier`](crate::comm::Group::barrier).
//!
//! **Faults name their rank.** Each rank has a *watchdog* thread, which finds errors that NCCL reports and calls that
//! have not finished within the deadline after the rank's stream reached them. Communicators do not block, so
//! connecting has the deadline too. The first fault ends the whole world: all ranks abort their communicators, and
//! later calls return the fault. So does reading a value, because the memory of an aborted transfer is arbitrary.
//!
//! **Calls are compared.** Members send the signature of each call (name, reduction, dtype, shapes and order; a few
//! hundred bytes) to the coordinator in rank 0's process, which compares them asynchronously. No rank waits for the
//! comparison, so kernels may use the result of a wrong call before the fault is known, but a value that is read
//! later returns the fault. After the deadline the coordinator also names the ranks that did not arrive.
//! [`Library::compared`] turns the comparison off for worlds of thousands of ranks, whose messages would overload the
//! coordinator; a wrong call then hangs until the deadline or gives a wrong value. Values, and the attributes of
//! operators, are never compared.
//!
//! NCCL allows one rank per GPU. Several ranks on one GPU are threads without NCCL: [`spmd`](crate::comm::spmd) with
//! [`Spmd::on`](crate::comm::Spmd::on).
//!
//! The library is `libnccl.so.2` or `libnccl.so`, or the file that `ISOSHARD_NCCL` names.
//!
//! Missing: reductions inside NCCL for fast mode; messages that do not wait for their group's earlier calls (see
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
