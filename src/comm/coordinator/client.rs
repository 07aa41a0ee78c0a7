//! A rank's end of the coordinator, and the coordinator of ranks that share a process.

use std::collections::HashMap;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::call_table::{CallTable, To};
use super::message::{FirstFault, Message, Notice};
use super::wire;

/// A rank's place: it sends notes to the coordinator, which never wait, and reads the news.
#[derive(Debug)]
pub(in crate::comm) struct Client {
    rank: usize,
    inbox: Arc<Inbox>,
    way: Way,
}

#[derive(Debug)]
enum Way {
    /// The coordinator is in this process.
    Here(Arc<Coordinator>),
    /// Notes go to a thread that sends them.
    There { notes: Mutex<Option<Sender<Message>>>, sender: Mutex<Option<JoinHandle<()>>> },
}

/// Where news lies until it is read.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    state: Mutex<InboxState>,
    wake: Condvar,
    /// True once there is a first_fault.
    is_final: AtomicBool,
}

#[derive(Debug, Default)]
struct InboxState {
    first_fault: Option<FirstFault>,
    values: HashMap<String, Vec<u8>>,
    closing: bool,
}

/// The coordinator: its book, and the way to every rank.
#[derive(Debug)]
pub(in crate::comm) struct Coordinator {
    calls: Mutex<CallTable>,
    over: Condvar,
    peers: Vec<Peer>,
}

#[derive(Debug)]
pub(super) enum Peer {
    Here(Arc<Inbox>),
    There(Mutex<TcpStream>),
}

impl Client {
    pub(super) fn here(rank: usize, inbox: Arc<Inbox>, coordinator: Arc<Coordinator>) -> Client {
        Client { rank, inbox, way: Way::Here(coordinator) }
    }

    pub(super) fn there(
        rank: usize,
        inbox: Arc<Inbox>,
        notes: Sender<Message>,
        sender: JoinHandle<()>,
    ) -> Client {
        Client {
            rank,
            inbox,
            way: Way::There { notes: Mutex::new(Some(notes)), sender: Mutex::new(Some(sender)) },
        }
    }

    /// Sends a note; never waits for an answer.
    pub fn tell(&self, note: Message) {
        match &self.way {
            Way::Here(coordinator) => coordinator.take(self.rank, note),
            Way::There { notes, .. } => {
                if let Some(notes) = &*lock(notes) {
                    // A sender that is gone has lost the coordinator, and its first_fault says so.
                    let _ = notes.send(note);
                }
            }
        }
    }

    /// Why the world is given up, if it is.
    pub fn first_fault(&self) -> Option<FirstFault> {
        self.inbox
            .is_final
            .load(Ordering::Acquire)
            .then(|| lock(&self.inbox.state).first_fault.clone())
            .flatten()
    }

    /// Waits for a first_fault, but not longer than `at_most`.
    pub fn wait_for_fault(&self, at_most: Duration) -> Option<FirstFault> {
        self.inbox.wait(at_most, |letters| letters.first_fault.clone())
    }

    /// Gives bytes to whoever asks for them.
    pub fn put(&self, key: String, value: Vec<u8>) {
        self.tell(Message::Put { key, value });
    }

    /// Asks for bytes, and waits for them; none where there is a first_fault instead, or nothing within `at_most`.
    pub fn get(&self, key: &str, at_most: Duration) -> Option<Vec<u8>> {
        self.tell(Message::Get { key: key.into() });
        let answer = |letters: &mut InboxState| match letters.values.remove(key) {
            Some(value) => Some(Some(value)),
            None => letters.first_fault.is_some().then_some(None),
        };
        self.inbox.wait(at_most, answer).flatten()
    }

    /// Leaves: this rank's program is over. The coordinator itself waits for the others, but not longer than `at_most`.
    pub fn leave(&self, at_most: Duration) {
        self.tell(Message::Ended);
        match &self.way {
            Way::Here(coordinator) => coordinator.close(at_most),
            Way::There { .. } => self.hang_up(),
        }
    }

    /// Leaves together with all others: waits until every rank's program is over, or the world is given up, and says why.
    #[cfg(feature = "mpi")]
    pub fn part(&self) -> Option<FirstFault> {
        const LONG: Duration = Duration::from_secs(365 * 24 * 3600);
        self.tell(Message::Ended);
        match &self.way {
            Way::Here(coordinator) => coordinator.close(LONG),
            Way::There { .. } => {
                let over = |letters: &mut InboxState| {
                    (letters.closing || letters.first_fault.is_some()).then_some(())
                };
                self.inbox.wait(LONG, over);
                self.hang_up();
            }
        }
        self.first_fault()
    }

