//! A rank's end of the coordinator.

use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use super::inbox::Inbox;
use super::message::{FirstFault, Message};
use super::server::{Coordinator, RankLink};
use crate::comm::lock::lock;

/// A rank's way to the coordinator and back: messages, which never wait, and notices.
#[derive(Debug)]
pub(in crate::comm) struct Client {
    rank: usize,
    inbox: Arc<Inbox>,
    link: CoordinatorLink,
}

#[derive(Debug)]
enum CoordinatorLink {
    /// The coordinator is in this process.
    Local(Arc<Coordinator>),
    /// Messages go to a thread that sends them.
    Remote { messages: Mutex<Option<mpsc::Sender<Message>>>, sender: Mutex<Option<JoinHandle<()>>> },
}

impl Client {
    /// The clients of ranks that are threads of this process.
    pub fn of_threads(world_len: usize, deadline: Duration) -> Vec<Client> {
        let inboxes: Vec<Arc<Inbox>> = (0..world_len).map(|_| Arc::default()).collect();
        let peers = inboxes.iter().cloned().map(RankLink::Local).collect();
        let coordinator = Coordinator::new(peers, deadline);
        let client = |(rank, inbox)| Client::local(rank, inbox, coordinator.clone());
        inboxes.into_iter().enumerate().map(client).collect()
    }

    pub(super) fn local(rank: usize, inbox: Arc<Inbox>, coordinator: Arc<Coordinator>) -> Client {
        Client { rank, inbox, link: CoordinatorLink::Local(coordinator) }
    }

    pub(super) fn remote(
        rank: usize,
        inbox: Arc<Inbox>,
        messages: mpsc::Sender<Message>,
        sender: JoinHandle<()>,
    ) -> Client {
        let link = CoordinatorLink::Remote {
            messages: Mutex::new(Some(messages)),
            sender: Mutex::new(Some(sender)),
        };
        Client { rank, inbox, link }
    }

    /// Sends a message; never waits for an answer.
    pub fn tell(&self, message: Message) {
        let message = message.cut();
        match &self.link {
            CoordinatorLink::Local(coordinator) => coordinator.take(self.rank, message),
            CoordinatorLink::Remote { messages, .. } => {
                if let Some(messages) = &*lock(messages) {
                    // A sender that is gone has lost the coordinator, and the first fault says so.
                    let _ = messages.send(message);
                }
            }
        }
    }

    /// The fault for which the world is given up, if it is.
    pub fn first_fault(&self) -> Option<FirstFault> {
        self.inbox.first_fault()
    }

    /// Waits for a first fault, but not longer than `at_most`.
    pub fn wait_for_fault(&self, at_most: Duration) -> Option<FirstFault> {
        self.inbox.wait_for_fault(at_most)
    }

    /// Gives bytes to whoever asks for them.
    pub fn put(&self, key: String, value: Vec<u8>) {
        self.tell(Message::Put { key, value });
    }

    /// Asks for bytes, and waits for them; none where there is a first fault instead, or nothing within `at_most`.
    pub fn get(&self, key: &str, at_most: Duration) -> Option<Vec<u8>> {
        self.tell(Message::Get { key: key.into() });
        self.inbox.wait_for_value(key, at_most)
    }

    /// Leaves: this rank's program is over. The coordinator itself waits for the others, but not longer than `at_most`.
    pub fn leave(&self, at_most: Duration) {
        self.tell(Message::Ended);
        match &self.link {
            CoordinatorLink::Local(coordinator) => coordinator.close(at_most),
            CoordinatorLink::Remote { .. } => self.hang_up(),
        }
    }

    /// Leaves together with all others: waits until every rank's program is over, or the world is given up, and says why.
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

    /// Sends what is waiting and closes the connections, as the end of the process does.
    pub fn hang_up(&self) {
        match &self.link {
            CoordinatorLink::Local(coordinator) => coordinator.hang_up(),
            CoordinatorLink::Remote { messages, sender } => {
                drop(lock(messages).take());
                // It has only to write what it has; its panics would be our own bugs and harm nobody now.
                let _ = lock(sender).take().map(JoinHandle::join);
            }
        }
    }
}
