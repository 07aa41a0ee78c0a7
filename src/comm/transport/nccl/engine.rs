//! The engine: connecting groups, and giving up.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::channel::NcclChannel;
use super::line::{Line, lock};
use super::watch;
use super::{Communicator, Library, Nccl, NcclResult, Progress};
use crate::comm::calls::label;
use crate::comm::coordinator::{Client, FirstFault, Message};
use crate::comm::{Channel, Engine};
use crate::error::{CallId, CommFault, Error, Result};
use crate::tensor::Device;
use crate::tensor::cuda::{Driver, Gpu, Side, Spoiler, Spoilt};

/// How long the coordinator has to answer what is urgent.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// Where a rank sits.
#[derive(Debug)]
pub(in crate::comm) struct Seat {
    pub rank: usize,
    pub world_len: usize,
    pub device: Device,
    pub deadline: Duration,
    pub client: Client,
}

/// One rank's end of a world with one GPU a rank.
#[derive(Debug)]
pub(in crate::comm) struct NcclEngine(Arc<Life>);

/// What the rank and its watch share, and the watch, which goes on until nobody holds this any more.
#[derive(Debug)]
pub(super) struct Life {
    pub shared: Arc<Shared>,
    watch: Mutex<Option<JoinHandle<()>>>,
}

/// What the rank and its watch share.
#[derive(Debug)]
pub(super) struct Shared {
    pub rank: usize,
    pub world_len: usize,
    /// The number of the rank's device.
    pub device: usize,
    pub deadline: Duration,
    pub client: Client,
    pub nccl: Arc<dyn Nccl>,
    pub compared: bool,
    pub driver: Arc<dyn Driver>,
    pub lines: Mutex<HashMap<String, Arc<Line>>>,
    /// Why the world was given up, once it is.
    pub first_fault: OnceLock<FirstFault>,
    /// True once this rank's program has been given the first_fault.
    pub told: AtomicBool,
    /// What reading a value gives after it.
    pub spoilt: OnceLock<Arc<Spoilt>>,
    /// The streams that wait for transfers.
    pub streams: Mutex<Vec<Spoiler>>,
    pub over: AtomicBool,
}

impl NcclEngine {
    /// Connects this rank, on its own thread, with all others, who do the same.
    ///
    /// # Errors
    /// Refuses a device that is none of CUDA's; names who has not come within the deadline; what the library says.
    pub fn connect(seat: Seat, library: &Library) -> Result<NcclEngine> {
        let (shared, side) = Shared::new(seat, library)?;
        let watched = shared.clone();
        let watch = thread::Builder::new().name(format!("watch of rank {}", shared.rank));
        let watch = watch.spawn(move || watch::watch(&watched)).map_err(|e| {
            let given = format!("rank {}: {e}", shared.rank);
            shared.refuse(Error::unsupported(
                "nccl",
                "the system refuses a thread for a rank's watch",
                given,
                "use fewer ranks",
            ))
        })?;
        let life = Life { shared, watch: Mutex::new(Some(watch)) };
        let everyone: Vec<usize> = (0..life.shared.world_len).collect();
        let line = life.shared.line(&everyone, "world", side);
        life.shared.meet(&line).map_err(|e| life.shared.refuse(e))?;
        life.shared.keep(line);
        Ok(NcclEngine(Arc::new(life)))
    }

    /// Gives up the world because this rank's program failed, and hears no more of it.
    pub fn fail(&self, cause: String) {
        let shared = &self.0.shared;
        shared.client.tell(Message::Failed { cause });
        // The watch gives up the rest.
        let _ = shared.client.wait_for_fault(PATIENCE);
    }

    /// As [`NcclEngine::fail`] where the process ends next: returns when the others will hear of it.
    pub fn fail_for_good(&self, cause: String) {
        self.fail(cause);
        self.0.stop(true);
        self.0.shared.client.hang_up();
    }

    fn open_by(
        &self,
        ranks: &[usize],
        name: &str,
        connect: impl FnOnce(&Shared, &Line) -> Result<()>,
    ) -> Result<Arc<dyn Channel>> {
        let shared = &self.0.shared;
        let line = match shared.find(ranks, name) {
            Some(line) => line,
            None => {
                let line = shared.line(ranks, name, Side::new(&Gpu::get(shared.device)?)?);
                connect(shared, &line)?;
                shared.keep(line.clone());
                line
            }
        };
        Ok(Arc::new(NcclChannel { life: self.0.clone(), line }))
    }
}

