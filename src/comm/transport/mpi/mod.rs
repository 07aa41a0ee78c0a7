//! The MPI engine, for CPU clusters: one process per rank, started by `mpirun` or `srun`.
//!
//! Point-to-point messages move bytes directly between tensors' memory. MPI reduces nothing, because its order of
//! summation is its own: reductions are the exchange and the fold that all engines share, and so have the same bits.
//! A request owns the memory that MPI reads or writes. If a request is dropped in flight, the engine keeps the memory
//! until MPI has finished; if it is forgotten, the memory leaks.
//!
//! **Calls are never mixed up.** All ranks use one communicator that belongs to the engine. A message's tag holds its
//! group's number, which the coordinator assigns, its sequence (collectives, or the messages between two members),
//! and a fingerprint of the call: operation, order, reduction, dtype and shapes. Messages of calls that differ do not
//! match, so a wrong call receives nothing. Within a sequence MPI keeps the order of messages.
//!
//! **Faults name their rank.** As with [NCCL](crate::comm::nccl), members send the signature of each call to the
//! coordinator in rank 0's process, which compares them asynchronously. A rank that waits looks at the coordinator's
//! first fault as well as at its messages; after the deadline the coordinator names the ranks that did not arrive.
//! The first fault ends the whole world. The coordinator notices a process that dies because its connection closes.
//! Errors of MPI are returned and never abort the process. [`Process::compared`](crate::comm::Process::compared)
//! turns the comparison off for worlds of thousands of ranks, whose messages would overload the coordinator.
//!
//! A rank that waits spins for a moment, then yields to other processes, then sleeps in growing steps, because there
//! may be more ranks than cores. Each rank has a *watchdog* thread that keeps MPI's messages moving while nothing
//! waits for them, and sends the collected messages to the coordinator about every millisecond.
//!
//! **The coordinator's address.** Rank 0 listens at a free port, and broadcasts it by MPI with its machine's
//! addresses. `MASTER_ADDR` and `ISOSHARD_PORT` choose others (see [`Launch`](crate::comm::Launch)).
//!
//! Messages of more than 1 GiB are sent in pieces, as MPI counts in `int`; `ISOSHARD_MPI_PIECE_BYTES` sets another
//! limit.
//!
//! **Dependency.** `mpi-sys` is the lower half of rsmpi: bindings to the functions of the MPI that `mpicc` belongs
//! to. The requests of rsmpi's safe half borrow the memory that they move, but an engine's must own it. ferrompi
//! needs no libclang, but its requests borrow as well, and go through tables of a fixed length.
//!
//! Missing: trees for broadcasts and barriers of many ranks; messages of GPU memory; a world that survives a dead rank.

mod backoff;
mod channel;
mod engine;
mod group;
mod hosts;
mod library;
mod place;
mod transfers;
mod watch;
mod world;

pub(in crate::comm) use engine::{MpiEngine, MpiSetup};
pub(in crate::comm) use library::Mpi;
pub(in crate::comm) use place::meet;
