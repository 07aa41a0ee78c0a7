//! The coordinator: what it makes of messages, and the way to every rank.

use std::io::{self, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::auth::FrameKey;
use super::frame::{self, DeadlineStream};
use super::inbox::Inbox;
use super::message::{FirstFault, Message, Notice};
use super::store::KeyValueStore;
use crate::comm::deadline::end_after;
use crate::comm::diagnostics::{CallTable, ProtocolViolation};
use crate::comm::lock::lock;
use crate::error::CommFault;

/// The time that writing an answer to a rank that does not read may take; nobody else waits for it.
const WRITE_DEADLINE: Duration = Duration::from_secs(5);
/// The time that writing the first fault to all ranks that do not read may take: ranks that ask wait for two seconds.
const FAULT_DEADLINE: Duration = Duration::from_millis(1500);
/// The same for each of them while all others wait.
const AT_ONCE: Duration = Duration::from_millis(1);

/// The coordinator of a world, in rank 0's process.
#[derive(Debug)]
pub(in crate::comm) struct Coordinator {
    state: Mutex<CoordinatorState>,
    /// Told when a rank's program is over, and when there is a first fault.
    over: Condvar,
    peers: Vec<RankLink>,
}

/// The coordinator's knowledge.
#[derive(Debug)]
pub(super) struct CoordinatorState {
    calls: CallTable,
    store: KeyValueStore,
    first_fault: Option<FirstFault>,
}

/// The way to a rank.
#[derive(Debug)]
pub(super) enum RankLink {
    /// It is in this process.
    Local(Arc<Inbox>),
    Remote(Mutex<FrameSender>),
}

/// The sending end of a connection.
pub(super) struct FrameSender {
    stream: Arc<TcpStream>,
    key: FrameKey,
    limit: usize,
    /// Frames, or the rest of one.
    unsent: Vec<u8>,
}

/// The part of what all are told that a rank has been told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SendProgress {
    NotStarted,
    Partial,
    Done,
}

/// The ranks that a notice is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Recipient {
    All,
    Rank(usize),
}

impl CoordinatorState {
    pub fn new(world_len: usize, deadline: Duration) -> CoordinatorState {
        let calls = CallTable::new(world_len, deadline.as_secs_f64());
        CoordinatorState { calls, store: KeyValueStore::new(world_len), first_fault: None }
    }

