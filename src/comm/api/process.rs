//! One rank per process.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;

use super::caught::message;
use super::rank::Rank;
use crate::comm::coordinator::Rendezvous;
use crate::comm::diagnostics::Recorder;
use crate::comm::launch::Launch;
use crate::comm::transport::Engine;
use crate::comm::transport::nccl::{Library, NcclEngine, NcclSetup};
use crate::error::{Error, Result};
use crate::tensor::{Device, catch_no_room, cpu, cuda};

/// This process as one rank of a world of processes: with a GPU each over [NCCL](crate::comm::nccl), or on the CPU
/// over MPI.
///
/// ```no_run
/// use isoshard::comm::{Launch, Process, Rank, spmd};
/// fn train(rank: Rank) -> isoshard::Result<()> {
///     println!("rank {} on {}", rank.rank(), rank.device());
///     rank.world().barrier()
/// }
/// // The same program runs under `mpirun -n 8 prog`, under `srun --mpi=pmix prog`, and by itself. Without `.mpi()`
/// // it runs under `torchrun --nproc-per-node 8 prog` too, with one GPU per rank.
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
    threads_per_rank: Option<usize>,
}

/// The library that carries the tensors.
#[derive(Clone, Debug)]
enum Transport {
    Nccl(Option<Library>),
    Mpi { compared: bool },
}