impl Life {
    fn stop(&self, wait: bool) {
        self.shared.over.store(true, Ordering::Release);
        let watch = lock(&self.watch).take();
        if let Some(watch) = watch
            && wait
        {
            // Its panics would be our own bugs, and there is nothing left to do for it.
            let _ = watch.join();
        }
    }
}

impl Drop for Life {
    /// Leaves the rest to the watch, which ends what is under way or gives it up.
    fn drop(&mut self) {
        self.stop(false);
    }
}

impl Engine for NcclEngine {
    fn rank(&self) -> usize {
        self.0.shared.rank
    }

    fn world_len(&self) -> usize {
        self.0.shared.world_len
    }

    fn deadline(&self) -> Duration {
        self.0.shared.deadline
    }

    fn open(&self, ranks: &[usize], name: &str) -> Result<Arc<dyn Channel>> {
        // A single rank talks to nobody.
        self.open_by(
            ranks,
            name,
            |shared, line| if line.ranks.len() == 1 { Ok(()) } else { shared.meet(line) },
        )
    }

    fn split(&self, part: &[usize], color: usize, name: &str) -> Result<Arc<dyn Channel>> {
        self.open_by(part, name, |shared, line| {
            let everyone: Vec<usize> = (0..shared.world_len).collect();
            let world = shared.find(&everyone, "world").expect("opened when the rank connected");
            let comm = world.with(|world| shared.nccl.split(world, color as u32, line.index));
            shared.settle(line, comm)
        })
    }

    fn end(&self) -> Result<()> {
        let drained = self.0.shared.drain();
        if drained.is_ok() {
            self.0.shared.client.leave(self.0.shared.deadline);
        }
        self.0.stop(true);
        drained
    }

    fn abort(&self, cause: &Error) {
        self.fail(cause.to_string());
    }
}

impl Shared {
    fn new(seat: Seat, library: &Library) -> Result<(Arc<Shared>, Side)> {
        let Seat { rank, world_len, device, deadline, client } = seat;
        let side = match device {
            Device::Cuda(index) => Gpu::get(index).and_then(|gpu| Ok((index, Side::new(&gpu)?))),
            Device::Cpu | Device::Meta => {
                let given = format!("rank {rank} on {device}");
                Err(Error::invalid(
                    "nccl",
                    "NCCL moves what lies on GPUs",
                    given,
                    "give each rank a GPU of its own",
                ))
            }
        };
        let (index, side) = side.inspect_err(|e| {
            client.tell(Message::Failed { cause: e.to_string() });
            client.hang_up();
        })?;
        let shared = Shared {
            rank,
            world_len,
            device: index,
            deadline,
            client,
            nccl: library.nccl.clone(),
            compared: library.compared,
            driver: side.driver().clone(),
            lines: Mutex::default(),
            first_fault: OnceLock::new(),
            told: AtomicBool::new(false),
            spoilt: OnceLock::new(),
            streams: Mutex::default(),
            over: AtomicBool::new(false),
        };
        Ok((Arc::new(shared), side))
    }

    /// An error with which this rank does not begin: the others hear of it.
    fn refuse(&self, error: Error) -> Error {
        if self.client.first_fault().is_none() {
            self.client.tell(Message::Failed { cause: error.to_string() });
        }
        self.over.store(true, Ordering::Release);
        self.client.hang_up();
        error
    }

    fn line(&self, ranks: &[usize], name: &str, side: Side) -> Arc<Line> {
        // The world's own communicator is there in any case, so that one GPU can show that the library works.
        let alone = ranks.len() == 1 && self.world_len > 1;
        let line = Line::new(ranks, name, self.rank, alone, side);
        self.client.tell(Message::Open { group: line.id, name: name.into(), ranks: ranks.to_vec() });
        Arc::new(line)
    }

    fn find(&self, ranks: &[usize], name: &str) -> Option<Arc<Line>> {
        lock(&self.lines).get(&label(name, ranks)).cloned()
    }

    fn keep(&self, line: Arc<Line>) {
        lock(&self.lines).insert(line.label.clone(), line);
    }

    /// Joins the group's communicator by a name that its first member makes and gives to the others.
    fn meet(&self, line: &Line) -> Result<()> {
        let key = format!("id of {}", line.label);
        let id = if line.index == 0 {
            let id =
                self.nccl.unique_id().map_err(|e| self.broken(line.call_id("connect", 0), e.to_string()))?;
            self.client.put(key, id.clone());
            id
        } else {
            match self.client.get(&key, self.deadline) {
                Some(id) => id,
                None => return Err(self.unmet(line)),
            }
        };
        let comm = self.nccl.join(&id, line.ranks.len(), line.index);
        self.settle(line, Some(comm))
    }

