//! The dry run.

use std::fmt;
use std::sync::Arc;

use super::rank::Rank;
use super::tally::{Tally, Total, Traffic, write_table};
use super::timeline::{DryTime, Timeline};
use crate::comm::machine::Machine;
use crate::comm::network::Network;
use crate::comm::transport::{DryEngine, Engine};
use crate::error::{Error, Result};
use crate::tensor::{Device, meta};

/// The most ranks of a dry run's world.
const MOST_RANKS: usize = 1 << 24;

/// Runs one rank of a world of any size without peers and without data, to count its calls, bytes and memory.
///
/// The program runs as this rank would run it. Its tensors are on [`Device::Meta`]: they have shapes and no elements.
/// Collectives complete at once with tensors of the right shapes; the bytes they would send and receive are counted
/// and timed by a [`Network`], and so is the memory of the rank's tensors.
///
/// ```
/// use isoshard::comm::DryRun;
/// use isoshard::dtensor::{DTensor, DeviceMesh};
/// use isoshard::tensor::DType;
/// let dry = DryRun::new(16_384, 5)?;
/// let mesh = DeviceMesh::parse(&dry.rank()?, "dp=64,fsdp=32,tp=8")?;
/// let w = DTensor::zeros(&mesh, DType::BF16, [65_536, 65_536], "(R, S0, S1)")?;
/// let whole = w.redistribute("(R, R, S1)")?;
/// assert_eq!(whole.local().shape()[..], [65_536, 8_192]);
/// let report = dry.report();
/// assert_eq!(report.total().received_bytes, 31 << 25); // 31 times 32 MiB
/// assert_eq!(report.peak_bytes, 2 * (32 << 25)); // the gathered parts and the tensor made from them
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// A thread runs one dry run at a time, because memory is counted per thread.
///
/// [`DryRun::time`] models the time of the rank: operators by the [`Machine`], collectives by the network, beside the
/// operators from their start to the wait for them.
///
/// Missing: the time of copies before and after a collective, and of launches.
#[derive(Clone, Debug)]
pub struct DryRun {
    engine: Arc<dyn Engine>,
    network: Network,
    machine: Machine,
    tally: Tally,
    timeline: Timeline,
}

/// The counts of a dry run so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DryReport {
    /// The rank.
    pub rank: usize,
    /// The number of ranks in the world.
    pub world_len: usize,
    /// Calls, bytes and modelled time, by group and collective, in the order of first calls.
    pub rows: Vec<Traffic>,
    /// Bytes of this rank's live tensors.
    pub live_bytes: usize,
    /// The peak of those bytes since the dry run was made. Views and clones count once; scratch memory of kernels
    /// does not count.
    pub peak_bytes: usize,
}

impl DryRun {
    /// Makes rank `rank` of `world_len` over the default network, and starts to count this thread's peak of memory.
    ///
    /// ```
    /// use isoshard::comm::DryRun;
    /// use isoshard::tensor::{DType, ReduceOp, Tensor};
    /// let dry = DryRun::new(1_000, 0)?;
    /// let x = Tensor::zeros_on(dry.rank()?.device(), DType::F32, [1 << 20])?;
    /// dry.rank()?.world().all_reduce(&x, ReduceOp::Sum)?;
    /// assert_eq!(dry.report().total().calls, 2); // a reduce-scatter and an all-gather
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a rank outside the world, and more than 2^24 ranks.
    pub fn new(world_len: usize, rank: usize) -> Result<DryRun> {
        DryRun::with_network(world_len, rank, Network::default())
    }

    /// Like [`DryRun::new`], over a given network: it determines the modelled times and the choices of plans.
    ///
    /// ```
    /// use isoshard::comm::{DryRun, Network};
    /// let dry = DryRun::with_network(64, 63, Network::uniform(1e-6, 50e9)?)?;
    /// dry.rank()?.world().barrier()?;
    /// assert_eq!(dry.report().total().time.seconds(), 1e-6);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Same as [`DryRun::new`].
    pub fn with_network(world_len: usize, rank: usize, network: Network) -> Result<DryRun> {
        if world_len > MOST_RANKS {
            let given = format!("{world_len} ranks");
            let rule = "the groups of a dry run list their ranks";
            return Err(Error::invalid("dry_run", rule, given, format!("count at most {MOST_RANKS}")));
        }
        if rank >= world_len {
            return Err(Error::invalid(
                "dry_run",
                "no such rank",
                format!("rank {rank} of {world_len}"),
                "number ranks from 0",
            ));
        }
        meta::reset_memory_peak();
        let timeline = Timeline::default();
        let engine = Arc::new(DryEngine { rank, world_len });
        let (engine, tally) = Tally::timed(engine, network.clone(), Some(timeline.clone()));
        Ok(DryRun { engine, network, machine: Machine::default(), tally, timeline })
    }

