//! A rank's end of the office, and the office of ranks that share a process.

use std::collections::HashMap;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::ledger::{Ledger, To};
use super::note::{News, Note, Verdict};
use super::wire;

/// A rank's place: it sends notes to the office, which never wait, and reads the news.
#[derive(Debug)]
pub(in crate::comm) struct Desk {
    rank: usize,
    mailbox: Arc<Mailbox>,
    way: Way,
}

#[derive(Debug)]
enum Way {
    /// The office is in this process.
    Here(Arc<Office>),
    /// Notes go to a thread that sends them.
    There { notes: Mutex<Option<Sender<Note>>>, sender: Mutex<Option<JoinHandle<()>>> },
}

/// Where news lies until it is read.
#[derive(Debug, Default)]
pub(super) struct Mailbox {
    state: Mutex<Letters>,
    wake: Condvar,
    /// True once there is a verdict.
    is_final: AtomicBool,
}

#[derive(Debug, Default)]
struct Letters {
    verdict: Option<Verdict>,
    values: HashMap<String, Vec<u8>>,
    closing: bool,
}

/// The office: its book, and the way to every rank.
#[derive(Debug)]
pub(in crate::comm) struct Office {
    ledger: Mutex<Ledger>,
    over: Condvar,
    posts: Vec<Post>,
}

#[derive(Debug)]
pub(super) enum Post {
    Here(Arc<Mailbox>),
    There(Mutex<TcpStream>),
}

impl Desk {
    pub(super) fn here(rank: usize, mailbox: Arc<Mailbox>, office: Arc<Office>) -> Desk {
        Desk { rank, mailbox, way: Way::Here(office) }
    }

    pub(super) fn there(
        rank: usize,
        mailbox: Arc<Mailbox>,
        notes: Sender<Note>,
        sender: JoinHandle<()>,
    ) -> Desk {
        Desk {
            rank,
            mailbox,
            way: Way::There { notes: Mutex::new(Some(notes)), sender: Mutex::new(Some(sender)) },
        }
    }

    /// Sends a note; never waits for an answer.
    pub fn tell(&self, note: Note) {
        match &self.way {
            Way::Here(office) => office.take(self.rank, note),
            Way::There { notes, .. } => {
                if let Some(notes) = &*lock(notes) {
                    // A sender that is gone has lost the office, and its verdict says so.
                    let _ = notes.send(note);
                }
            }
        }
    }

    /// Why the world is given up, if it is.
    pub fn verdict(&self) -> Option<Verdict> {
        self.mailbox
            .is_final
            .load(Ordering::Acquire)
            .then(|| lock(&self.mailbox.state).verdict.clone())
            .flatten()
    }

    /// Waits for a verdict, but not longer than `at_most`.
    pub fn wait_for_verdict(&self, at_most: Duration) -> Option<Verdict> {
        self.mailbox.wait(at_most, |letters| letters.verdict.clone())
    }

    /// Gives bytes to whoever asks for them.
    pub fn put(&self, key: String, value: Vec<u8>) {
        self.tell(Note::Put { key, value });
    }

    /// Asks for bytes, and waits for them; none where there is a verdict instead, or nothing within `at_most`.
    pub fn get(&self, key: &str, at_most: Duration) -> Option<Vec<u8>> {
        self.tell(Note::Get { key: key.into() });
        let answer = |letters: &mut Letters| match letters.values.remove(key) {
            Some(value) => Some(Some(value)),
            None => letters.verdict.is_some().then_some(None),
        };
        self.mailbox.wait(at_most, answer).flatten()
    }

    /// Leaves: this rank's program is over. The office itself waits for the others, but not longer than `at_most`.
    pub fn leave(&self, at_most: Duration) {
        self.tell(Note::Ended);
        match &self.way {
            Way::Here(office) => office.close(at_most),
            Way::There { .. } => self.hang_up(),
        }
    }

