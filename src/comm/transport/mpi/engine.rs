//! The engine: groups, what is left in flight, and the end.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::Mpi;
use super::calls::Port;
use super::channel::MpiChannel;
use super::flight::Flight;
use super::line::{Line, Tags, lock};
use super::watch;
use crate::comm::calls::label;
use crate::comm::coordinator::{Client, FirstFault, Message};
use crate::comm::{Channel, Engine};
use crate::error::{CallId, CommFault, Error, Result};

/// How long the coordinator has to answer what is urgent.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// Where a rank sits.
#[derive(Debug)]
pub(in crate::comm) struct Seat {
    pub mpi: Mpi,
    pub client: Client,
    pub deadline: Duration,
    /// What members bring is told to the coordinator.
    pub compared: bool,
    /// More ranks on this machine than cores: spinning takes time from the others.
    pub crowded: bool,
}

/// One rank's end of a world of MPI's processes.
#[derive(Debug)]
pub(in crate::comm) struct MpiEngine {
    shared: Arc<Shared>,
    watch: Mutex<Option<JoinHandle<()>>>,
}

/// What the rank, its channels and its watch share.
#[derive(Debug)]
pub(super) struct Shared {
    pub seat: Seat,
    pub tags: Tags,
    lines: Mutex<HashMap<String, Arc<Line>>>,
    /// Notes that wait for the watch to send them, in order.
    notes: Mutex<Vec<Message>>,
    /// What nobody waits for any more, and MPI is not through with.
    left: Mutex<Vec<Flight>>,
    /// Calls that somebody holds.
    pub flying: AtomicUsize,
    /// Why this rank gave up the world by itself, where the coordinator did not answer.
    own: OnceLock<FirstFault>,
    /// True once this rank's program has been given the first_fault.
    told: AtomicBool,
    /// True once the rank's part is over, for the watch.
    pub over: AtomicBool,
    /// True once nobody may call MPI any more; set by who has the port.
    closed: AtomicBool,
}

impl MpiEngine {
    /// Begins this rank, whose client is there.
    ///
    /// # Errors
    /// What the system says of a thread.
    pub fn begin(seat: Seat) -> Result<MpiEngine> {
        let tags = Tags::up_to(seat.mpi.tag_limit);
        let shared = Arc::new(Shared {
            seat,
            tags,
            lines: Mutex::default(),
            notes: Mutex::default(),
            left: Mutex::default(),
            flying: AtomicUsize::new(0),
            own: OnceLock::new(),
            told: AtomicBool::new(false),
            over: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        });
        let watched = shared.clone();
        let watch = thread::Builder::new().name(format!("watch of rank {}", shared.rank()));
        let watch = watch.spawn(move || watch::watch(&watched)).map_err(|e| {
            let given = format!("rank {}: {e}", shared.rank());
            let rule = "the system refuses a thread for a rank's watch";
            Error::unsupported("mpi", rule, given, "use fewer ranks")
        })?;
        Ok(MpiEngine { shared, watch: Mutex::new(Some(watch)) })
    }

    /// Gives up the world because this rank's program failed, and hears no more of it.
    pub fn fail(&self, cause: String) {
        self.shared.tell(Message::Failed { cause });
        let _ = self.shared.seat.client.wait_for_fault(PATIENCE);
    }

    /// As [`MpiEngine::fail`] where the process ends next: returns when the others will hear of it.
    pub fn fail_for_good(&self, cause: String) {
        self.fail(cause);
        self.stop();
        self.shared.seat.client.hang_up();
    }

    fn stop(&self) {
        self.shared.over.store(true, Ordering::Release);
        if let Some(watch) = lock(&self.watch).take() {
            // Its panics would be our own bugs, and there is nothing left to do for it.
            let _ = watch.join();
        }
    }
}

impl Engine for MpiEngine {
    fn rank(&self) -> usize {
        self.shared.rank()
    }

    fn world_len(&self) -> usize {
        self.shared.seat.mpi.world_len
    }

    fn deadline(&self) -> Duration {
        self.shared.seat.deadline
    }

    fn open(&self, ranks: &[usize], name: &str) -> Result<Arc<dyn Channel>> {
        let line = self.shared.line(ranks, name)?;
        Ok(Arc::new(MpiChannel { shared: self.shared.clone(), line }))
    }

    /// Waits, as long as it takes, until every rank's program is over: MPI ends everywhere at once.
    fn end(&self) -> Result<()> {
        let shared = &self.shared;
        shared.flush();
        let first_fault = shared.seat.client.part();
        self.stop();
        match first_fault {
            Some(_) if shared.told.load(Ordering::Relaxed) => Ok(()),
            Some(first_fault) => Err(first_fault.at(shared.world_id("end")).into()),
            None => shared.close(),
        }
    }

    fn abort(&self, cause: &Error) {
        self.fail(cause.to_string());
    }
}

impl Shared {
    pub fn rank(&self) -> usize {
        self.seat.mpi.rank
    }