    /// Takes a rank's message, and says what is to be told. A message that no rank may send gives up the world in its name.
    pub fn take(&mut self, from: usize, message: Message) -> Vec<(Recipient, Notice)> {
        let done = self.apply(from, message.cut());
        done.unwrap_or_else(|breach| {
            let cause = format!("it broke the protocol between ranks: {breach}");
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
            _ if self.calls.has_ended(from) => return Err("it speaks after its end".into()),
            // After the first fault nothing counts but who is over.
            _ if self.first_fault.is_some() => return Ok(vec![]),
            _ => {}
        }
        let fault = match message {
            Message::Open { name, ranks } => {
                self.calls.open(from, &name, &ranks)?;
                None
            }
            Message::Arrived { group, sequence, seq, signature } => {
                self.calls.came(from, (group, sequence, seq), signature)?
            }
            Message::Late { group, sequence, seq, call, compared } => {
                Some(self.calls.late(from, (group, sequence, seq), &call, compared)?)
            }
            Message::Broken { id, reason } => Some(CommFault::Transport { id, rank: from, reason }),
            Message::Ended => self.calls.ended(from),
            Message::Failed { cause } => return Ok(self.declare(FirstFault::Failed { rank: from, cause })),
            Message::Put { .. } | Message::Get { .. } => None,
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

    /// True once every rank's program is over, or the world is given up.
    fn is_over(&self) -> bool {
        self.first_fault.is_some() || self.calls.all_have_ended()
    }
}

impl Coordinator {
    pub(super) fn new(peers: Vec<RankLink>, deadline: Duration) -> Arc<Coordinator> {
        let state = Mutex::new(CoordinatorState::new(peers.len(), deadline));
        Arc::new(Coordinator { state, over: Condvar::new(), peers })
    }

    /// Takes a message, and tells what follows from it.
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
        // A first fault goes out before anybody else's message is taken: who then finds it decided may hang up at once. Whoever
        // does not read it at once has a moment more, in which the others may speak.
        let body = encoded(from, &fault, self.peers.len());
        let told: Vec<SendProgress> = self.peers.iter().map(|peer| peer.tell(&fault, &body)).collect();
        drop(state);
        let end = Instant::now() + FAULT_DEADLINE;
        self.peers.iter().zip(told).for_each(|(peer, told)| peer.finish(told, &body, end));
        self.over.notify_all();
    }

    /// The connection of a rank in another process has ended, or brought what is not the rank's.
    pub(super) fn lost(&self, rank: usize, cause: &str) {
        if !lock(&self.state).calls.has_ended(rank) {
            self.take(rank, Message::Failed { cause: cause.into() });
        }
    }

    /// Waits for the ranks of other processes, and closes the connections.
    pub(super) fn close(&self, at_most: Duration) {
        if self.peers.iter().all(|peer| matches!(peer, RankLink::Local(_))) {
            return;
        }
        let end = end_after(at_most);
        let mut state = lock(&self.state);
        while !state.is_over() && Instant::now() < end {
            let left = end.saturating_duration_since(Instant::now());
            state = self.over.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(state);
        self.peers.iter().for_each(|peer| peer.put(Notice::Closing));
        self.hang_up();
    }

    /// Closes the connections, as the end of the process does.
    pub(super) fn hang_up(&self) {
        for peer in &self.peers {
            if let RankLink::Remote(sender) = peer {
                // A connection that is closed already is as good.
                let _ = lock(sender).stream.shutdown(Shutdown::Write);
            }
        }
    }

    /// Sends something to a rank of another process before it is told anything else.
    ///
    /// # Errors
    /// Those of its connection.
    pub(super) fn send(&self, rank: usize, what: &impl Serialize, end: Instant) -> io::Result<()> {
        match &self.peers[rank] {
            RankLink::Local(_) => Ok(()),
            RankLink::Remote(sender) => lock(sender).send(what, end),
        }
    }
}

/// The body of a notice; of a word that it is too long where it is.
fn encoded(from: usize, notice: &Notice, world_len: usize) -> Vec<u8> {
    let limit = frame::notice_limit(world_len);
    frame::encode(notice, limit).unwrap_or_else(|e| {
        let cause = format!("a fault that is too long to tell: {e}");
        let short = Notice::FirstFault(FirstFault::Failed { rank: from, cause });
        frame::encode(&short, limit).expect("a short notice is short")
    })
}

impl RankLink {
    /// Sends an answer, which nobody else waits for.
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

    /// Tells what all are told, hardly waiting.
    fn tell(&self, notice: &Notice, body: &[u8]) -> SendProgress {
        let sender = match self {
            RankLink::Local(notices) => {
                notices.put(notice.clone());
                return SendProgress::Done;
            }
            RankLink::Remote(sender) => sender,
        };
        // Somebody is writing an answer to it.
        let Ok(mut sender) = sender.try_lock() else { return SendProgress::NotStarted };
        sender.put(body);
        if sender.flush(Instant::now() + AT_ONCE).is_ok() {
            SendProgress::Done
        } else {
            SendProgress::Partial
        }
    }

    /// Tells the rest, or gives the rank up.
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
    /// Those of the connection, which does not take it by `end`; a value beyond the limit.
    pub fn send(&mut self, what: &impl Serialize, end: Instant) -> io::Result<()> {
        let body = frame::encode(what, self.limit)?;
        self.put(&body);
        self.flush(end)
    }

    fn put(&mut self, body: &[u8]) {
        frame::seal_body(body, &mut self.key, &mut self.unsent);
    }

    /// Sends what is here; what could not be sent by `end` stays.
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

    /// The rank cannot be reached: its reader reports that.
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
