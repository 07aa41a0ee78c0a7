//! A rank's membership in a world that a coordinator watches over.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use crate::comm::calls::label;
use crate::comm::coordinator::{Client, FirstFault, Message};
use crate::comm::lock::lock;
use crate::error::{CallId, CommFault, Error, Result};

/// The time that the coordinator has to answer what is urgent.
const PATIENCE: Duration = Duration::from_secs(2);
/// The time for which a rank whose transport fails leaves the first word to the rank that is the cause.
const GRACE: Duration = Duration::from_millis(300);

/// A rank's words to the coordinator, and the fault for which the world is given up, if it is.
#[derive(Debug)]
pub(in crate::comm::transport) struct Membership {
    pub rank: usize,
    pub world_len: usize,
    /// The time that ranks wait for each other.
    pub deadline: Duration,
    /// True if members tell the coordinator what they bring to each call.
    pub compared: bool,
    client: Client,
    /// Messages that wait to be sent together, in order; none if messages are sent at once.
    gathered: Option<Mutex<Vec<Message>>>,
    /// The fault that this rank settled on by itself, because the coordinator did not answer.
    own_fault: OnceLock<FirstFault>,
    /// True once this rank's program has been given the first fault, by a call it waited for or by opening a group.
    is_told: AtomicBool,
    /// True once this rank's program is over.
    is_over: AtomicBool,
}

impl Membership {
    /// A membership whose messages are sent at once.
    pub fn new(
        (rank, world_len): (usize, usize),
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
            gathered: None,
            own_fault: OnceLock::new(),
            is_told: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
        }
    }

    /// Lets messages that can wait do so, until [`Membership::flush`] sends them together: each takes time from a core.
    #[cfg(feature = "mpi")]
    pub fn gathering(self) -> Membership {
        Membership { gathered: Some(Mutex::default()), ..self }
    }

    /// Tells the coordinator something that can wait a millisecond.
    pub fn tell_in_passing(&self, message: Message) {
        const MANY: usize = 4096;
        let Some(gathered) = &self.gathered else { return self.client.tell(message) };
        let mut gathered = lock(gathered);
        gathered.push(message);
        if gathered.len() >= MANY {
            gathered.drain(..).for_each(|message| self.client.tell(message));
        }
    }

    /// Sends what has been gathered; true if there was something.
    pub fn flush(&self) -> bool {
        let Some(gathered) = &self.gathered else { return false };
        // Under the lock: messages stay in order.
        let mut gathered = lock(gathered);
        let some = !gathered.is_empty();
        gathered.drain(..).for_each(|message| self.client.tell(message));
        some
    }

    /// Tells the coordinator something now, after what has been gathered.
    pub fn tell(&self, message: Message) {
        self.flush();
        self.client.tell(message);
    }

    /// Gives bytes to the members that ask for them.
    pub fn put(&self, key: String, value: Vec<u8>) {
        self.client.put(key, value);
    }

    /// Asks for bytes, and waits for them until the deadline; none if there is a fault instead.
    pub fn get(&self, key: &str) -> Option<Vec<u8>> {
        self.client.get(key, self.deadline)
    }

    /// True once the world is given up.
    pub fn is_given_up(&self) -> bool {
        self.own_fault.get().is_some() || self.client.first_fault().is_some()
    }

    /// The fault for which the world is given up, if it is.
    pub fn first_fault(&self) -> Option<FirstFault> {
        self.own_fault.get().cloned().or_else(|| self.client.first_fault())
    }

    /// Waits for the first fault, but not longer than `at_most`.
    pub fn wait_for_fault(&self, at_most: Duration) -> Option<FirstFault> {
        self.own_fault.get().cloned().or_else(|| self.client.wait_for_fault(at_most))
    }

    /// The error of a call after the first fault, which is known or comes at once. `brought` is the call, as errors show it.
    pub fn given_up(&self, id: CallId, brought: impl ToString) -> Error {
        self.await_fault(&id, brought).at(id).into()
    }

    /// The error of a call in which the transport failed, which the coordinator is told.
    pub fn broken(&self, id: CallId, reason: String) -> Error {
        self.report_broken(&id, reason).at(id).into()
    }

    /// Tells the coordinator that the transport failed, and returns the first fault.
    pub fn report_broken(&self, id: &CallId, reason: String) -> FirstFault {
        self.flush();
        if self.wait_for_fault(GRACE).is_none() {
            self.tell(Message::Broken { id: id.clone(), reason: reason.clone() });
        }
        self.settle(|| CommFault::Transport { id: id.clone(), rank: self.rank, reason })
    }

    /// The first fault, which is known or comes at once, unless rank 0 does not answer.
    pub(super) fn await_fault(&self, id: &CallId, brought: impl ToString) -> FirstFault {
        // The coordinator is in rank 0's process, which lives, as its connection does.
        self.settle(|| CommFault::Missing {
            id: id.clone(),
            rank: self.rank,
            brought: brought.to_string(),
            missing: vec![0],
            ended: false,
            deadline_s: self.deadline.as_secs_f64(),
            elsewhere: Default::default(),
            last: Default::default(),
        })
    }

    /// The first fault; if none comes, this rank's own, which is its last word as well.
    fn settle(&self, own: impl FnOnce() -> CommFault) -> FirstFault {
        let known = self.wait_for_fault(PATIENCE);
        known.unwrap_or_else(|| self.own_fault.get_or_init(|| FirstFault::Fault(own())).clone())
    }

    /// Gives this rank's program a result, which it waited for: after a fault it needs no other word of it.
    pub fn give<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(Error::Comm(_)) = result {
            self.is_told.store(true, Ordering::Relaxed);
        }
        result
    }

    /// An error with which this rank does not begin: the others are told.
    pub fn refuse(&self, error: Error) -> Error {
        if self.first_fault().is_none() {
            self.tell(Message::Failed { cause: error.to_string() });
        }
        self.hang_up();
        error
    }

    /// Gives up the world because this rank's program failed; returns when the coordinator knows.
    pub fn fail(&self, cause: String) {
        self.tell(Message::Failed { cause });
        let _ = self.wait_for_fault(PATIENCE);
    }

    /// The first fault at the end of this rank's program, unless the program has been given it: then it is its own business.
    pub fn check_at_end(&self) -> Result<()> {
        match self.first_fault() {
            Some(fault) if !self.is_told.load(Ordering::Relaxed) => {
                Err(fault.at(self.world_id("end")).into())
            }
            _ => Ok(()),
        }
    }

    /// Leaves: this rank's program is over. The coordinator itself waits for the other ranks until the deadline.
    pub fn leave(&self) {
        self.client.leave(self.deadline);
    }

    /// Leaves together with all others: waits until every rank's program is over, or the world is given up.
    #[cfg(feature = "mpi")]
    pub fn leave_together(&self) {
        self.flush();
        self.client.leave_together();
    }

    /// Sends what is waiting and closes the connections, as the end of the process does.
    pub fn hang_up(&self) {
        self.client.hang_up();
    }

    /// True once this rank's program is over.
    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
    }

    /// All ranks, in order.
    pub fn everyone(&self) -> Vec<usize> {
        (0..self.world_len).collect()
    }

    /// A call of the whole world that is no group's.
    pub fn world_id(&self, call: &'static str) -> CallId {
        CallId::new(call, 0, label("world", &self.everyone()))
    }
}