    /// The right to call MPI, as long as there is one.
    pub fn port(&self) -> Option<Port<'_>> {
        let port = self.seat.mpi.port();
        (!self.closed.load(Ordering::Relaxed)).then_some(port)
    }

    /// Tells the coordinator something that can wait a millisecond.
    pub fn note(&self, note: Message) {
        const MANY: usize = 4096;
        let mut notes = lock(&self.notes);
        notes.push(note);
        if notes.len() >= MANY {
            notes.drain(..).for_each(|note| self.seat.client.tell(note));
        }
    }

    /// Sends what has been noted.
    pub fn flush(&self) {
        // Under the lock: notes stay in order.
        lock(&self.notes).drain(..).for_each(|note| self.seat.client.tell(note));
    }

    pub fn has_notes(&self) -> bool {
        !lock(&self.notes).is_empty()
    }

    /// Tells the coordinator something now, after what has been noted.
    pub fn tell(&self, note: Message) {
        self.flush();
        self.seat.client.tell(note);
    }

    /// Keeps a flight that nobody waits for until MPI is through with it.
    pub fn leave(&self, flight: Flight) {
        if !flight.is_done() {
            lock(&self.left).push(flight);
        }
    }

    /// Looks after what is under way; true where something is.
    pub fn progress(&self) -> bool {
        let Some(port) = self.seat.mpi.try_port() else { return true };
        let mut left = lock(&self.left);
        // A flight that crashed has lost its memory to MPI: there is nobody to tell of it but who waits at the other end.
        left.retain_mut(|flight| matches!(flight.test(&port), Ok(false)));
        let flying = self.flying.load(Ordering::Relaxed) > 0;
        if flying {
            // Its errors come with the calls that they befall.
            let _ = port.poke();
        }
        flying || !left.is_empty()
    }

    /// The group, made or found.
    fn line(&self, ranks: &[usize], name: &str) -> Result<Arc<Line>> {
        let label = label(name, ranks);
        if let Some(line) = lock(&self.lines).get(&label) {
            return Ok(line.clone());
        }
        // A group of one sends nothing.
        let number = if ranks.len() == 1 { 0 } else { self.number(&label)? };
        let line = Arc::new(Line::new(ranks, name, self.rank(), number, self.tags));
        self.note(Message::Open { group: line.id, name: name.into(), ranks: ranks.to_vec() });
        lock(&self.lines).insert(label, line.clone());
        Ok(line)
    }

    /// The coordinator's number of a group, the same for all members.
    fn number(&self, label: &str) -> Result<u32> {
        let id = || CallId::new("connect", 0, label);
        let answer = self.seat.client.get(&format!("#{label}"), self.seat.deadline);
        let bytes = answer.and_then(|bytes| bytes.try_into().ok());
        let number = bytes.map(u64::from_le_bytes).ok_or_else(|| self.given_up(id(), "connect"))?;
        match u32::try_from(number) {
            Ok(number) if number < self.tags.groups_len() => Ok(number),
            _ => Err(Error::unsupported(
                "group",
                "MPI's tags tell no more groups apart",
                format!("group {} of {}", number + 1, self.tags.groups_len()),
                "make groups once, under one name",
            )),
        }
    }

    /// True once the world is given up.
    pub fn is_given_up(&self) -> bool {
        self.own.get().is_some() || self.seat.client.first_fault().is_some()
    }

    /// The error of a call after the first_fault, which is there or comes at once.
    pub fn given_up(&self, id: CallId, brought: impl ToString) -> Error {
        // The coordinator is in rank 0's process, which lives, as its connection does, but does not answer.
        let absent = |id: &CallId| CommFault::Missing {
            id: id.clone(),
            rank: self.rank(),
            brought: brought.to_string(),
            missing: vec![0],
            ended: false,
            deadline_s: self.seat.deadline.as_secs_f64(),
            elsewhere: Default::default(),
            last: Default::default(),
        };
        self.decided(id, absent)
    }

    /// The error of a call in which MPI failed; the others hear of it. Whoever is the cause may speak first.
    pub fn broken(&self, id: CallId, reason: String) -> Error {
        const GRACE: Duration = Duration::from_millis(300);
        self.flush();
        if self.own.get().is_none() && self.seat.client.wait_for_fault(GRACE).is_none() {
            self.tell(Message::Broken { id: id.clone(), reason: reason.clone() });
        }
        self.decided(id, |id| CommFault::Transport { id: id.clone(), rank: self.rank(), reason })
    }

    /// The first_fault; where none comes, this rank's own, which is its last word as well.
    fn decided(&self, id: CallId, own: impl FnOnce(&CallId) -> CommFault) -> Error {
        self.told.store(true, Ordering::Relaxed);
        let first_fault = match self.own.get() {
            Some(first_fault) => Some(first_fault.clone()),
            None => self.seat.client.wait_for_fault(PATIENCE),
        };
        let first_fault =
            first_fault.unwrap_or_else(|| self.own.get_or_init(|| FirstFault::Fault(own(&id))).clone());
        first_fault.at(id).into()
    }

    fn world_id(&self, call: &'static str) -> CallId {
        let everyone: Vec<usize> = (0..self.seat.mpi.world_len).collect();
        CallId::new(call, 0, label("world", &everyone))
    }

    /// Ends MPI in peace: every rank's program is over.
    fn close(&self) -> Result<()> {
        let port = self.seat.mpi.port();
        self.closed.store(true, Ordering::Relaxed);
        lock(&self.left).drain(..).for_each(|flight| flight.give_up(&port));
        port.finish().map_err(|e| {
            let (id, reason) = (self.world_id("end"), e.to_string());
            CommFault::Transport { id, rank: self.rank(), reason }.into()
        })
    }
}
