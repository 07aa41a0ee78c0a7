//! The coordinator: handles messages and sends notices to the ranks.

use std::io::{self, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::auth::FrameKey;
use super::frame::{self, DeadlineStream};
use super::inbox::NoticeInbox;
use super::message::{FirstFault, Message, Notice};
use super::store::KeyValueStore;
use crate::base::{lock, unpoisoned};
use crate::comm::diagnostics::{CallTable, ProtocolViolation};
use crate::error::CommFault;

/// The time limit for writing an answer to one rank that does not read. No other rank waits for it.
const WRITE_DEADLINE: Duration = Duration::from_secs(5);
/// The time limit for writing the first fault to all ranks that do not read. It is below the two seconds that ranks
/// wait for an answer.
const FAULT_DEADLINE: Duration = Duration::from_millis(1500);
/// The time limit for each rank's first attempt, while other ranks' messages wait.
const AT_ONCE: Duration = Duration::from_millis(1);

/// The coordinator of a world, in rank 0's process.
#[derive(Debug)]
pub(in crate::comm) struct Coordinator {
    state: Mutex<CoordinatorState>,
    /// Notified when a rank's program ends, and at the first fault.
    over: Condvar,
    peers: Vec<RankLink>,
}

/// The coordinator's state, without connections.
#[derive(Debug)]
pub(super) struct CoordinatorState {
    calls: CallTable,
    store: KeyValueStore,
    first_fault: Option<FirstFault>,
}

/// The connection to a rank.
#[derive(Debug)]
pub(super) enum RankLink {
    /// The rank is in this process.
    Local(Arc<NoticeInbox>),
    Remote(Mutex<FrameSender>),
}

/// The sending end of a connection.
pub(super) struct FrameSender {
    stream: Arc<TcpStream>,
    key: FrameKey,
    limit: usize,
    /// Sealed frames that are not written yet.
    unsent: Vec<u8>,
}

/// The part of the first fault that a rank has been sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SendProgress {
    NotStarted,
    Partial,
    Done,
}

/// The receivers of a notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Recipient {
    All,
    Rank(usize),
}

impl CoordinatorState {
    pub fn new(world_len: usize, deadline: Duration) -> CoordinatorState {
        let calls = CallTable::new(world_len, deadline);
        CoordinatorState { calls, store: KeyValueStore::new(world_len), first_fault: None }
    }

    /// Handles a rank's message and returns the notices that follow. A message that violates the protocol ends the
    /// world, with this rank as the cause.
    pub fn take(&mut self, from: usize, message: Message) -> Vec<(Recipient, Notice)> {
        let done = self.apply(from, message.cut());
        done.unwrap_or_else(|violation| {
            let cause = format!("it broke the protocol between ranks: {violation}");
            self.declare(FirstFault::Failed { rank: from, cause })
        })
    }

    fn apply(
        &mut self,
        from: usize,
        message: Message,
    ) -> Result<Vec<(Recipient, Notice)>, ProtocolViolation> {
        let value = |rank, key: &str, value: &[u8]| {
            (Recipient::Rank(rank), Notice::Value { key: key.into(), value: value.into() })
        };
        match message {
            Message::Put { key, value: bytes } => {
                let asked = self.store.put(from, &key, &bytes)?;
                return Ok(asked.into_iter().map(|rank| value(rank, &key, &bytes)).collect());
            }
            Message::Get { key } => {
                let found = self.store.get(from, &key)?;
                return Ok(found.map(|bytes| value(from, &key, bytes)).into_iter().collect());
            }
            Message::Ended => {}
            _ if self.calls.has_ended(from) => return Err("it sends messages after its end".into()),
            Message::Busy { work } => {
                self.calls.announce(from, work, Instant::now())?;
                return Ok(vec![]);
            }
            // After the first fault only the ends of programs matter, and work that their ends wait for.
            _ if self.first_fault.is_some() => return Ok(vec![]),
            _ => {}
        }
        let fault = match message {
            Message::Open { name, ranks } => {
                self.calls.open(from, &name, &ranks, Instant::now())?;
                None
            }
            Message::Arrived { group, sequence, seq, signature } => {
                self.calls.arrive(from, (group, sequence, seq), signature, Instant::now())?
            }
            Message::Late { group, sequence, seq, call, compared, waited } => {
                let (key, now) = ((group, sequence, seq), Instant::now());
                let time = self.calls.time_left(from, key, compared, waited, now)?;
                if !time.is_zero() {
                    return Ok(vec![(Recipient::Rank(from), Notice::WaitOn { group, sequence, seq, time })]);
                }
                Some(self.calls.late(from, key, &call, compared, now)?)
            }
            Message::LateToOpen { group, waited } => {
                let time = self.calls.time_left_to_open(from, group, waited, Instant::now())?;
                let (sequence, seq) = Notice::OPENING;
                return Ok(vec![(Recipient::Rank(from), Notice::WaitOn { group, sequence, seq, time })]);
            }
            Message::Broken { id, reason } => Some(CommFault::Transport { id, rank: from, reason }),
            Message::Ended => self.calls.ended(from, Instant::now()),
            Message::Failed { cause } => return Ok(self.declare(FirstFault::Failed { rank: from, cause })),
            Message::Put { .. } | Message::Get { .. } | Message::Busy { .. } => None,
        };
        Ok(fault.map_or(vec![], |fault| self.declare(FirstFault::Fault(fault))))
    }