    /// Leaves together with all others: waits until every rank's program is over, or the world is given up, and says why.
    #[cfg(feature = "mpi")]
    pub fn part(&self) -> Option<Verdict> {
        const LONG: Duration = Duration::from_secs(365 * 24 * 3600);
        self.tell(Note::Ended);
        match &self.way {
            Way::Here(office) => office.close(LONG),
            Way::There { .. } => {
                let over =
                    |letters: &mut Letters| (letters.closing || letters.verdict.is_some()).then_some(());
                self.mailbox.wait(LONG, over);
                self.hang_up();
            }
        }
        self.verdict()
    }

    /// Sends what is waiting and closes the connections, as the end of the process does.
    pub fn hang_up(&self) {
        match &self.way {
            Way::Here(office) => office.posts.iter().for_each(|post| {
                if let Post::There(stream) = post {
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

impl Mailbox {
    pub(super) fn put(&self, news: News) {
        let mut letters = lock(&self.state);
        match news {
            News::Verdict(verdict) => {
                letters.verdict.get_or_insert(verdict);
                self.is_final.store(true, Ordering::Release);
            }
            News::Value { key, value } => {
                letters.values.insert(key, value);
            }
            News::Closing => letters.closing = true,
        }
        self.wake.notify_all();
    }

    pub(super) fn is_closing(&self) -> bool {
        lock(&self.state).closing
    }

    fn wait<T>(&self, at_most: Duration, mut look: impl FnMut(&mut Letters) -> Option<T>) -> Option<T> {
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

impl Office {
    /// The desks of ranks that are threads of this process.
    pub fn desks(world_len: usize, deadline: Duration) -> Vec<Desk> {
        let boxes: Vec<Arc<Mailbox>> = (0..world_len).map(|_| Arc::default()).collect();
        let posts = boxes.iter().cloned().map(Post::Here).collect();
        let office = Office::new(posts, deadline);
        let desk = |(rank, mailbox)| Desk::here(rank, mailbox, office.clone());
        boxes.into_iter().enumerate().map(desk).collect()
    }

    pub(super) fn new(posts: Vec<Post>, deadline: Duration) -> Arc<Office> {
        let ledger = Mutex::new(Ledger::new(posts.len(), deadline.as_secs_f64()));
        Arc::new(Office { ledger, over: Condvar::new(), posts })
    }

    /// Takes a note, and tells what follows from it.
    pub(super) fn take(&self, from: usize, note: Note) {
        let ends = matches!(note, Note::Ended | Note::Failed { .. });
        let mut ledger = lock(&self.ledger);
        let news = ledger.take(from, note);
        // A verdict goes out before anybody else's note is taken: who then finds it decided may hang up at once.
        let decided = news.iter().any(|(_, news)| matches!(news, News::Verdict(_)));
        let _held = decided.then_some(ledger);
        for (to, news) in news {
            match to {
                To::Rank(rank) => self.posts[rank].put(news),
                To::All => self.posts.iter().for_each(|post| post.put(news.clone())),
            }
        }
        if ends || decided {
            self.over.notify_all();
        }
    }

    /// The connection of a rank in another process has ended.
    pub(super) fn lost(&self, rank: usize) {
        if !lock(&self.ledger).has_ended(rank) {
            self.take(rank, Note::Failed { cause: "its process ended without a word".into() });
        }
    }

    /// Waits for the ranks of other processes, and closes the connections.
    fn close(&self, at_most: Duration) {
        if self.posts.iter().all(|post| matches!(post, Post::Here(_))) {
            return;
        }
        let end = Instant::now() + at_most;
        let mut ledger = lock(&self.ledger);
        while !ledger.is_over() && Instant::now() < end {
            let left = end.saturating_duration_since(Instant::now());
            ledger = self.over.wait_timeout(ledger, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(ledger);
        for post in &self.posts {
            post.put(News::Closing);
            if let Post::There(stream) = post {
                // A connection that is closed already is as good.
                let _ = lock(stream).shutdown(Shutdown::Write);
            }
        }
    }
}

impl Post {
    fn put(&self, news: News) {
        match self {
            Post::Here(mailbox) => mailbox.put(news),
            // A rank that cannot be reached is reported by its connection's reader.
            Post::There(stream) => drop(wire::send(&mut *lock(stream), &news.encode())),
        }
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
