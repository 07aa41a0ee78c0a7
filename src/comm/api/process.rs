//! This process as one rank.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;

use super::rank::Rank;
use super::spmd::message;
use crate::comm::coordinator::Rendezvous;
use crate::comm::diagnostics::Recorder;
use crate::comm::launch::Launch;
use crate::comm::transport::Engine;
use crate::comm::transport::nccl::{Library, NcclEngine, NcclSetup};
use crate::error::{Error, Result};
use crate::tensor::{Device, cuda};

/// This process as one rank of a world of processes: each with a GPU of its own, over [NCCL](crate::comm::nccl), or each on the
/// CPU, over MPI.
///
/// ```no_run
/// use isoshard::comm::{Launch, Process, Rank, spmd};
/// fn train(rank: Rank) -> isoshard::Result<()> {
///     println!("rank {} on {}", rank.rank(), rank.device());
///     rank.world().barrier()
/// }
/// // One program for `mpirun -n 8 prog`, `srun --mpi=pmix prog`, and by itself. Without `.mpi()`: for `torchrun
/// // --nproc-per-node 8 prog` as well, with a GPU a rank.
/// match Launch::from_env()? {
///     Some(launch) => Process::new(launch).mpi().run(train)?,
///     None => spmd(4, train).map(drop)?,
/// }
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Process {
    launch: Launch,
    deadline: Duration,
    device: Option<Device>,
    insecure: bool,
    transport: Transport,
}

/// How processes talk.
#[derive(Clone, Debug)]
enum Transport {
    Nccl(Option<Library>),
    Mpi { compared: bool },
}

impl Process {
    /// The rank that the launcher says, with a deadline of 60 s, over NCCL, on its node's GPU of the same local number.
    pub fn new(launch: Launch) -> Process {
        let deadline = Duration::from_secs(60);
        Process { launch, deadline, device: None, insecure: false, transport: Transport::Nccl(None) }
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
        self.transport = Transport::Nccl(Some(library));
        self
    }

    /// A rank on the CPU that talks by MPI, for programs that `mpirun` or `srun` start. Wants the feature `mpi`.
    ///
    /// MPI says where the ranks meet, so none of the environment's variables is needed for that. Bytes go by messages
    /// between ranks; reductions are the fold that all engines share, and have the same bits.
    pub fn mpi(mut self) -> Process {
        self.transport = Transport::Mpi { compared: true };
        self
    }

    /// Whether MPI's ranks tell rank 0's process of every call, so that it can say who brought what where calls differ, and
    /// who has not come: a few hundred bytes a call, in passing. Calls that differ do not mix in any case; uncompared, they
    /// end at the deadline. NCCL's way is [`Library::compared`].
    pub fn compared(mut self, on: bool) -> Process {
        if let Transport::Mpi { compared } = &mut self.transport {
            *compared = on;
        }
        self
    }

    /// Meets the other processes without a secret also where others can reach them. Whoever reaches rank 0's port may then take a
    /// rank's place and stop the world; on a network of one's own that may do. Without this, such an address is refused unless
    /// `ISOSHARD_TOKEN` or `ISOSHARD_TOKEN_FILE` gives the ranks a secret: see [`Launch::from_env`].
    pub fn insecure_rendezvous(mut self) -> Process {
        self.insecure = true;
        self
    }

    /// Meets the other processes, runs `f` as this rank, and waits until the others have all it owes them.
    ///
    /// Where `f` fails or panics, collectives on all other ranks fail too, naming this one. Over NCCL, rank 0's process goes on
    /// until the others are over as well, but not longer than the deadline; over MPI, which ends everywhere at once, every
    /// process goes on until all are over or one has failed, and a rank that is only told of a failure
    /// ([`Error::is_echo`]) ends a moment later than the rank that failed, whose words a launcher might cut off otherwise.
    ///
    /// # Errors
    /// Those of `f`; a library or device that is not there; [`CommFault`](crate::CommFault)s: ranks that have not come,
    /// and what went wrong between the ranks. Refuses processes that are not of one world.
    pub fn run<T>(self, f: impl FnOnce(Rank) -> Result<T>) -> Result<T> {
        match &self.transport {
            Transport::Nccl(_) => self.run_nccl(f),
            Transport::Mpi { compared } => {
                let compared = *compared;
                self.run_mpi(compared, f)
            }
        }
    }