    /// Waits until a communicator that was begun is ready.
    fn settle(&self, line: &Line, comm: Option<NcclResult<Communicator>>) -> Result<()> {
        let id = || line.call_id("connect", 0);
        match comm {
            Some(Ok(comm)) => line.set(comm),
            Some(Err(e)) => return Err(self.broken(id(), e.to_string())),
            None => return Err(self.given_up(id())),
        }
        self.ready(line, &id(), || Message::Broken {
            id: id(),
            reason: format!("not connected within {:.1} s", self.deadline.as_secs_f64()),
        })
    }

    /// Waits until the communicator has put what it was told on its stream; after the deadline the coordinator hears `late`.
    pub fn ready(&self, line: &Line, id: &CallId, late: impl Fn() -> Message) -> Result<()> {
        const PAUSE: Duration = Duration::from_micros(100);
        let end = Instant::now() + self.deadline;
        loop {
            match line.with(|comm| self.nccl.progress(comm)) {
                Some(Ok(Progress::Ready)) => return Ok(()),
                Some(Ok(Progress::Underway)) => {}
                Some(Err(e)) => return Err(self.broken(id.clone(), e.to_string())),
                None => return Err(self.given_up(id.clone())),
            }
            if self.client.first_fault().is_some() {
                return Err(self.given_up(id.clone()));
            }
            if Instant::now() >= end {
                self.client.tell(late());
                let _ = self.client.wait_for_fault(PATIENCE);
                return Err(self.given_up(id.clone()));
            }
            thread::sleep(PAUSE);
        }
    }

    /// The error of a call after the first_fault, which is there or comes at once.
    pub fn given_up(&self, id: CallId) -> Error {
        self.told.store(true, Ordering::Relaxed);
        let first_fault = self.first_fault.get().cloned().or_else(|| self.client.wait_for_fault(PATIENCE));
        match first_fault {
            Some(first_fault) => first_fault.at(id).into(),
            None => {
                CommFault::Transport { id, rank: self.rank, reason: "the coordinator does not answer".into() }
                    .into()
            }
        }
    }

    /// The error of a call in which the transport failed; the others hear of it. Whoever is the cause may speak first.
    pub fn broken(&self, id: CallId, reason: String) -> Error {
        const GRACE: Duration = Duration::from_millis(300);
        if self.client.wait_for_fault(GRACE).is_none() {
            self.client.tell(Message::Broken { id: id.clone(), reason });
        }
        self.given_up(id)
    }

    /// Nobody has made the group's name.
    fn unmet(&self, line: &Line) -> Error {
        if self.client.first_fault().is_none() {
            let reason = format!(
                "rank {} has not opened the group within {:.1} s",
                line.ranks[0],
                self.deadline.as_secs_f64()
            );
            self.client.tell(Message::Broken { id: line.call_id("connect", 0), reason });
        }
        self.given_up(line.call_id("connect", 0))
    }

    /// What reading gives from now on.
    pub fn spoil(&self, error: Error) -> Arc<Spoilt> {
        self.spoilt.get_or_init(|| Arc::new(Spoilt { error, told: AtomicBool::new(false) })).clone()
    }

    /// A call of the whole world that is no group's.
    pub fn world_id(&self, call: &'static str) -> CallId {
        let everyone: Vec<usize> = (0..self.world_len).collect();
        CallId::new(call, 0, label("world", &everyone))
    }

    /// Waits until all that is under way is through. A first_fault that the program was given already is its own business.
    fn drain(&self) -> Result<()> {
        const PAUSE: Duration = Duration::from_millis(1);
        loop {
            if let Some(first_fault) = self.client.first_fault() {
                let read = self.spoilt.get().is_some_and(|spoilt| spoilt.told.load(Ordering::Relaxed));
                if read || self.told.load(Ordering::Relaxed) {
                    return Ok(());
                }
                return Err(first_fault.at(self.world_id("end")).into());
            }
            let lines: Vec<Arc<Line>> = lock(&self.lines).values().cloned().collect();
            if lines.iter().all(|line| lock(&line.flights).is_empty()) {
                return Ok(());
            }
            thread::sleep(PAUSE);
        }
    }
}

impl Drop for Shared {
    /// Threads that go on without this world may read what they computed.
    fn drop(&mut self) {
        lock(&self.streams).iter().for_each(|stream| stream.spoil(None));
    }
}
