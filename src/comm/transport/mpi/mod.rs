//! The MPI engine: CPU clusters, one process a rank, started by `mpirun` or `srun`.
//!
//! Bytes go by point-to-point messages, straight from and into tensors' memory; nothing is reduced by MPI, whose order is
//! its own: reductions are the exchange and the fold that all engines share, so they have the same bits. A request owns the
//! memory that MPI reads or writes; what is dropped in flight the engine keeps until MPI is through with it, and what is
//! forgotten leaks.
//!
//! **No two calls mix.** All ranks talk in one communicator of the engine's own. A message's tag holds its group's number,
//! which the coordinator hands out, its sequence (collectives, or the messages between two members) and a fingerprint of the call:
//! operation, order, reduction, dtype, shapes. Messages of calls that differ do not match each other, so what a wrong
//! call would have received does not come, whatever else happens. Within a sequence MPI keeps the order of messages.
//!
//! **What can go wrong is told by name.** What members bring is compared, in passing, by the coordinator in rank 0's process, as
//! with [NCCL](crate::comm::nccl); a rank that waits looks at the coordinator's first_fault as well as at its messages, and after the
//! deadline the coordinator says who has not come. The first fault gives up the world. A process that dies is noticed when its
//! connection ends. MPI's own errors are returned, never fatal. [`Process::compared`](crate::comm::Process::compared) turns the
//! comparison off, where thousands of ranks would crowd the coordinator.
//!
//! Waiting spins for a moment, then gives way to other processes, then sleeps in growing steps: ranks may be more than
//! cores. A thread per rank, its *watchdog*, keeps messages moving that nobody waits for, and sends the coordinator what it is
//! told in passing, a millisecond's worth at a time.
//!
//! **Where the coordinator is** MPI itself says: rank 0 listens at a port that is free and broadcasts it with its machine's
//! addresses. `MASTER_ADDR` and `ISOSHARD_PORT` choose others (see [`Launch`](crate::comm::Launch)).
//!
//! Messages beyond a gibibyte go in pieces, as MPI counts in `int`; `ISOSHARD_MPI_PIECE_BYTES` sets another limit.
//!
//! **Why `mpi-sys`.** It is the lower half of rsmpi, the field's own bindings: the functions of whatever MPI `mpicc`
//! belongs to. Of rsmpi's safe half nothing would be used, since its requests borrow what they move, and an engine's
//! must own it. ferrompi needs no libclang, but its requests borrow too, and pass through tables of a fixed length.
//!
//! Missing: trees for broadcasts and barriers of many ranks; messages of GPU memory; a world that outlives a dead rank.

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
