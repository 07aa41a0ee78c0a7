//! Running one program on several ranks that are threads.
//!
//! A closure returns this crate's [`Result`]. With an error type `E: From<Error>` of the caller's choice, `?` would leave
//! `E` unknown in every closure that ends in `Ok(())`, and each would need a type annotation. Errors of other types pass
//! by `?` or [`Error::other`], which keep them.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::rank::Rank;
use super::rank_outcomes::{program_of, result_of};
use super::thread_room::{STACK_BYTES, check_room};
use crate::comm::diagnostics::{FlightSettings, flight::SlowRank};
use crate::comm::machine::Machine;
use crate::comm::network::Network;
use crate::comm::transport::nccl::Library;
use crate::error::{Error, Failure, Result};
use crate::tensor::Device;

/// The most ranks that are threads of one process.
const MOST_RANKS: usize = 1 << 16;

/// Runs a program on `world` ranks, which are threads of this process, and returns their results in rank order: the entry
/// point of programs on threads. [`spmd_first`] returns one result, [`Spmd`] has settings, [`Process`](super::Process) runs
/// processes.
///
/// ```
/// let ranks = isoshard::comm::spmd(4, |rank| Ok(rank.rank()))?;
/// assert_eq!(ranks, [0, 1, 2, 3]);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// An error of the program's own type, or of another crate, passes through [`Error::other`]. The result names the rank
/// and keeps the error:
///
/// ```
/// use isoshard::{Error, comm::{Rank, spmd}};
/// fn load(rank: &Rank) -> Result<usize, Box<dyn std::error::Error + Send + Sync>> {
///     if rank.rank() == 1 { Err("the shard is damaged".into()) } else { Ok(rank.rank()) }
/// }
/// let error = spmd(2, |rank| load(&rank).map_err(Error::other)).unwrap_err();
/// assert_eq!(error.to_string(), "rank 1: the shard is damaged");
/// ```
///
/// # Errors
/// Same as [`Spmd::run`].
pub fn spmd<T, F>(world: usize, f: F) -> Result<Vec<T>>
where
    T: Send + 'static,
    F: Fn(Rank) -> Result<T> + Send + Sync + 'static,
{
    Spmd::new(world).run(f)
}

/// Runs `f` as [`spmd`] does and returns rank 0's result: for programs that return the same on every rank.
///
/// ```
/// use isoshard::{comm::spmd_first, dtensor::{DTensor, DeviceMesh}, tensor::DType};
/// let sum = spmd_first(3, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 3)])?;
///     DTensor::ones(&mesh, DType::F32, [7], "(S0)")?.sum_all()?.item()
/// })?;
/// assert_eq!(sum, 7.0);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Same as [`Spmd::run`].
pub fn spmd_first<T, F>(world: usize, f: F) -> Result<T>
where
    T: Send + 'static,
    F: Fn(Rank) -> Result<T> + Send + Sync + 'static,
{
    Ok(Spmd::new(world).run(f)?.swap_remove(0))
}

/// A builder that runs a program on several ranks. Each rank is a thread of this process.
///
/// ```
/// use isoshard::comm::Spmd;
/// use std::time::Duration;
/// let spmd = Spmd::new(2).deadline(Duration::from_secs(5)).name("worker");
/// let group = spmd.run(|rank| Ok(rank.world().to_string()))?;
/// assert_eq!(group, ["world{0, 1}", "world{0, 1}"]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone)]
pub struct Spmd {
    pub(super) world: usize,
    pub(super) deadline: Duration,
    pub(super) name: String,
    pub(super) device: Arc<dyn Fn(usize) -> Device + Send + Sync>,
    pub(super) library: Option<Library>,
    pub(super) flights: FlightSettings,
    pub(super) on_slow: Arc<dyn Fn(&SlowRank) + Send + Sync>,
    pub(super) patience: Option<Duration>,
    pub(super) network: Network,
    pub(super) machine: Machine,
    pub(super) memory_limit: usize,
    /// The time that ranks have to end beyond the deadline after a failure.
    pub(super) settling: Duration,
    pub(super) threads_per_rank: Option<usize>,
}

impl fmt::Debug for Spmd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Spmd { world, deadline, name, library, .. } = self;
        let spmd = &mut f.debug_struct("Spmd");
        spmd.field("world", world)
            .field("deadline", deadline)
            .field("name", name)
            .field("library", library)
            .finish()
    }
}

