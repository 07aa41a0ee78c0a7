//! The ranks of one process, over one engine or another.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::rank::Rank;
use crate::comm::coordinator::{Client, Message};
use crate::comm::diagnostics::flight::SlowRank;
use crate::comm::diagnostics::{FlightSettings, Roster};
use crate::comm::transport::Engine;
use crate::comm::transport::nccl::{Library, NcclEngine, Seat};
use crate::comm::transport::threads::{ThreadEngine, ThreadWorld};
use crate::error::{Error, Result};
use crate::tensor::Device;

/// The ranks that are threads of this process.
pub(super) struct LocalWorld {
    devices: Vec<Device>,
    way: Way,
    deadline: Duration,
    roster: Arc<Roster>,
}

enum Way {
    /// They share memory.
    Threads(Arc<ThreadWorld>),
    /// They have a GPU each.
    Nccl { library: Library, ranks: Mutex<Vec<Place>> },
}

/// How far a rank is.
enum Place {
    Waits(Client),
    Runs(Arc<NcclEngine>),
    Over,
}

impl LocalWorld {
    /// `world_len` ranks, each on its device.
    ///
    /// # Errors
    /// Refuses two ranks on one GPU where these talk by NCCL.
    pub fn new(
        world_len: usize,
        deadline: Duration,
        device: &dyn Fn(usize) -> Device,
        library: Option<&Library>,
        flights: &FlightSettings,
    ) -> Result<LocalWorld> {
        let devices: Vec<Device> = (0..world_len).map(device).collect();
        let roster = Roster::new(world_len, flights);
        let way = match library {
            None => Way::Threads(Arc::new(ThreadWorld::recorded(deadline, roster.clone()))),
            Some(library) => {
                one_each(&devices)?;
                let ranks = Client::of_threads(world_len, deadline).into_iter().map(Place::Waits).collect();
                Way::Nccl { library: library.clone(), ranks: Mutex::new(ranks) }
            }
        };
        Ok(LocalWorld { devices, way, deadline, roster })
    }

    /// The rank, on its own thread.
    pub fn rank(&self, rank: usize) -> Result<Rank> {
        let device = self.devices[rank];
        let engine: Arc<dyn Engine> = match &self.way {
            Way::Threads(world) => Arc::new(ThreadEngine::new(world.clone(), rank)),
            Way::Nccl { library, ranks } => {
                let Place::Waits(client) = std::mem::replace(&mut lock(ranks)[rank], Place::Over) else {
                    unreachable!("a rank begins once")
                };
                let world_len = self.devices.len();
                let seat = Seat { rank, world_len, device, deadline: self.deadline, client };
                let engine = Arc::new(NcclEngine::connect(seat, library)?);
                lock(ranks)[rank] = Place::Runs(engine.clone());
                engine
            }
        };
        Ok(Rank::recorded(engine, self.roster.recorder(rank).clone())?.on(device))
    }

    /// The rank's program is over.
    pub fn end(&self, rank: usize) -> Result<()> {
        match &self.way {
            Way::Threads(world) => world.end(rank),
            Way::Nccl { ranks, .. } => {
                let place = std::mem::replace(&mut lock(ranks)[rank], Place::Over);
                if let Place::Runs(engine) = place {
                    engine.end()?;
                }
            }
        }
        Ok(())
    }

    /// The rank's program failed; an echo follows from another rank's failure.
    pub fn fail(&self, rank: usize, cause: String, is_echo: bool) {
        self.roster.recorder(rank).write(&cause, is_echo);
        match &self.way {
            Way::Threads(world) => world.fail(rank, cause),
            Way::Nccl { ranks, .. } => {
                let place = std::mem::replace(&mut lock(ranks)[rank], Place::Over);
                match place {
                    Place::Waits(client) => client.tell(Message::Failed { cause }),
                    Place::Runs(engine) => engine.fail(cause),
                    // It has said so itself.
                    Place::Over => {}
                }
            }
        }
    }
}

impl LocalWorld {
    /// Ranks that have waited longer than `patience` since the last look.
    pub fn slow(&self, patience: Duration) -> Vec<SlowRank> {
        self.roster.slow(patience, self.deadline)
    }

    /// True where the others have gone on without the rank.
    pub fn is_left(&self, rank: usize) -> bool {
        match &self.way {
            Way::Threads(world) => world.is_left(rank),
            Way::Nccl { .. } => false,
        }
    }

    /// Writes the records of ranks that did not fail themselves.
    pub fn write_records(&self) {
        self.roster.write("");
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
                "NCCL takes one rank a GPU",
                format!("ranks {other} and {rank} on {device}"),
                "share a GPU among ranks that are threads without NCCL, or start as many ranks as there are GPUs",
            ));
        }
    }
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