    fn run_nccl<T>(self, f: impl FnOnce(Rank) -> Result<T>) -> Result<T> {
        let Process { launch, deadline, device, insecure, transport } = self;
        let library =
            if let Transport::Nccl(Some(library)) = transport { Ok(library) } else { Library::load() }?;
        let device = device.map_or_else(|| default_gpu(&launch), Ok)?;
        let client = Rendezvous { launch: &launch, library: &library.name(), deadline, insecure }.meet()?;
        let setup =
            NcclSetup { rank: launch.rank(), world_len: launch.world_len(), device, deadline, client };
        let engine = Arc::new(NcclEngine::connect(setup, &library)?);
        let rank = engine.clone();
        run_program(&*engine, NcclEngine::fail_for_good, |recorder| {
            f(Rank::recorded(rank, recorder)?.on(device))
        })
    }

    #[cfg(feature = "mpi")]
    fn run_mpi<T>(self, compared: bool, f: impl FnOnce(Rank) -> Result<T>) -> Result<T> {
        use crate::comm::transport::mpi::{self, Mpi, MpiEngine, MpiSetup};
        /// How much later than whoever failed a rank ends that is only told of it.
        const LAST_WORDS: Duration = Duration::from_millis(300);
        let Process { launch, deadline, device, insecure, .. } = self;
        if let Some(device) = device.filter(|device| device.is_cuda()) {
            let remedy = "run ranks with GPUs over NCCL";
            let rule = "MPI moves what lies in the CPU's memory";
            return Err(Error::unsupported("mpi", rule, format!("a rank on {device}"), remedy));
        }
        let mpi = Mpi::start()?;
        check_same_job(&launch, &mpi)?;
        let rendezvous = Rendezvous { launch: &launch, library: &mpi.kind(), deadline, insecure };
        let client = mpi::meet(&mpi, rendezvous)?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let crowded = launch.local_len().unwrap_or(launch.world_len()) > cores;
        let engine = MpiEngine::begin(MpiSetup { mpi, client, deadline, compared, crowded })?;
        let engine = Arc::new(engine);
        let rank = engine.clone();
        let lived =
            run_program(&*engine, MpiEngine::fail_for_good, |recorder| f(Rank::recorded(rank, recorder)?));
        if lived.as_ref().is_err_and(Error::is_echo) {
            std::thread::sleep(LAST_WORDS);
        }
        lived
    }

    #[cfg(not(feature = "mpi"))]
    fn run_mpi<T>(self, _compared: bool, _f: impl FnOnce(Rank) -> Result<T>) -> Result<T> {
        Err(Error::unsupported(
            "mpi",
            "this program was built without MPI",
            self.launch.to_string(),
            "build it with the feature mpi",
        ))
    }
}

/// A rank's program from beginning to end; whatever becomes of it, the others hear.
fn run_program<E: Engine, T>(
    engine: &E,
    fail: impl Fn(&E, String),
    program: impl FnOnce(Arc<Recorder>) -> Result<T>,
) -> Result<T> {
    let recorder = Recorder::alone(engine.rank(), engine.world_len());
    let recorded = recorder.clone();
    match catch_unwind(AssertUnwindSafe(|| program(recorded))) {
        Ok(Ok(result)) => engine.end().map(|()| result),
        Ok(Err(error)) => {
            recorder.write(&error.to_string(), error.is_echo());
            fail(engine, error.to_string());
            Err(error)
        }
        Err(payload) => {
            let cause = format!("panicked: {}", message(&*payload));
            recorder.write(&cause, false);
            fail(engine, cause);
            resume_unwind(payload)
        }
    }
}

/// Refuses a launcher that is not of this MPI: each process would be a world of its own.
#[cfg(feature = "mpi")]
fn check_same_job(launch: &Launch, mpi: &crate::comm::transport::mpi::Mpi) -> Result<()> {
    if (launch.rank(), launch.world_len()) == (mpi.rank, mpi.world_len) {
        return Ok(());
    }
    Err(Error::invalid(
        "mpi",
        "the launcher and MPI say different things",
        format!("{launch}; rank {} of {} by {}", mpi.rank, mpi.world_len, mpi.name),
        "start the program by the mpirun of the MPI that it was built with, or by srun --mpi=pmix",
    ))
}

/// The GPU of the local rank's number, or the only one that can be seen.
fn default_gpu(launch: &Launch) -> Result<Device> {
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