    fn declare(&mut self, fault: FirstFault) -> Vec<(Recipient, Notice)> {
        if self.first_fault.is_some() {
            return vec![];
        }
        self.first_fault = Some(fault.clone());
        vec![(Recipient::All, Notice::FirstFault(fault))]
    }

    /// Returns true once every rank's program has ended or there is a first fault.
    fn is_over(&self) -> bool {
        self.first_fault.is_some() || self.calls.all_have_ended()
    }
}

impl Coordinator {
    pub(super) fn new(peers: Vec<RankLink>, deadline: Duration) -> Arc<Coordinator> {
        let state = Mutex::new(CoordinatorState::new(peers.len(), deadline));
        Arc::new(Coordinator { state, over: Condvar::new(), peers })
    }

    /// Handles a message and sends the notices that follow.
    pub(super) fn take(&self, from: usize, message: Message) {
        let ends = matches!(message, Message::Ended | Message::Failed { .. });
        let mut state = lock(&self.state);
        let notices = state.take(from, message);
        let fault = match &notices[..] {
            [(Recipient::All, fault)] => Some(fault.clone()),
            _ => None,
        };
        let Some(fault) = fault else {
            drop(state);
            notices.into_iter().for_each(|(to, notice)| {
                if let Recipient::Rank(rank) = to {
                    self.peers[rank].put(notice);
                }
            });
            if ends {
                self.over.notify_all();
            }
            return;
        };
        // The first fault is sent before another message is handled, because a rank that then finds the world ended
        // may close its connection. A rank that does not read at once gets more time, during which other messages are
        // handled.
        let body = encoded(from, &fault, self.peers.len());
        let told: Vec<SendProgress> = self.peers.iter().map(|peer| peer.tell(&fault, &body)).collect();
        drop(state);
        let end = Instant::now() + FAULT_DEADLINE;
        self.peers.iter().zip(told).for_each(|(peer, told)| peer.finish(told, &body, end));
        self.over.notify_all();
    }

    /// Handles the loss of a rank's connection, or invalid data on it.
    pub(super) fn lost(&self, rank: usize, cause: &str) {
        if !lock(&self.state).calls.has_ended(rank) {
            self.take(rank, Message::Failed { cause: cause.into() });
        }
    }

    /// Waits for the ranks of other processes to end, then closes the connections.
    pub(super) fn close(&self, at_most: Duration) {
        if self.peers.iter().all(|peer| matches!(peer, RankLink::Local(_))) {
            return;
        }
        let began = Instant::now();
        let mut state = lock(&self.state);
        while !state.is_over() {
            // At its end a rank may still be busy, for example with a file.
            let waited = began.elapsed();
            let left =
                at_most.saturating_sub(waited).max(state.calls.time_left_to_end(waited, Instant::now()));
            if left.is_zero() {
                break;
            }
            state = unpoisoned(self.over.wait_timeout(state, left)).0;
        }
        drop(state);
        self.peers.iter().for_each(|peer| peer.put(Notice::Closing));
        self.hang_up();
    }

