//! The dry run: one rank of a world of any size, without peers and without data.
//!
//! A program runs as this rank would run it. Its tensors lie on [`Device::Meta`]: they have shapes, and no elements.
//! Collectives complete at once with tensors of the shapes that are due; what they would send and receive is counted, and
//! timed by a [`Network`]. So is what the rank's tensors would take.
//!
//! ```
//! use isoshard::comm::DryRun;
//! use isoshard::dtensor::{DTensor, DeviceMesh};
//! use isoshard::tensor::DType;
//! let dry = DryRun::new(16_384, 5)?;
//! let mesh = DeviceMesh::parse(&dry.rank()?, "dp=64,fsdp=32,tp=8")?;
//! let w = DTensor::zeros(&mesh, DType::BF16, [65_536, 65_536], "(R, S0, S1)".parse()?)?;
//! let whole = w.redistribute("(R, R, S1)".parse()?)?;
//! assert_eq!(whole.local().shape()[..], [65_536, 8_192]);
//! let report = dry.report();
//! assert_eq!(report.total().received_bytes, 31 << 25); // 31 times 32 MiB
//! assert_eq!(report.peak_bytes, 2 * (32 << 25)); // what came, and what it was put together to
//! # Ok::<(), isoshard::Error>(())
//! ```
//!
//! Missing: the time that kernels take, and what overlaps with what.

use std::fmt;
use std::sync::Arc;

use super::rank::Rank;
use super::tally::{Tally, Total, Traffic};
use crate::comm::network::Network;
use crate::comm::transport::{DryEngine, Engine};
use crate::error::{Error, Result};
use crate::tensor::{Device, meta};

/// A dry run of one rank.
///
/// One at a time on a thread: memory is counted for the thread that makes the tensors.
#[derive(Clone, Debug)]
pub struct DryRun {
    engine: Arc<dyn Engine>,
    network: Network,
    tally: Tally,
}

/// What a dry run has counted so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DryReport {
    /// The rank.
    pub rank: usize,
    /// The number of ranks in the world.
    pub world_len: usize,
    /// Calls, bytes and modelled time, by group and collective, in the order of first calls.
    pub rows: Vec<Traffic>,
    /// Bytes of this rank's tensors now.
    pub live_bytes: usize,
    /// The most there were at one time since the run was made. Views and clones count once; what kernels need for themselves
    /// does not count.
    pub peak_bytes: usize,
}

impl DryRun {
    /// Rank `rank` of `world_len`, over the default network. Counts the thread's peak of memory from here.
    ///
    /// # Errors
    /// Refuses a rank that is not in the world.
    pub fn new(world_len: usize, rank: usize) -> Result<DryRun> {
        DryRun::with_network(world_len, rank, Network::default())
    }

    /// As [`DryRun::new`], over this network: it gives calls their times, and plans their choices.
    ///
    /// # Errors
    /// As [`DryRun::new`].
    pub fn with_network(world_len: usize, rank: usize, network: Network) -> Result<DryRun> {
        if rank >= world_len {
            return Err(Error::invalid(
                "dry_run",
                "no such rank",
                format!("rank {rank} of {world_len}"),
                "number ranks from 0",
            ));
        }
        meta::reset_memory_peak();
        let (engine, tally) = Tally::wrap(Arc::new(DryEngine { rank, world_len }), network.clone());
        Ok(DryRun { engine, network, tally })
    }

    /// The rank: what a program is given.
    ///
    /// # Errors
    /// None today.
    pub fn rank(&self) -> Result<Rank> {
        Ok(Rank::new(self.engine.clone())?.on(Device::Meta).with_network(self.network.clone()))
    }

    /// What was counted so far.
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
    /// All calls together.
    pub fn total(&self) -> Total {
        self.rows.iter().map(|row| row.total).sum()
    }

    /// All calls of a collective, e.g. `all_gather`.
    pub fn of_call(&self, call: &str) -> Total {
        self.rows.iter().filter(|row| row.call == call).map(|row| row.total).sum()
    }
}

/// A table: one line a group and collective, then the sums.
impl fmt::Display for DryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "rank {} of {}", self.rank, self.world_len)?;
        let line = |f: &mut fmt::Formatter<'_>, call: &str, group: &str, t: Total| {
            let (calls, sent, received, time) = (t.calls, t.sent_bytes, t.received_bytes, t.time.to_string());
            writeln!(f, "{call:<16}{calls:>8}{sent:>18}{received:>18}{time:>16}  {group}")
        };
        writeln!(
            f,
            "{:<16}{:>8}{:>18}{:>18}{:>16}  group",
            "call", "calls", "sent bytes", "received bytes", "time"
        )?;
        for row in &self.rows {
            line(f, row.call, &row.group, row.total)?;
        }
        line(f, "all", "", self.total())?;
        writeln!(f, "tensors: {} bytes, at most {} bytes", self.live_bytes, self.peak_bytes)
    }
}
