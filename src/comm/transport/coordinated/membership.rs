//! A rank's membership in a world that has a coordinator.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use crate::base::lock;
use crate::comm::calls::{BusyWork, label};
use crate::comm::coordinator::{Client, FirstFault, Message};
use crate::error::{CallId, CommFault, Error, Result};

/// The time within which the coordinator answers an urgent message.
const ANSWER_TIME: Duration = Duration::from_secs(2);
/// The time for which a rank whose transport fails waits for a report from the rank that caused it.
const CAUSE_TIME: Duration = Duration::from_millis(300);

/// A rank's connection to the coordinator, and the fault for which the world was given up, if any.
#[derive(Debug)]
pub(in crate::comm::transport) struct Membership {
    pub rank: usize,
    pub world_len: usize,
    /// The time for which ranks wait for each other.
    pub deadline: Duration,
    /// True if members send the signature of each call to the coordinator.
    pub compared: bool,
    client: Client,
    /// Messages to be sent together, in order; `None` if each is sent at once.
    collected: Option<Mutex<Vec<Message>>>,
    /// The fault that this rank reports on its own, because the coordinator did not answer.
    own_fault: OnceLock<FirstFault>,
    /// True once this rank's program has received the first fault, from a call or from opening a group.
    is_told: AtomicBool,
    /// True once this rank's program is over.
    is_over: AtomicBool,
    /// True once the coordinator may know of the end, after which this rank announces no work.
    has_left: Mutex<bool>,
}

impl Membership {
    /// Returns a membership that sends each message at once.
    pub fn new(
        rank: usize,
        world_len: usize,
        deadline: Duration,
        compared: bool,
        client: Client,
    ) -> Membership {
        Membership {
            rank,
            world_len,
            deadline,
            compared,
            client,
            collected: None,
            own_fault: OnceLock::new(),
            is_told: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            has_left: Mutex::new(false),
        }
    }

    /// Collects messages that are not urgent until [`Membership::flush`] sends them together, because each send costs
    /// CPU time.
    #[cfg(feature = "mpi")]
    pub fn collecting(self) -> Membership {
        Membership { collected: Some(Mutex::default()), ..self }
    }

    /// Sends the coordinator a message that may be delayed by a millisecond.
    pub fn tell_later(&self, message: Message) {
        const MANY: usize = 4096;
        let Some(collected) = &self.collected else { return self.client.tell(message) };
        let mut collected = lock(collected);
        collected.push(message);
        if collected.len() >= MANY {
            collected.drain(..).for_each(|message| self.client.tell(message));
        }
    }

    /// Sends the collected messages. Returns true if there were any.
    pub fn flush(&self) -> bool {
        let Some(collected) = &self.collected else { return false };
        // The lock keeps messages in order.
        let mut collected = lock(collected);
        let some = !collected.is_empty();
        collected.drain(..).for_each(|message| self.client.tell(message));
        some
    }

    /// Sends the coordinator a message now, after those that were collected.
    pub fn tell(&self, message: Message) {
        self.flush();
        self.client.tell(message);
    }

    /// Stores bytes for members that ask for them.
    pub fn put(&self, key: String, value: Vec<u8>) {
        self.client.put(key, value);
    }

    /// Waits for bytes that another member stores, for at most `at_most`; returns `None` if there is a fault.
    pub fn get(&self, key: &str, at_most: Duration) -> Option<Vec<u8>> {
        self.client.get(key, at_most)
    }

    /// Tells the coordinator of the work that this rank has announced.
    pub fn announce(&self, work: Option<BusyWork>) {
        let has_left = lock(&self.has_left);
        if !*has_left {
            self.tell(Message::Busy { work });
        }
    }

    /// Calls [`Client::time_left_to_end`].
    pub fn time_left_to_end(&self, waited: Duration) -> Option<Duration> {
        self.client.time_left_to_end(waited)
    }

    /// Tells the coordinator of a wait that is late. Returns the time for which to wait on, because ranks that it
    /// waits for are busy, or `None` if they are not.
    pub(super) fn time_left(&self, late: Message) -> Option<Duration> {
        self.flush();
        self.client.time_left(late, ANSWER_TIME).filter(|time| !time.is_zero())
    }

    /// Returns true once the world was given up.
    pub fn is_given_up(&self) -> bool {
        self.own_fault.get().is_some() || self.client.first_fault().is_some()
    }