    /// Sets the model of the rank's processor, which determines the choices of plans.
    ///
    /// ```
    /// use isoshard::comm::{DryRun, Machine};
    /// let gpu = Machine { half_flops_per_s: 1e15, bytes_per_s: 3e12, ..Machine::default() };
    /// assert_eq!(*DryRun::new(8, 0)?.with_machine(gpu.clone())?.rank()?.machine(), gpu);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses rates that are not positive numbers.
    pub fn with_machine(mut self, machine: Machine) -> Result<DryRun> {
        self.machine = machine.checked()?;
        Ok(self)
    }

    /// Returns the rank, to be passed to a program.
    ///
    /// ```
    /// let rank = isoshard::comm::DryRun::new(64, 7)?.rank()?;
    /// assert_eq!((rank.rank(), rank.world_len()), (7, 64));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Never fails today.
    pub fn rank(&self) -> Result<Rank> {
        let rank = Rank::new(self.engine.clone())?.on(Device::Meta).with_network(self.network.clone());
        Ok(rank.with_common_machine(self.machine.clone()).with_timeline(self.timeline.clone()))
    }

    /// Returns the modelled time so far, by module and phase.
    ///
    /// Operators take their [`Machine::time`] one after another. A collective takes the time of its bytes on the slowest
    /// level of links that its group needs, beside operators, and after the earlier collectives on these links.
    ///
    /// ```
    /// use isoshard::{comm::{DryRun, Machine, Network}, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// let machine = Machine { f32_flops_per_s: 1e9, bytes_per_s: 1e12, ..Machine::default() };
    /// let dry = DryRun::with_network(2, 0, Network::uniform(0.0, 1e6)?)?.with_machine(machine)?;
    /// let mesh = DeviceMesh::parse(&dry.rank()?, "fsdp=2")?;
    /// let w = DTensor::zeros(&mesh, DType::F32, [1000, 1000], "(S0)")?;
    /// let gathered = w.redistribute_async("(R)")?; // 2 MB, in 2 seconds
    /// let x = DTensor::zeros(&mesh, DType::F32, [500, 1000], "(R)")?;
    /// x.matmul(&x.permute(&[1, 0])?)?; // 0.5 G operations, in half a second
    /// gathered.wait()?;
    /// let time = dry.time();
    /// let seconds = [time.total, time.modules[0].communicating, time.modules[0].waiting].map(|t| t.seconds());
    /// assert_eq!(seconds, [2.0, 2.0, 1.5]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn time(&self) -> DryTime {
        self.timeline.times()
    }

    /// Returns the counts so far.
    ///
    /// ```
    /// let report = isoshard::comm::DryRun::new(8, 0)?.report();
    /// assert_eq!((report.total().calls, report.world_len), (0, 8));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn report(&self) -> DryReport {
        let memory = meta::memory_stats();
        DryReport {
            rank: self.engine.rank(),
            world_len: self.engine.world_len(),
            rows: self.tally.rows(),
            live_bytes: memory.live_bytes,
            peak_bytes: memory.peak_live_bytes,
        }
    }
}

impl DryReport {
    /// Returns the sum over all calls.
    ///
    /// ```
    /// let dry = isoshard::comm::DryRun::new(8, 0)?;
    /// (0..3).try_for_each(|_| dry.rank()?.world().barrier())?;
    /// assert_eq!(dry.report().total().calls, 3);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn total(&self) -> Total {
        self.rows.iter().map(|row| row.total).sum()
    }

    /// Returns the sum over all calls of one collective, e.g. `all_gather`.
    ///
    /// ```
    /// let dry = isoshard::comm::DryRun::new(8, 0)?;
    /// dry.rank()?.world().barrier()?;
    /// assert_eq!((dry.report().of_call("barrier").calls, dry.report().of_call("send").calls), (1, 0));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn of_call(&self, call: &str) -> Total {
        self.rows.iter().filter(|row| row.call == call).map(|row| row.total).sum()
    }
}

/// Writes a table: one line per group and collective, then the sums.
impl fmt::Display for DryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "rank {} of {}", self.rank, self.world_len)?;
        write_table(f, &self.rows, self.total())?;
        writeln!(f, "tensors: {} bytes, at most {} bytes", self.live_bytes, self.peak_bytes)
    }
}