impl Process {
    /// The rank that the launcher assigned to this process, over NCCL on the GPU of its local number, with a deadline
    /// of 60 s.
    ///
    /// ```
    /// use isoshard::comm::{Launch, Process};
    /// let vars = [("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")];
    /// let get = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string());
    /// let process = Process::new(Launch::from_vars(get)?.expect("torchrun's variables"));
    /// assert!(format!("{process:?}").contains("deadline: 60s"));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn new(launch: Launch) -> Process {
        let deadline = Duration::from_secs(60);
        Process {
            launch,
            deadline,
            device: None,
            insecure: false,
            transport: Transport::Nccl(None),
            threads_per_rank: None,
        }
    }

    /// Sets how long ranks wait for each other: to meet, to connect, and in a collective.
    ///
    /// ```
    /// use isoshard::comm::{Launch, Process};
    /// use std::time::Duration;
    /// if let Some(launch) = Launch::from_env()? {
    ///     let patient = Process::new(launch).deadline(Duration::from_secs(600));
    /// }
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn deadline(mut self, deadline: Duration) -> Process {
        self.deadline = deadline;
        self
    }

    /// Sets the number of threads that the rank uses for a large kernel on the CPU. The default is
    /// [`cpu::threads_each`] of the ranks on this machine. Any number gives the same bits.
    ///
    /// ```
    /// use isoshard::comm::{Launch, Process};
    /// if let Some(launch) = Launch::from_env()? {
    ///     let process = Process::new(launch).mpi().threads_per_rank(8);
    /// }
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn threads_per_rank(mut self, threads: usize) -> Process {
        self.threads_per_rank = Some(threads);
        self
    }

    /// Sets the rank's GPU. The default is the GPU of the local rank's number, or the only one that the process sees,
    /// since some launchers show each process its own.
    ///
    /// ```
    /// use isoshard::comm::{Launch, Process};
    /// use isoshard::tensor::Device;
    /// if let Some(launch) = Launch::from_env()? {
    ///     let second_gpu = Process::new(launch).on(Device::Cuda(1));
    /// }
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn on(mut self, device: Device) -> Process {
        self.device = Some(device);
        self
    }

    /// Sets the NCCL library and its options. The default is [`Library::load`].
    ///
    /// ```
    /// use isoshard::comm::{Launch, Process, nccl::Library};
    /// if let (Some(launch), Ok(library)) = (Launch::from_env()?, Library::load()) {
    ///     let process = Process::new(launch).nccl(library);
    /// }
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn nccl(mut self, library: Library) -> Process {
        self.transport = Transport::Nccl(Some(library));
        self
    }

    /// Runs the rank on the CPU over MPI, for programs that `mpirun` or `srun` start. Needs the feature `mpi`.
    ///
    /// MPI tells the ranks where to meet, so no environment variable is needed for that. Tensors travel as messages
    /// between ranks, and reductions are the fold that all engines share, with the same bits.
    ///
    /// ```
    /// use isoshard::comm::{Launch, Process, Rank};
    /// if let Some(launch) = Launch::from_env()? {
    ///     Process::new(launch).mpi().run(|rank: Rank| rank.world().barrier())?;
    /// }
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn mpi(mut self) -> Process {
        self.transport = Transport::Mpi { compared: true };
        self
    }

    /// Turns the comparison of calls over MPI on (the default) or off. If on, each rank reports every call to rank
    /// 0's process, a few hundred bytes per call in the background, so that errors say who brought what and who is
    /// missing. If off, calls that differ do not mix either, but end at the deadline. For NCCL see
    /// [`Library::compared`].
    ///
    /// ```
    /// use isoshard::comm::{Launch, Process};
    /// if let Some(launch) = Launch::from_env()? {
    ///     let thousands_of_ranks = Process::new(launch).mpi().compared(false);
    /// }
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn compared(mut self, on: bool) -> Process {
        if let Transport::Mpi { compared } = &mut self.transport {
            *compared = on;
        }
        self
    }

    /// Lets the processes meet without a secret at an address that other machines can reach. Anyone who reaches rank
    /// 0's port can then take a rank's place and stop the world, which is acceptable on a private network only. By
    /// default such an address is refused unless `ISOSHARD_TOKEN` or `ISOSHARD_TOKEN_FILE` gives the ranks a secret:
    /// see [`Launch::from_env`].
    ///
    /// ```
    /// use isoshard::comm::{Launch, Process};
    /// if let Some(launch) = Launch::from_env()? {
    ///     let in_a_private_network = Process::new(launch).insecure_rendezvous();
    /// }
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn insecure_rendezvous(mut self) -> Process {
        self.insecure = true;
        self
    }

    /// Meets the other processes, runs `f` as this rank, and waits until the other ranks have received all that this
    /// one sent.
    ///
    /// If `f` fails or panics, collectives on all other ranks fail too, and their errors name this rank. Over NCCL,
    /// rank 0's process lives until the other ranks have ended, but not longer than the deadline, which counts from
    /// the end of announced work ([`Rank::busy`]). MPI ends everywhere at once: every process lives until all ranks
    /// have ended or one has failed, and a rank that only repeats another rank's failure ([`Error::is_echo`]) ends a
    /// moment later, so that the launcher does not cut off the failing rank's message.
    ///
    /// # Errors
    /// Returns the error of `f`, an error if the library or the device is missing, and
    /// [`CommFault`](crate::CommFault)s if ranks do not come or the connection fails. Refuses processes that do not
    /// belong to one world.
    ///
    /// ```
    /// use isoshard::comm::{Launch, Process};
    /// if let Some(launch) = Launch::from_env()? {
    ///     let ranks = Process::new(launch).run(|rank| Ok(rank.world_len()))?;
    ///     println!("{ranks} ranks");
    /// }
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn run<T>(self, f: impl FnOnce(Rank) -> Result<T>) -> Result<T> {
        let local_len = self.launch.local_len().unwrap_or(self.launch.world_len());
        let threads = self.threads_per_rank.map_or_else(|| cpu::threads_each(local_len), Ok)?;
        if threads == 0 {
            let rule = "a rank computes on one thread or more";
            return Err(Error::invalid("process", rule, "0 threads per rank", "give 1"));
        }
        let f = |rank| cpu::with_threads(threads, || f(rank));
        match &self.transport {
            Transport::Nccl(_) => self.run_nccl(f),
            Transport::Mpi { compared } => {
                let compared = *compared;
                self.run_mpi(compared, f)
            }
        }
    }

    fn run_nccl<T>(self, f: impl FnOnce(Rank) -> Result<T>) -> Result<T> {
        let Process { launch, deadline, device, insecure, transport, .. } = self;
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
        /// Time between the end of a rank that failed and the end of a rank that only repeats its failure.
        const LAST_WORDS: Duration = Duration::from_millis(300);
        let Process { launch, deadline, device, insecure, .. } = self;
        if let Some(device) = device.filter(|device| device.is_cuda()) {
            let remedy = "run ranks with GPUs over NCCL";
            let rule = "MPI moves tensors in the CPU's memory only";
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

/// Runs a rank's program from beginning to end and reports its end to the other ranks in every case.
fn run_program<E: Engine, T>(
    engine: &E,
    fail: impl Fn(&E, String),
    program: impl FnOnce(Arc<Recorder>) -> Result<T>,
) -> Result<T> {
    let recorder = Recorder::alone(engine.rank(), engine.world_len());
    let recorded = recorder.clone();
    match catch_unwind(AssertUnwindSafe(|| catch_no_room("", || program(recorded)))) {
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

/// Refuses a launcher that does not belong to this MPI: each process would be a world of its own.
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

/// Returns the GPU of the local rank's number, or the only visible GPU.
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
