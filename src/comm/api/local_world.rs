//! A world whose ranks are threads of this process, over shared memory or NCCL.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::rank::Rank;
use crate::base::lock;
use crate::comm::coordinator::{Client, Message};
use crate::comm::diagnostics::flight::SlowRank;
use crate::comm::diagnostics::{FlightSettings, WorldRecorders};
use crate::comm::transport::Engine;
use crate::comm::transport::nccl::{Library, NcclEngine, NcclSetup};
use crate::comm::transport::threads::{ThreadEngine, ThreadWorld};
use crate::error::{CommFault, Error, Result};
use crate::tensor::Device;

/// The time that ranks over NCCL may take beyond the deadline to agree on the first fault and to end their connections.
const SETTLING: Duration = Duration::from_secs(3);

/// The ranks of a world that are threads of this process.
pub(super) struct LocalWorld {
    devices: Vec<Device>,
    engines: LocalEngines,
    deadline: Duration,
    recorders: Arc<WorldRecorders>,
    /// The time at which the last program ended or failed.
    last_end: Mutex<Instant>,
}

enum LocalEngines {
    /// The ranks share memory.
    Threads(Arc<ThreadWorld>),
    /// The ranks have one GPU each.
    Nccl { library: Library, ranks: Mutex<Vec<RankStage>> },
}

/// A rank's progress in its program.
enum RankStage {
    Waiting(Client),
    Running(Arc<NcclEngine>),
    Ended,
}

impl LocalWorld {
    /// Makes `world_len` ranks, each on its device.
    ///
    /// # Errors
    /// Refuses two ranks on one GPU over NCCL.
    pub fn new(
        world_len: usize,
        deadline: Duration,
        device: &dyn Fn(usize) -> Device,
        library: Option<&Library>,
        flights: &FlightSettings,
    ) -> Result<LocalWorld> {
        let devices: Vec<Device> = (0..world_len).map(device).collect();
        let recorders = WorldRecorders::new(world_len, flights);
        let engines = match library {
            None => LocalEngines::Threads(Arc::new(ThreadWorld::recorded(deadline, recorders.clone()))),
            Some(library) => {
                one_each(&devices)?;
                let ranks =
                    Client::of_threads(world_len, deadline).into_iter().map(RankStage::Waiting).collect();
                LocalEngines::Nccl { library: library.clone(), ranks: Mutex::new(ranks) }
            }
        };
        Ok(LocalWorld { devices, engines, deadline, recorders, last_end: Mutex::new(Instant::now()) })
    }

    /// Makes the handle of a rank, on the rank's thread.
    pub fn rank(&self, rank: usize) -> Result<Rank> {
        let device = self.devices[rank];
        let engine: Arc<dyn Engine> = match &self.engines {
            LocalEngines::Threads(world) => Arc::new(ThreadEngine::new(world.clone(), rank)),
            LocalEngines::Nccl { library, ranks } => {
                let RankStage::Waiting(client) = std::mem::replace(&mut lock(ranks)[rank], RankStage::Ended)
                else {
                    unreachable!("a rank begins once")
                };
                let world_len = self.devices.len();
                let setup = NcclSetup { rank, world_len, device, deadline: self.deadline, client };
                let engine = Arc::new(NcclEngine::connect(setup, library)?);
                lock(ranks)[rank] = RankStage::Running(engine.clone());
                engine
            }
        };
        Ok(Rank::recorded(engine, self.recorders.recorder(rank).clone())?.on(device))
    }

    /// Handles the end of a rank's program.
    pub fn end(&self, rank: usize) -> Result<()> {
        *lock(&self.last_end) = Instant::now();
        match &self.engines {
            LocalEngines::Threads(world) => world.end(rank),
            LocalEngines::Nccl { ranks, .. } => {
                let stage = std::mem::replace(&mut lock(ranks)[rank], RankStage::Ended);
                if let RankStage::Running(engine) = stage {
                    engine.end()?;
                }
            }
        }
        Ok(())
    }

    /// Handles the failure of a rank's program; an echo is a failure that only follows from another rank's.
    pub fn fail(&self, rank: usize, cause: String, is_echo: bool) {
        *lock(&self.last_end) = Instant::now();
        self.recorders.recorder(rank).write(&cause, is_echo);
        match &self.engines {
            LocalEngines::Threads(world) => world.fail(rank, cause),
            LocalEngines::Nccl { ranks, .. } => {
                let stage = std::mem::replace(&mut lock(ranks)[rank], RankStage::Ended);
                match stage {
                    RankStage::Waiting(client) => client.tell(Message::Failed { cause }),
                    RankStage::Running(engine) => engine.fail(cause),
                    // The rank has reported its end itself.
                    RankStage::Ended => {}
                }
            }
        }
    }
}

impl LocalWorld {
    /// Returns the ranks whose wait has become longer than `patience` since the last call.
    pub fn slow(&self, patience: Duration) -> Vec<SlowRank> {
        self.recorders.slow(patience, self.deadline)
    }

    /// Returns the sender of a message that was not received, and the fault, once all ranks have ended. Over NCCL, the ranks
    /// have it from the coordinator.
    pub fn unreceived(&self) -> Option<(usize, CommFault)> {
        match &self.engines {
            LocalEngines::Threads(world) => world.unreceived(),
            LocalEngines::Nccl { .. } => None,
        }
    }

    /// Returns true if the other ranks have continued without this one.
    pub fn is_left(&self, rank: usize) -> bool {
        match &self.engines {
            LocalEngines::Threads(world) => world.is_left(rank),
            LocalEngines::Nccl { .. } => false,
        }
    }

    /// Returns the time for which the end of the remaining ranks is waited for after a failure, after a wait of
    /// `waited`. A program that has ended also counts, since its thread takes some time to report that.
    pub fn time_left(&self, waited: Duration) -> Duration {
        let since_end = lock(&self.last_end).elapsed();
        let running = match &self.engines {
            LocalEngines::Threads(world) => world.time_left(waited),
            LocalEngines::Nccl { ranks, .. } => {
                let time = |stage: &RankStage| match stage {
                    RankStage::Running(engine) => engine.time_left_to_end(waited),
                    RankStage::Waiting(_) | RankStage::Ended => None,
                };
                lock(ranks).iter().find_map(time).unwrap_or_else(|| self.deadline.saturating_sub(waited))
            }
        };
        running.max(self.deadline.saturating_sub(since_end))
    }

    /// Returns the time that ranks may take to settle, once no time is left.
    pub fn settling(&self) -> Duration {
        match &self.engines {
            LocalEngines::Threads(_) => Duration::ZERO,
            LocalEngines::Nccl { .. } => SETTLING,
        }
    }

    /// Writes the flight records of ranks that did not fail themselves.
    pub fn write_records(&self) {
        self.recorders.write("");
    }
}

fn one_each(devices: &[Device]) -> Result<()> {
    let mut first = HashMap::new();
    for (rank, &device) in devices.iter().enumerate() {
        if let Some(other) = first.insert(device, rank)
            && device.is_cuda()
        {
            return Err(Error::invalid(
                "nccl",
                "NCCL takes one rank per GPU",
                format!("ranks {other} and {rank} on {device}"),
                "share a GPU among ranks that are threads without NCCL, or start as many ranks as there are GPUs",
            ));
        }
    }
    Ok(())
}
