//! The engine: its start, its groups, and its end.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use super::Library;
use super::channel::NcclChannel;
use super::group::NcclGroup;
use super::watch::watch;
use super::world::NcclWorld;
use crate::base::lock;
use crate::comm::calls::BusyWork;
use crate::comm::coordinator::Client;
use crate::comm::transport::coordinated::{CoordinatedChannel, Membership, Watchdog};
use crate::comm::transport::{Channel, Engine};
use crate::error::{Error, Result};
use crate::tensor::Device;
use crate::tensor::cuda::{Gpu, SideStream};

/// A rank before it is connected.
#[derive(Debug)]
pub(in crate::comm) struct NcclSetup {
    pub rank: usize,
    pub world_len: usize,
    pub device: Device,
    pub deadline: Duration,
    pub client: Client,
}

/// One rank's end of a world with one GPU per rank.
#[derive(Debug)]
pub(in crate::comm) struct NcclEngine {
    world: Arc<NcclWorld>,
    /// Runs until neither the engine nor a channel holds it any more.
    watchdog: Arc<Watchdog>,
}

impl NcclEngine {
    /// Connects this rank, on its own thread, with all other ranks, which do the same.
    ///
    /// # Errors
    /// Refuses a device that is no CUDA device. Returns an error if a rank does not arrive within the deadline, which
    /// it names, or if the library fails.
    pub fn connect(setup: NcclSetup, library: &Library) -> Result<NcclEngine> {
        let NcclSetup { rank, world_len, device, deadline, client } = setup;
        let membership = Membership::new(rank, world_len, deadline, library.compared, client);
        let (device, side) = gpu(rank, device).map_err(|e| membership.refuse(e))?;
        let (membership, driver) = (Arc::new(membership), side.driver().clone());
        let world = Arc::new(NcclWorld::new(membership.clone(), device, driver, library.nccl.clone()));
        let watched = world.clone();
        let watchdog = Arc::new(Watchdog::start("nccl", &membership, move || watch(&watched))?);
        let everyone = membership.everyone();
        // A world of one rank has a communicator too, so that a single GPU can test the library.
        let group = world.group(&everyone, "world", false, side);
        world.join(&group).map_err(|e| membership.refuse(e))?;
        world.groups.keep(&everyone, "world", group);
        Ok(NcclEngine { world, watchdog })
    }

    /// Gives up the world because this rank's program failed. The watchdog aborts the transfers in flight.
    pub fn fail(&self, cause: String) {
        self.world.membership.fail(cause);
    }

    /// Does the same as [`NcclEngine::fail`] for a process that ends next: returns when the other ranks will be told.
    pub fn fail_for_good(&self, cause: String) {
        self.fail(cause);
        self.watchdog.stop();
        self.world.membership.hang_up();
    }

    /// Returns the time for which the end of the remaining ranks is waited for, after a wait of `waited`, if they are
    /// threads of this process.
    pub fn time_left_to_end(&self, waited: Duration) -> Option<Duration> {
        self.world.membership.time_left_to_end(waited)
    }

    fn open_by(
        &self,
        ranks: &[usize],
        name: &str,
        has_no_comm: bool,
        connect: impl FnOnce(&NcclWorld, &NcclGroup) -> Result<()>,
    ) -> Result<Arc<dyn Channel>> {
        let world = self.world.clone();
        let group = match world.groups.find(ranks, name) {
            Some(group) => group,
            None => {
                let group = world.group(ranks, name, has_no_comm, SideStream::new(&Gpu::get(world.device)?)?);
                world.membership.give(connect(&world, &group))?;
                world.groups.keep(ranks, name, group)
            }
        };
        let transport = NcclChannel { world, group, _watchdog: self.watchdog.clone() };
        Ok(Arc::new(CoordinatedChannel(transport)))
    }
}

impl Engine for NcclEngine {
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
        // A single rank needs no communicator.
        let is_alone = ranks.len() == 1;
        self.open_by(ranks, name, is_alone, |world, group| if is_alone { Ok(()) } else { world.join(group) })
    }

    fn split(&self, part: &[usize], color: usize, name: &str) -> Result<Arc<dyn Channel>> {
        let has_no_comm = part.len() == 1 && self.world.membership.world_len > 1;
        self.open_by(part, name, has_no_comm, |world, group| {
            let whole = world.groups.find(&world.membership.everyone(), "world");
            let whole = whole.expect("opened when the rank connected");
            world.split(group, &whole, color)
        })
    }

    fn announce(&self, work: Option<BusyWork>) {
        self.world.membership.announce(work);
    }

    fn end(&self) -> Result<()> {
        let drained = self.world.drain();
        if drained.is_ok() {
            self.world.membership.leave();
        }
        self.watchdog.stop();
        drained
    }

    fn abort(&self, cause: &Error) {
        self.fail(cause.to_string());
    }
}

/// Returns the number of a rank's device, and a new stream on it.
fn gpu(rank: usize, device: Device) -> Result<(usize, SideStream)> {
    match device {
        Device::Cuda(index) => Ok((index, SideStream::new(&Gpu::get(index)?)?)),
        Device::Cpu | Device::Meta => Err(Error::invalid(
            "nccl",
            "NCCL moves tensors on GPUs only",
            format!("rank {rank} on {device}"),
            "give each rank a GPU of its own",
        )),
    }
}

impl NcclWorld {
    /// Waits until all transfers in flight are done.
    ///
    /// # Errors
    /// Returns the first fault, unless the program has received it already, from a call or from reading a value.
    fn drain(&self) -> Result<()> {
        const PAUSE: Duration = Duration::from_millis(1);
        loop {
            if self.membership.is_given_up() {
                let read = self.poisoned().is_some_and(|poisoned| poisoned.reported.load(Ordering::Relaxed));
                return if read { Ok(()) } else { self.membership.check_at_end() };
            }
            if self.groups.all().iter().all(|group| lock(&group.in_flight).is_empty()) {
                return Ok(());
            }
            thread::sleep(PAUSE);
        }
    }
}