    /// Returns the time for which the end of the remaining ranks is waited for, after a wait of `waited`.
    pub(super) fn time_left_to_end(&self, waited: Duration) -> Duration {
        lock(&self.state).calls.time_left_to_end(waited, Instant::now())
    }

    /// Closes the connections, as the end of the process does.
    pub(super) fn hang_up(&self) {
        for peer in &self.peers {
            if let RankLink::Remote(sender) = peer {
                // The connection may be closed already.
                let _ = lock(sender).stream.shutdown(Shutdown::Write);
            }
        }
    }

    /// Sends a value to a rank of another process, before its first notice.
    ///
    /// # Errors
    /// Returns the connection's error.
    pub(super) fn send(&self, rank: usize, what: &impl Serialize, end: Instant) -> io::Result<()> {
        match &self.peers[rank] {
            RankLink::Local(_) => Ok(()),
            RankLink::Remote(sender) => lock(sender).send(what, end),
        }
    }
}

/// Returns the encoded notice, or if that is too long, a short fault that says so.
fn encoded(from: usize, notice: &Notice, world_len: usize) -> Vec<u8> {
    let limit = frame::notice_limit(world_len);
    frame::encode(notice, limit).unwrap_or_else(|e| {
        let cause = format!("a fault that is too long to send: {e}");
        let short = Notice::FirstFault(FirstFault::Failed { rank: from, cause });
        frame::encode(&short, limit).expect("a short notice is short")
    })
}

impl RankLink {
    /// Sends an answer. No other rank waits for it.
    fn put(&self, notice: Notice) {
        match self {
            RankLink::Local(notices) => notices.put(notice),
            RankLink::Remote(sender) => {
                let mut sender = lock(sender);
                let end = Instant::now() + WRITE_DEADLINE;
                if sender.send(&notice, end).is_err() {
                    sender.give_up();
                }
            }
        }
    }

    /// Starts to send the first fault, for at most [`AT_ONCE`].
    fn tell(&self, notice: &Notice, body: &[u8]) -> SendProgress {
        let sender = match self {
            RankLink::Local(notices) => {
                notices.put(notice.clone());
                return SendProgress::Done;
            }
            RankLink::Remote(sender) => sender,
        };
        // Another thread is writing an answer to this rank.
        let Ok(mut sender) = sender.try_lock() else { return SendProgress::NotStarted };
        sender.put(body);
        if sender.flush(Instant::now() + AT_ONCE).is_ok() {
            SendProgress::Done
        } else {
            SendProgress::Partial
        }
    }

    /// Sends the rest, or closes the connection.
    fn finish(&self, told: SendProgress, body: &[u8], end: Instant) {
        let RankLink::Remote(sender) = self else { return };
        if told == SendProgress::Done {
            return;
        }
        let mut sender = lock(sender);
        if told == SendProgress::NotStarted {
            sender.put(body);
        }
        if sender.flush(end).is_err() {
            sender.give_up();
        }
    }
}

impl FrameSender {
    pub fn new(stream: Arc<TcpStream>, key: FrameKey, limit: usize) -> FrameSender {
        FrameSender { stream, key, limit, unsent: Vec::new() }
    }

    /// # Errors
    /// Returns the connection's error, also if it does not accept all bytes by `end`, and an error if the value
    /// exceeds the limit.
    pub fn send(&mut self, what: &impl Serialize, end: Instant) -> io::Result<()> {
        let body = frame::encode(what, self.limit)?;
        self.put(&body);
        self.flush(end)
    }

    fn put(&mut self, body: &[u8]) {
        frame::seal_body(body, &mut self.key, &mut self.unsent);
    }

    /// Writes the unsent bytes; those not written by `end` stay.
    fn flush(&mut self, end: Instant) -> io::Result<()> {
        let mut until = DeadlineStream { stream: &self.stream, end };
        while !self.unsent.is_empty() {
            match until.write(&self.unsent) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => drop(self.unsent.drain(..n)),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Closes the connection to a rank that does not read. The thread that reads from it reports the loss.
    fn give_up(&mut self) {
        self.unsent = Vec::new();
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl std::fmt::Debug for FrameSender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.stream.fmt(f)
    }
}