    /// Sends what is waiting and closes the connections, as the end of the process does.
    pub fn hang_up(&self) {
        match &self.way {
            Way::Here(coordinator) => coordinator.peers.iter().for_each(|peer| {
                if let Peer::There(stream) = peer {
                    // A connection that is closed already is as good.
                    let _ = lock(stream).shutdown(Shutdown::Write);
                }
            }),
            Way::There { notes, sender } => {
                drop(lock(notes).take());
                // It has only to write what it has; its panics would be our own bugs and harm nobody now.
                let _ = lock(sender).take().map(JoinHandle::join);
            }
        }
    }
}

impl Inbox {
    pub(super) fn put(&self, news: Notice) {
        let mut letters = lock(&self.state);
        match news {
            Notice::FirstFault(first_fault) => {
                letters.first_fault.get_or_insert(first_fault);
                self.is_final.store(true, Ordering::Release);
            }
            Notice::Value { key, value } => {
                letters.values.insert(key, value);
            }
            Notice::Closing => letters.closing = true,
        }
        self.wake.notify_all();
    }

    pub(super) fn is_closing(&self) -> bool {
        lock(&self.state).closing
    }

    fn wait<T>(&self, at_most: Duration, mut look: impl FnMut(&mut InboxState) -> Option<T>) -> Option<T> {
        let end = Instant::now() + at_most;
        let mut letters = lock(&self.state);
        loop {
            if let Some(found) = look(&mut letters) {
                return Some(found);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            letters = self.wake.wait_timeout(letters, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Coordinator {
    /// The desks of ranks that are threads of this process.
    pub fn clients(world_len: usize, deadline: Duration) -> Vec<Client> {
        let boxes: Vec<Arc<Inbox>> = (0..world_len).map(|_| Arc::default()).collect();
        let peers = boxes.iter().cloned().map(Peer::Here).collect();
        let coordinator = Coordinator::new(peers, deadline);
        let client = |(rank, inbox)| Client::here(rank, inbox, coordinator.clone());
        boxes.into_iter().enumerate().map(client).collect()
    }

    pub(super) fn new(peers: Vec<Peer>, deadline: Duration) -> Arc<Coordinator> {
        let calls = Mutex::new(CallTable::new(peers.len(), deadline.as_secs_f64()));
        Arc::new(Coordinator { calls, over: Condvar::new(), peers })
    }

    /// Takes a note, and tells what follows from it.
    pub(super) fn take(&self, from: usize, note: Message) {
        let ends = matches!(note, Message::Ended | Message::Failed { .. });
        let mut calls = lock(&self.calls);
        let news = calls.take(from, note);
        // A first_fault goes out before anybody else's note is taken: who then finds it decided may hang up at once.
        let decided = news.iter().any(|(_, news)| matches!(news, Notice::FirstFault(_)));
        let _held = decided.then_some(calls);
        for (to, news) in news {
            match to {
                To::Rank(rank) => self.peers[rank].put(news),
                To::All => self.peers.iter().for_each(|peer| peer.put(news.clone())),
            }
        }
        if ends || decided {
            self.over.notify_all();
        }
    }

    /// The connection of a rank in another process has ended.
    pub(super) fn lost(&self, rank: usize) {
        if !lock(&self.calls).has_ended(rank) {
            self.take(rank, Message::Failed { cause: "its process ended without a word".into() });
        }
    }

    /// Waits for the ranks of other processes, and closes the connections.
    fn close(&self, at_most: Duration) {
        if self.peers.iter().all(|peer| matches!(peer, Peer::Here(_))) {
            return;
        }
        let end = Instant::now() + at_most;
        let mut calls = lock(&self.calls);
        while !calls.is_over() && Instant::now() < end {
            let left = end.saturating_duration_since(Instant::now());
            calls = self.over.wait_timeout(calls, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(calls);
        for peer in &self.peers {
            peer.put(Notice::Closing);
            if let Peer::There(stream) = peer {
                // A connection that is closed already is as good.
                let _ = lock(stream).shutdown(Shutdown::Write);
            }
        }
    }
}

impl Peer {
    fn put(&self, news: Notice) {
        match self {
            Peer::Here(inbox) => inbox.put(news),
            // A rank that cannot be reached is reported by its connection's reader.
            Peer::There(stream) => drop(wire::send(&mut *lock(stream), &news.encode())),
        }
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
