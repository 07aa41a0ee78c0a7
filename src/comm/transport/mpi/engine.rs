//! The engine: its start, its groups, and its end.

use std::sync::Arc;
use std::time::Duration;

use super::Mpi;
use super::channel::MpiChannel;
use super::watch::watch;
use super::world::MpiWorld;
use crate::comm::calls::BusyWork;
use crate::comm::coordinator::Client;
use crate::comm::transport::coordinated::{CoordinatedChannel, Membership, Watchdog};
use crate::comm::transport::{Channel, Engine};
use crate::error::{Error, Result};

/// A rank that has connected to the coordinator.
#[derive(Debug)]
pub(in crate::comm) struct MpiSetup {
    pub mpi: Mpi,
    pub client: Client,
    pub deadline: Duration,
    /// True if members send the signature of each call to the coordinator.
    pub compared: bool,
    /// True if this machine has more ranks than cores.
    pub crowded: bool,
}

/// One rank's end of a world of MPI processes.
#[derive(Debug)]
pub(in crate::comm) struct MpiEngine {
    world: Arc<MpiWorld>,
    watchdog: Watchdog,
}

impl MpiEngine {
    /// Starts this rank's engine.
    ///
    /// # Errors
    /// Returns an error if the system has no thread left.
    pub fn begin(setup: MpiSetup) -> Result<MpiEngine> {
        let MpiSetup { mpi, client, deadline, compared, crowded } = setup;
        let membership = Membership::new(mpi.rank, mpi.world_len, deadline, compared, client);
        let membership = Arc::new(membership.collecting());
        let world = Arc::new(MpiWorld::new(membership.clone(), mpi, crowded));
        let watched = world.clone();
        let watchdog = Watchdog::start("mpi", &membership, move || watch(&watched))?;
        Ok(MpiEngine { world, watchdog })
    }

    /// Gives up the world because this rank's program failed.
    pub fn fail(&self, cause: String) {
        self.world.membership.fail(cause);
    }

    /// Does the same as [`MpiEngine::fail`] for a process that ends next: returns when the other ranks will be told.
    pub fn fail_for_good(&self, cause: String) {
        self.fail(cause);
        self.watchdog.stop();
        self.world.membership.hang_up();
    }
}

impl Engine for MpiEngine {
    fn rank(&self) -> usize {
        self.world.membership.rank
    }

    fn world_len(&self) -> usize {
        self.world.membership.world_len
    }

    fn deadline(&self) -> Duration {
        self.world.membership.deadline
    }

    fn open(&self, ranks: &[usize], name: &str) -> Result<Arc<dyn Channel>> {
        let group = self.world.membership.give(self.world.group(ranks, name))?;
        Ok(Arc::new(CoordinatedChannel(MpiChannel { world: self.world.clone(), group })))
    }

    fn announce(&self, work: Option<BusyWork>) {
        self.world.membership.announce(work);
    }

    /// Waits, without a deadline, until every rank's program has ended, because MPI ends on all ranks together.
    fn end(&self) -> Result<()> {
        let membership = &self.world.membership;
        membership.leave_together();
        self.watchdog.stop();
        if membership.is_given_up() { membership.check_at_end() } else { self.world.close() }
    }

    fn abort(&self, cause: &Error) {
        self.fail(cause.to_string());
    }
}
