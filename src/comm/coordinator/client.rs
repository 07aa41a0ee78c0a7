//! A rank's connection to the coordinator.

use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use super::inbox::NoticeInbox;
use super::message::{FirstFault, Message, Notice};
use super::server::{Coordinator, RankLink};
use crate::base::lock;

/// A rank's connection to the coordinator. Sending a message never waits; notices arrive in an inbox.
#[derive(Debug)]
pub(in crate::comm) struct Client {
    rank: usize,
    inbox: Arc<NoticeInbox>,
    link: CoordinatorLink,
}

#[derive(Debug)]
enum CoordinatorLink {
    /// The coordinator is in this process.
    Local(Arc<Coordinator>),
    /// A thread sends the messages over TCP.
    Remote { messages: Mutex<Option<mpsc::Sender<Message>>>, sender: Mutex<Option<JoinHandle<()>>> },
}

impl Client {
    /// Makes a coordinator and the clients of ranks that are threads of this process.
    pub fn of_threads(world_len: usize, deadline: Duration) -> Vec<Client> {
        let inboxes: Vec<Arc<NoticeInbox>> = (0..world_len).map(|_| Arc::default()).collect();
        let peers = inboxes.iter().cloned().map(RankLink::Local).collect();
        let coordinator = Coordinator::new(peers, deadline);
        let client = |(rank, inbox)| Client::local(rank, inbox, coordinator.clone());
        inboxes.into_iter().enumerate().map(client).collect()
    }

    pub(super) fn local(rank: usize, inbox: Arc<NoticeInbox>, coordinator: Arc<Coordinator>) -> Client {
        Client { rank, inbox, link: CoordinatorLink::Local(coordinator) }
    }

    pub(super) fn remote(
        rank: usize,
        inbox: Arc<NoticeInbox>,
        messages: mpsc::Sender<Message>,
        sender: JoinHandle<()>,
    ) -> Client {
        let link = CoordinatorLink::Remote {
            messages: Mutex::new(Some(messages)),
            sender: Mutex::new(Some(sender)),
        };
        Client { rank, inbox, link }
    }

    /// Sends a message without waiting.
    pub fn tell(&self, message: Message) {
        let message = message.cut();
        match &self.link {
            CoordinatorLink::Local(coordinator) => coordinator.take(self.rank, message),
            CoordinatorLink::Remote { messages, .. } => {
                if let Some(messages) = &*lock(messages) {
                    // If the sending thread has ended, its connection is lost, and the first fault says so.
                    let _ = messages.send(message);
                }
            }
        }
    }

    /// Returns the fault that ended the world, if there is one.
    pub fn first_fault(&self) -> Option<FirstFault> {
        self.inbox.first_fault()
    }

    /// Waits for a first fault for at most `at_most`.
    pub fn wait_for_fault(&self, at_most: Duration) -> Option<FirstFault> {
        self.inbox.wait_for_fault(at_most)
    }

    /// Stores bytes under a key, for ranks that ask.
    pub fn put(&self, key: String, value: Vec<u8>) {
        self.tell(Message::Put { key, value });
    }

    /// Asks for the bytes of a key and waits for them. Returns `None` if there is a first fault instead, or after
    /// `at_most`.
    pub fn get(&self, key: &str, at_most: Duration) -> Option<Vec<u8>> {
        self.tell(Message::Get { key: key.into() });
        self.inbox.wait_for_value(key, at_most)
    }

    /// Sends a message of a wait that is late, and waits for the answer: the time for which to wait on. Returns `None`
    /// if there is a first fault instead, or after `at_most`.
    pub fn time_left(&self, late: Message, at_most: Duration) -> Option<Duration> {
        let key = match &late {
            Message::Late { group, sequence, seq, .. } => (*group, *sequence, *seq),
            Message::LateToOpen { group, .. } => (*group, Notice::OPENING.0, Notice::OPENING.1),
            _ => return None,
        };
        self.tell(late);
        self.inbox.wait_for_time(key, at_most)
    }

    /// Returns the time for which the end of the remaining ranks is waited for, after a wait of `waited`, if the
    /// coordinator is in this process.
    pub fn time_left_to_end(&self, waited: Duration) -> Option<Duration> {
        match &self.link {
            CoordinatorLink::Local(coordinator) => Some(coordinator.time_left_to_end(waited)),
            CoordinatorLink::Remote { .. } => None,
        }
    }

    /// Reports that this rank's program has ended. Rank 0 then waits for the other ranks for at most `at_most`.
    pub fn leave(&self, at_most: Duration) {
        self.tell(Message::Ended);
        match &self.link {
            CoordinatorLink::Local(coordinator) => coordinator.close(at_most),
            CoordinatorLink::Remote { .. } => self.hang_up(),
        }
    }

    /// Reports that this rank's program has ended, and waits until every rank's has or the world has a fault, which
    /// is returned.
    #[cfg(feature = "mpi")]
    pub fn leave_together(&self) -> Option<FirstFault> {
        const LONG: Duration = Duration::from_secs(365 * 24 * 3600);
        self.tell(Message::Ended);
        match &self.link {
            CoordinatorLink::Local(coordinator) => coordinator.close(LONG),
            CoordinatorLink::Remote { .. } => {
                self.inbox.wait_for_end(LONG);
                self.hang_up();
            }
        }
        self.first_fault()
    }

    /// Sends the queued messages and closes the connections, as the end of the process does.
    pub fn hang_up(&self) {
        match &self.link {
            CoordinatorLink::Local(coordinator) => coordinator.hang_up(),
            CoordinatorLink::Remote { messages, sender } => {
                drop(lock(messages).take());
                // The thread only writes its queue; a panic in it would be a bug of ours without consequence here.
                let _ = lock(sender).take().map(JoinHandle::join);
            }
        }
    }
}