impl Spmd {
    /// A world of `world` ranks on the CPU with a deadline of 60 s and threads named `rank 0`, `rank 1`, ...
    ///
    /// ```
    /// use isoshard::comm::Spmd;
    /// let sums = Spmd::new(3).run(|rank| Ok(rank.world_len() + rank.rank()))?;
    /// assert_eq!(sums, [3, 4, 5]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn new(world: usize) -> Spmd {
        let (deadline, name) = (Duration::from_secs(60), "rank".into());
        let device = Arc::new(|_| Device::Cpu);
        let on_slow = Arc::new(|slow: &SlowRank| eprintln!("isoshard: {slow}"));
        let (flights, network, machine) = (FlightSettings::default(), Network::default(), Machine::default());
        Spmd {
            world,
            deadline,
            name,
            device,
            library: None,
            network,
            machine,
            flights,
            on_slow,
            patience: None,
            memory_limit: usize::MAX,
            settling: Duration::ZERO,
            threads_per_rank: None,
        }
    }

    /// Sets the device of each rank by its number: `|_| Device::Cuda(0)` lets all ranks share a GPU. Meshes made from
    /// a rank allocate on its device. With threads, the ranks of a group must be on one device.
    ///
    /// ```
    /// use isoshard::{comm::Spmd, tensor::Device};
    /// // Shapes without elements: a dry run of the program.
    /// let devices = Spmd::new(2).on(|_| Device::Meta).run(|rank| Ok(rank.device()))?;
    /// assert_eq!(devices, [Device::Meta; 2]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn on(mut self, device: impl Fn(usize) -> Device + Send + Sync + 'static) -> Spmd {
        self.device = Arc::new(device);
        self
    }

    /// Gives each rank a GPU, and lets ranks communicate by [NCCL](crate::comm::nccl). Rank i is on `Device::Cuda(i)`
    /// unless a later call of [`Spmd::on`] says otherwise. NCCL takes one rank per GPU.
    ///
    /// ```no_run
    /// use isoshard::comm::{Spmd, nccl::Library};
    /// let devices = Spmd::new(2).nccl(Library::load()?).run(|rank| Ok(rank.device().to_string()))?;
    /// assert_eq!(devices, ["cuda:0", "cuda:1"]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn nccl(mut self, library: Library) -> Spmd {
        self.library = Some(library);
        self.on(Device::Cuda)
    }

    /// Sets how long a collective waits for its members, and how long the ranks have to end after a failure.
    ///
    /// ```
    /// use isoshard::comm::Spmd;
    /// use std::{thread::sleep, time::Duration};
    /// let error = Spmd::new(2).deadline(Duration::from_millis(50)).run(|rank| {
    ///     if rank.rank() == 1 {
    ///         sleep(Duration::from_secs(10)); // the others do not wait for its end
    ///     }
    ///     rank.world().barrier()
    /// });
    /// assert!(error.unwrap_err().to_string().contains("rank(s) [1] did not come within 0.1 s"));
    /// ```
    pub fn deadline(mut self, deadline: Duration) -> Spmd {
        self.deadline = deadline;
        self
    }

    /// Sets the name of the threads, to which the rank's number is added.
    ///
    /// ```
    /// use isoshard::comm::Spmd;
    /// let names = Spmd::new(2).name("trainer").run(|_| Ok(std::thread::current().name().map(String::from)))?;
    /// assert_eq!(names[1].as_deref(), Some("trainer 1"));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn name(mut self, name: impl Into<String>) -> Spmd {
        self.name = name.into();
        self
    }

    /// Sets the folder to which each rank writes its last calls at its first failure: see
    /// [`flight`](crate::comm::flight). The default is the folder that the environment variable `ISOSHARD_FLIGHT_DIR`
    /// names, or none.
    ///
    /// ```
    /// use isoshard::{Error, comm::{Spmd, flight}};
    /// let dir = std::env::temp_dir().join(format!("isoshard-flight-{}", std::process::id()));
    /// let result = Spmd::new(2).flight_dir(&dir).run(|rank| {
    ///     rank.world().barrier()?;
    ///     if rank.rank() == 1 { Err(Error::other("out of data")) } else { rank.world().barrier() }
    /// });
    /// assert!(result.is_err());
    /// assert!(flight::read(&dir)?.to_string().contains("out of data"));
    /// std::fs::remove_dir_all(&dir)?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn flight_dir(mut self, dir: impl Into<PathBuf>) -> Spmd {
        self.flights.dir = Some(dir.into());
        self
    }

    /// Sets the function that is called when a rank has waited for [`Spmd::patience`], once per rank and call. The
    /// default prints a line to standard error. `f` runs on the thread that called [`Spmd::run`]; if it panics, it is not
    /// called again, and [`Spmd::run`] returns an error once the ranks have ended.
    ///
    /// ```
    /// use isoshard::comm::Spmd;
    /// use std::{sync::{Arc, Mutex}, thread::sleep, time::Duration};
    /// let slow = Arc::new(Mutex::new(Vec::new()));
    /// let seen = slow.clone();
    /// let spmd = Spmd::new(2).patience(Duration::from_millis(20));
    /// spmd.on_slow(move |rank| seen.lock().unwrap().push(rank.to_string())).run(|rank| {
    ///     if rank.rank() == 1 {
    ///         sleep(Duration::from_secs(1));
    ///     }
    ///     rank.world().barrier()
    /// })?;
    /// assert_eq!(slow.lock().unwrap().len(), 1); // one line for one call
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn on_slow(mut self, f: impl Fn(&SlowRank) + Send + Sync + 'static) -> Spmd {
        self.on_slow = Arc::new(f);
        self
    }

    /// Sets how long a rank waits before [`Spmd::on_slow`] reports the ranks that it waits for. The default is a
    /// quarter of the deadline.
    ///
    /// ```
    /// use isoshard::comm::Spmd;
    /// use std::time::Duration;
    /// let quiet = Spmd::new(2).patience(Duration::MAX).on_slow(|_| unreachable!("no rank waits that long"));
    /// quiet.run(|rank| rank.world().barrier())?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn patience(mut self, patience: Duration) -> Spmd {
        self.patience = Some(patience);
        self
    }

    /// Sets the model of the network between these ranks. It determines which moves are chosen, never a result.
    ///
    /// ```
    /// use isoshard::comm::{Network, Spmd};
    /// let networks = Spmd::new(2).network(Network::default()).run(|rank| Ok(rank.network().clone()))?;
    /// assert_eq!(networks[0], Network::default());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn network(mut self, network: Network) -> Spmd {
        self.network = network;
        self
    }

    /// Sets the model of each rank's processor. It determines which plans are chosen, never a result.
    ///
    /// ```
    /// use isoshard::comm::{Machine, Spmd};
    /// let fast = Machine { f32_flops_per_s: 1e14, ..Machine::default() };
    /// let machines = Spmd::new(2).machine(fast.clone())?.run(|rank| Ok(rank.machine().clone()))?;
    /// assert_eq!(machines[1], fast);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses rates that are not positive numbers.
    pub fn machine(mut self, machine: Machine) -> Result<Spmd> {
        self.machine = machine.checked()?;
        Ok(self)
    }

    /// Limits the bytes of each rank's tensors in the CPU's memory, those that it keeps for reuse included. A rank that
    /// would exceed the limit fails with [`Error::OutOfMemory`], before the system ends the process. The default is no
    /// limit. [`set_memory_limit`](crate::tensor::storage::set_memory_limit) says what counts, and sets the limit of a thread,
    /// such as a process's only rank; [`memory_bytes`](crate::tensor::cpu::memory_bytes) tells what the system leaves the
    /// process.
    ///
    /// ```
    /// use isoshard::{Error, comm::Spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// let error = Spmd::new(2).memory_limit(64 << 20).run(|rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::ones(&mesh, DType::F32, [8192, 1], "(S0)")?;
    ///     x.matmul(&x.transpose(0, 1)?).map(drop) // 128 MiB per rank
    /// });
    /// let text = error.unwrap_err().to_string();
    /// assert!(text.contains("memory: cpu has no room; got f32[") && text.contains(" for matmul of "), "{text}");
    /// ```
    pub fn memory_limit(mut self, bytes: usize) -> Spmd {
        self.memory_limit = bytes;
        self
    }

    /// Sets the number of threads that each rank uses for a large kernel on the CPU. The default is
    /// [`threads_each`](crate::tensor::cpu::threads_each): `ISOSHARD_THREADS`, or the cores divided by the ranks. Any
    /// number gives the same bits.
    ///
    /// ```
    /// use isoshard::{comm::Spmd, tensor::{DType, Tensor, cpu}};
    /// let product = |threads: usize| Spmd::new(1).threads_per_rank(threads).run(|_| {
    ///     let x = Tensor::full(DType::F32, [1, 256, 256], 0.1);
    ///     cpu::gemm("matmul", &x, &x, &[256])?.to_vec::<f32>()
    /// });
    /// assert_eq!(product(2)?, product(1)?);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn threads_per_rank(mut self, threads: usize) -> Spmd {
        self.threads_per_rank = Some(threads);
        self
    }

    /// Gives ranks more time to end after a failure than the deadline, before they are left behind.
    #[cfg(feature = "testing")]
    pub(crate) fn settling(mut self, settling: Duration) -> Spmd {
        self.settling = settling;
        self
    }

    /// Runs `f` on every rank and returns the results in rank order.
    ///
    /// If a rank fails, collectives on all other ranks fail too, and the first failure is returned. A rank that does
    /// not end within the deadline after that (over NCCL three seconds more) is abandoned: its thread continues until its
    /// next collective or the end of the process, which is why `f` may not borrow.
    ///
    /// ```
    /// use isoshard::{Error, comm::Spmd};
    /// let error = Spmd::new(3).run(|rank| {
    ///     if rank.rank() == 2 {
    ///         return Err(Error::other("no data"));
    ///     }
    ///     rank.world().barrier() // given up when rank 2 fails
    /// });
    /// assert_eq!(error.unwrap_err().to_string(), "rank 2: no data");
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Rank`] with the first failure (a returned error or a panic), or with [`Failure::Stuck`] if a
    /// rank failed the world itself and then did not end. Refuses a world of no ranks, of more than 65,536, or of more than the system has threads for, a name
    /// that no thread can have, a panic in a function of [`Spmd::on`] or [`Spmd::on_slow`], and over NCCL two ranks on
    /// one GPU.
    pub fn run<T, F>(self, f: F) -> Result<Vec<T>>
    where
        T: Send + 'static,
        F: Fn(Rank) -> Result<T> + Send + Sync + 'static,
    {
        Ok(self.start(program_of(f))?.results()?.into_iter().map(result_of).collect())
    }

    /// Like [`Spmd::run`], but returns each rank's own outcome in rank order: its result or its failure.
    ///
    /// ```
    /// use isoshard::{Failure, comm::Spmd};
    /// let ends = Spmd::new(2).run_each(|rank| Ok("12x".get(..2 + rank.rank()).unwrap().parse::<u32>()?))?;
    /// assert_eq!(ends[0], Ok(12));
    /// assert!(matches!(&ends[1], Err(Failure::Error(e)) if e.to_string() == "invalid digit found in string"));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses the same worlds as [`Spmd::run`]. The failure of a rank is not an error here.
    pub fn run_each<T, F>(self, f: F) -> Result<Vec<Result<T, Failure>>>
    where
        T: Send + 'static,
        F: Fn(Rank) -> Result<T> + Send + Sync + 'static,
    {
        let ends = self.start(program_of(f))?.ends();
        Ok(ends.into_iter().map(|end| end.map(result_of)).collect())
    }

    /// Refuses a world of no ranks or of too many, and a name that no thread can have.
    pub(super) fn check(&self) -> Result<()> {
        if self.world == 0 {
            return Err(Error::invalid("spmd", "a world has at least one rank", "0 ranks", ""));
        }
        if self.world > MOST_RANKS {
            let given = format!("{} ranks", self.world);
            let remedy = format!("use at most {MOST_RANKS}, or DryRun");
            return Err(Error::invalid("spmd", "a process has fewer threads", given, remedy));
        }
        check_room(self.world, STACK_BYTES)?;
        if self.threads_per_rank == Some(0) {
            let rule = "a rank computes on one thread or more";
            return Err(Error::invalid("spmd", rule, "0 threads per rank", "give 1"));
        }
        if self.name.contains('\0') {
            let given = format!("{:?}", self.name);
            return Err(Error::invalid("spmd", "the name of a thread has no character NUL", given, ""));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::thread;

    use super::*;

    #[test]
    fn threads_are_named_and_joined() {
        struct DropCounter(Arc<Mutex<usize>>);
        impl Drop for DropCounter {
            fn drop(&mut self) {
                *self.0.lock().unwrap() += 1;
            }
        }
        thread_local!(static AT_END: std::cell::RefCell<Option<DropCounter>> = const { std::cell::RefCell::new(None) });
        let ends = Arc::new(Mutex::new(0));
        let shared = ends.clone();
        let names = Spmd::new(3).name("worker").run(move |_| {
            AT_END.with(|end| *end.borrow_mut() = Some(DropCounter(shared.clone())));
            Ok(thread::current().name().map(str::to_string))
        });
        assert_eq!(names.unwrap(), [0, 1, 2].map(|r| Some(format!("worker {r}"))));
        assert_eq!(*ends.lock().unwrap(), 3, "every thread is over, its thread locals dropped");
    }
}
