//! This process as one rank.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;

use super::flight::Recorder;
use super::nccl::{Library, NcclEngine, Seat};
use super::office::{Meeting, meet};
use super::spmd::message;
use super::{Engine, Launch, Rank};
use crate::error::{Error, Result};
use crate::tensor::{Device, cuda};

/// This process as one rank of a world of processes, each with a GPU of its own, over [NCCL](super::nccl).
///
/// ```no_run
/// use isoshard::comm::{Launch, Process, Rank, spmd};
/// fn train(rank: Rank) -> isoshard::Result<()> {
///     println!("rank {} on {}", rank.rank(), rank.device());
///     rank.world().barrier()
/// }
/// // One program for `torchrun --nproc-per-node 8 prog`, `mpirun prog`, `srun prog`, and by itself.
/// match Launch::from_env()? {
///     Some(launch) => Process::new(launch).run(train)?,
///     None => spmd(4, train).map(drop)?,
/// }
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Process {
    launch: Launch,
    deadline: Duration,
    device: Option<Device>,
    library: Option<Library>,
}

impl Process {
    /// The rank that the launcher says, with a deadline of 60 s, on its node's GPU of the same local number.
    pub fn new(launch: Launch) -> Process {
        Process { launch, deadline: Duration::from_secs(60), device: None, library: None }
    }

    /// How long the ranks wait for each other: to meet, to connect, and in a collective.
    pub fn deadline(mut self, deadline: Duration) -> Process {
        self.deadline = deadline;
        self
    }

    /// The rank's GPU. Without this it is that of the local rank's number, or the only one that the process sees, as
    /// where the launcher shows each process its own.
    pub fn on(mut self, device: Device) -> Process {
        self.device = Some(device);
        self
    }

    /// Which NCCL, and how. Without this: [`Library::load`].
    pub fn nccl(mut self, library: Library) -> Process {
        self.library = Some(library);
        self
    }

    /// Meets the other processes, runs `f` as this rank, and waits until the others have all it owes them.
    ///
    /// Where `f` fails or panics, collectives on all other ranks fail too, naming this one. Rank 0's process goes on until
    /// the others are over as well, but not longer than the deadline.
    ///
    /// # Errors
    /// Those of `f`; a library or device that is not there; [`CommFault`](crate::CommFault)s: ranks that have not come,
    /// and what went wrong between the ranks. Refuses processes that are not of one world.
    pub fn run<T>(self, f: impl FnOnce(Rank) -> Result<T>) -> Result<T> {
        let Process { launch, deadline, device, library } = self;
        let library = library.map_or_else(Library::load, Ok)?;
        let device = device.map_or_else(|| gpu_of(&launch), Ok)?;
        let Meeting { desk, brought } = meet(&launch, library.name().as_bytes(), deadline)?;
        of_one_kind(&brought)?;
        let seat = Seat { rank: launch.rank(), world_len: launch.world_len(), device, deadline, desk };
        let engine = Arc::new(NcclEngine::connect(seat, &library)?);
        let recorder = Recorder::alone(launch.rank(), launch.world_len());
        let program = || f(Rank::recorded(engine.clone(), recorder.clone())?.on(device));
        match catch_unwind(AssertUnwindSafe(program)) {
            Ok(Ok(result)) => engine.end().map(|()| result),
            Ok(Err(error)) => {
                recorder.write(&error.to_string(), error.is_echo());
                engine.fail_for_good(error.to_string());
                Err(error)
            }
            Err(payload) => {
                let cause = format!("panicked: {}", message(&*payload));
                recorder.write(&cause, false);
                engine.fail_for_good(cause);
                resume_unwind(payload)
            }
        }
    }
}

/// Refuses, on all ranks alike, libraries that differ: they need not understand each other.
fn of_one_kind(libraries: &[Vec<u8>]) -> Result<()> {
    match libraries.iter().position(|name| *name != libraries[0]) {
        None => Ok(()),
        Some(rank) => {
            let name = |rank: usize| String::from_utf8_lossy(&libraries[rank]);
            Err(Error::invalid(
                "process",
                "the ranks run different libraries",
                format!("{} at rank 0, {} at rank {rank}", name(0), name(rank)),
                "install one version on all nodes",
            ))
        }
    }
}

/// The GPU of the local rank's number, or the only one that can be seen.
fn gpu_of(launch: &Launch) -> Result<Device> {
    let (local, seen) = (launch.local_rank(), cuda::devices_len());
    match seen {
        _ if local < seen => Ok(Device::Cuda(local)),
        1 => Ok(Device::Cuda(0)),
        _ => {
            let why = cuda::unavailable_reason().map_or_else(String::new, |reason| format!(": {reason}"));
            Err(Error::unsupported(
                "process",
                "there is no GPU for the rank",
                format!("{launch}, {seen} CUDA device(s){why}"),
                "start as many ranks on each node as it has GPUs",
            ))
        }
    }
}