    /// Returns the fault for which the world was given up, if any.
    pub fn first_fault(&self) -> Option<FirstFault> {
        self.own_fault.get().cloned().or_else(|| self.client.first_fault())
    }

    /// Waits for the first fault, for at most `at_most`.
    pub fn wait_for_fault(&self, at_most: Duration) -> Option<FirstFault> {
        self.own_fault.get().cloned().or_else(|| self.client.wait_for_fault(at_most))
    }

    /// Returns the error of a call after the first fault, which is known or arrives soon. `brought` describes the
    /// call.
    pub fn given_up(&self, id: CallId, brought: impl ToString) -> Error {
        self.await_fault(&id, brought, ANSWER_TIME).at(id).into()
    }

    /// Tells the coordinator that the transport failed, and returns the call's error.
    pub fn broken(&self, id: CallId, reason: String) -> Error {
        self.report_broken(&id, reason).at(id).into()
    }

    /// Tells the coordinator that the transport failed, and returns the first fault.
    pub fn report_broken(&self, id: &CallId, reason: String) -> FirstFault {
        self.flush();
        if self.wait_for_fault(CAUSE_TIME).is_none() {
            self.tell(Message::Broken { id: id.clone(), reason: reason.clone() });
        }
        self.settle(ANSWER_TIME, || CommFault::Transport { id: id.clone(), rank: self.rank, reason })
    }

    /// Returns the first fault, which is known or arrives within `at_most`; if rank 0 does not answer, a fault that
    /// says so.
    pub(super) fn await_fault(&self, id: &CallId, brought: impl ToString, at_most: Duration) -> FirstFault {
        // The coordinator runs in the process of rank 0, which is alive: its connection is open.
        self.settle(at_most, || CommFault::Missing {
            id: id.clone(),
            rank: self.rank,
            brought: brought.to_string(),
            missing: vec![0],
            ended: false,
            deadline_s: self.deadline.as_secs_f64(),
            elsewhere: Default::default(),
            busy: Default::default(),
            last: Default::default(),
        })
    }

    /// Returns the first fault. If none arrives within `at_most`, it is this rank's own fault from now on.
    fn settle(&self, at_most: Duration, own: impl FnOnce() -> CommFault) -> FirstFault {
        let known = self.wait_for_fault(at_most);
        known.unwrap_or_else(|| self.own_fault.get_or_init(|| FirstFault::Fault(own())).clone())
    }

    /// Returns `result` to this rank's program, and notes if it is a fault: then the end of the program need not
    /// report it again.
    pub fn give<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(Error::Comm(_)) = result {
            self.is_told.store(true, Ordering::Relaxed);
        }
        result
    }

    /// Tells the other ranks of an error with which this rank does not start.
    pub fn refuse(&self, error: Error) -> Error {
        if self.first_fault().is_none() {
            self.tell(Message::Failed { cause: error.to_string() });
        }
        self.hang_up();
        error
    }

    /// Gives up the world because this rank's program failed. Returns when the coordinator has confirmed it.
    pub fn fail(&self, cause: String) {
        self.tell(Message::Failed { cause });
        let _ = self.wait_for_fault(ANSWER_TIME);
    }

    /// Returns the first fault at the end of this rank's program, unless the program has received it already.
    pub fn check_at_end(&self) -> Result<()> {
        match self.first_fault() {
            Some(fault) if !self.is_told.load(Ordering::Relaxed) => {
                Err(fault.at(self.world_id("end")).into())
            }
            _ => Ok(()),
        }
    }

    /// Leaves at the end of this rank's program. The coordinator waits for the other ranks until the deadline.
    pub fn leave(&self) {
        *lock(&self.has_left) = true;
        self.client.leave(self.deadline);
    }

    /// Waits until every rank's program has ended or the world was given up, then leaves.
    #[cfg(feature = "mpi")]
    pub fn leave_together(&self) {
        *lock(&self.has_left) = true;
        self.flush();
        self.client.leave_together();
    }

    /// Sends the remaining messages and closes the connections, as the end of the process does.
    pub fn hang_up(&self) {
        *lock(&self.has_left) = true;
        self.client.hang_up();
    }

    /// Returns true once this rank's program has ended.
    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
    }

    /// Returns all ranks, ascending.
    pub fn everyone(&self) -> Vec<usize> {
        (0..self.world_len).collect()
    }

    /// Returns the name of a call that belongs to the whole world.
    pub fn world_id(&self, call: &'static str) -> CallId {
        CallId::new(call, 0, label("world", &self.everyone()))
    }
}
