//! The state that a rank, its channels and its watchdog share.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use super::group::NcclGroup;
use super::{Nccl, Progress};
use crate::base::lock;
use crate::comm::transport::coordinated::{CallNumber, GroupMember, Membership, OpenGroups};
use crate::error::{Error, Result};
use crate::tensor::cuda::{Driver, Gpu, PoisonHandle, SideStream, StreamPoison};

/// A rank's side of a world with one GPU per rank.
#[derive(Debug)]
pub(super) struct NcclWorld {
    pub membership: Arc<Membership>,
    /// The number of the rank's device.
    pub device: usize,
    pub driver: Arc<dyn Driver>,
    pub nccl: Arc<dyn Nccl>,
    pub groups: OpenGroups<NcclGroup>,
    /// The error that reading a value returns once the world is given up.
    poisoned: OnceLock<Arc<StreamPoison>>,
    /// The streams that wait for transfers.
    streams: Mutex<Vec<PoisonHandle>>,
}

impl NcclWorld {
    pub fn new(
        membership: Arc<Membership>,
        device: usize,
        driver: Arc<dyn Driver>,
        nccl: Arc<dyn Nccl>,
    ) -> NcclWorld {
        let (groups, poisoned, streams) = (OpenGroups::default(), OnceLock::new(), Mutex::default());
        NcclWorld { membership, device, driver, nccl, groups, poisoned, streams }
    }

    /// Makes a group that is not connected yet.
    pub fn group(&self, ranks: &[usize], name: &str, has_no_comm: bool, side: SideStream) -> NcclGroup {
        NcclGroup::new(GroupMember::open(&self.membership, ranks, name), has_no_comm, side)
    }

    /// Waits until a group's communicator has put its work on the stream. After the deadline `late` gets the time waited,
    /// and returns the time for which to wait on, or the error.
    pub fn ready(
        &self,
        group: &NcclGroup,
        call: &CallNumber,
        late: impl Fn(Duration) -> Result<Duration>,
    ) -> Result<()> {
        const PAUSE: Duration = Duration::from_micros(100);
        let (began, mut patience) = (Instant::now(), self.membership.deadline);
        loop {
            match group.with(|comm| self.nccl.progress(comm)) {
                Some(Ok(Progress::Ready)) => return Ok(()),
                Some(Ok(Progress::Underway)) => {}
                Some(Err(e)) => return Err(group.state.broken(call, e)),
                None => return Err(group.state.given_up(call, call.name)),
            }
            if self.membership.is_given_up() {
                return Err(group.state.given_up(call, call.name));
            }
            let waited = began.elapsed();
            if waited >= patience {
                patience = waited.saturating_add(late(waited)?);
            }
            thread::sleep(PAUSE);
        }
    }

    /// Registers a thread's stream, to be poisoned if the world is given up.
    pub fn register_stream(&self, gpu: &Gpu) {
        let mut streams = lock(&self.streams);
        if !streams.iter().any(|s| s.is_of(gpu)) {
            streams.push(PoisonHandle::of(gpu));
        }
    }

    /// Makes reading a value return `error` from now on.
    pub fn poison(&self, error: Error) {
        let why =
            self.poisoned.get_or_init(|| Arc::new(StreamPoison { error, reported: AtomicBool::new(false) }));
        lock(&self.streams).iter().for_each(|stream| stream.poison(Some(why.clone())));
    }

    /// Returns the error that reading a value returns, which is set before transfers are aborted.
    pub fn poisoned(&self) -> Option<&StreamPoison> {
        self.poisoned.get().map(|poisoned| &**poisoned)
    }
}

impl Drop for NcclWorld {
    /// Threads that outlive this world may read the values that they computed.
    fn drop(&mut self) {
        lock(&self.streams).iter().for_each(|stream| stream.poison(None));
    }
}
