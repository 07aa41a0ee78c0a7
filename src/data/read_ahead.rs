//! Reading of later batches on a thread of its own.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use super::local_batch::{BatchShard, LocalBatch};
use super::source::{EpochOrder, TokenSource};
use crate::base::unpoisoned;
use crate::error::{Error, Result};

/// A thread that reads one rank's part of the batches from a sample on, a bounded number ahead. It ends when this value
/// is dropped, and after the first read that fails.
///
/// The batches' memory is that of the thread that takes them, whose limit counts it.
#[derive(Debug)]
pub(super) struct ReadAhead {
    part: BatchShard,
    /// The first sample of the batch that comes next.
    next: u64,
    /// The number of batches that the thread may read ahead, and of those that it has or has read.
    depth: usize,
    given: usize,
    /// Room for batches, and the batches. `None` while this value is dropped. The receiver is never locked: the mutex
    /// lets threads share an open [`Tokens`](super::Tokens).
    rooms: Option<Sender<LocalBatch>>,
    batches: Option<Mutex<Receiver<Result<LocalBatch>>>>,
    thread: Option<JoinHandle<()>>,
}

impl ReadAhead {
    /// Starts to read the batches that begin at sample `first`, up to `depth` of them ahead, at least one.
    ///
    /// # Errors
    /// Returns an error if there is no room for a batch, or if the system refuses a thread.
    pub fn start(source: &Arc<TokenSource>, part: BatchShard, first: u64, depth: usize) -> Result<ReadAhead> {
        let (rooms, empty) = channel::<LocalBatch>();
        let (sender, batches) = channel();
        let (source, of_rank) = (source.clone(), part.clone());
        let read = move || {
            let (mut sample, mut order) = (first, EpochOrder::default());
            for mut batch in empty {
                let read = source.read(sample, &of_rank, &mut order, &mut batch).map(|()| batch);
                let failed = read.is_err();
                if sender.send(read).is_err() || failed {
                    return;
                }
                sample += source.config().batch as u64;
            }
        };
        let (rooms, batches) = (Some(rooms), Some(Mutex::new(batches)));
        let mut ahead = ReadAhead { part, next: first, depth, given: 0, rooms, batches, thread: None };
        ahead.give_rooms()?;
        let thread = thread::Builder::new().name("isoshard-tokens".into()).spawn(read);
        let refused = |e: std::io::Error| {
            let (rule, remedy) = ("the system refuses a thread to read ahead", "set read_ahead to 0");
            Error::unsupported("tokens", rule, e.to_string(), remedy)
        };
        ahead.thread = Some(thread.map_err(refused)?);
        Ok(ahead)
    }

    /// Gives the thread room for the batches that it may read ahead.
    ///
    /// # Errors
    /// Returns an error if there is not even room for one.
    fn give_rooms(&mut self) -> Result<()> {
        while self.given < self.depth {
            let room = match LocalBatch::new(&self.part) {
                Err(_) if self.given > 0 => return Ok(()),
                room => room?,
            };
            // A thread that has ended takes no more; its last error comes first.
            if self.rooms.as_ref().is_none_or(|rooms| rooms.send(room).is_err()) {
                return Ok(());
            }
            self.given += 1;
        }
        Ok(())
    }

    /// Returns true if the next batch is this part of the batch at sample `first`.
    pub fn serves(&self, first: u64, part: &BatchShard) -> bool {
        self.next == first && self.part == *part
    }

    /// Waits for the next batch, of `batch` samples.
    ///
    /// # Errors
    /// Returns the error of the read, after which no batch follows, or an error if there is no room.
    pub fn take(&mut self, batch: usize) -> Result<LocalBatch> {
        self.give_rooms()?;
        let batches = self.batches.as_mut().expect("taken only when dropped");
        let batches = unpoisoned(batches.get_mut());
        let read =
            batches.recv().map_err(|_| Error::other("tokens: the thread that reads ahead has ended"))??;
        self.next += batch as u64;
        self.given -= 1;
        // Without room for all, the batches that are there are read first.
        let _ = self.give_rooms();
        Ok(read)
    }
}

impl Drop for ReadAhead {
    fn drop(&mut self) {
        // Without room and without a receiver the thread returns.
        (self.rooms, self.batches) = (None, None);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::config::TokensConfig;
    use super::super::token_file::{TokenFile, TokenWidth};
    use super::*;
    use crate::placement::Region;

    /// One file of zeros, in rows of 2 and batches of 3; a token that is outside the vocabulary stands at `bad`.
    fn source(name: &str, bad: Option<usize>) -> (Arc<TokenSource>, BatchShard) {
        let path = std::env::temp_dir().join(format!("isoshard-ahead-{name}-{}", std::process::id()));
        let mut bytes = [0; 202];
        bad.into_iter().for_each(|index| bytes[2 * index] = 9);
        fs::write(&path, bytes).unwrap();
        let file = TokenFile::open(&path, TokenWidth::U16).unwrap();
        fs::remove_file(path).unwrap();
        let config = TokensConfig { shuffle: None, ..TokensConfig::new(9, 2, 3, 1) };
        let source = TokenSource::open(vec![file], TokenWidth::U16, config).unwrap();
        (Arc::new(source), BatchShard::new(&Region::whole(&[3, 2].into()), (3, 2), false))
    }

    #[test]
    fn the_thread_ends_when_it_is_no_longer_read() {
        for taken in 0..3 {
            let (source, part) = source(&format!("ends-{taken}"), None);
            let mut ahead = ReadAhead::start(&source, part.clone(), 0, 2).unwrap();
            for _ in 0..taken {
                assert_eq!(ahead.take(3).unwrap().tokens.to_vec::<i64>().unwrap(), [0; 6]);
            }
            assert!(ahead.serves(3 * taken, &part) && !ahead.serves(3 * taken + 1, &part));
            drop(ahead);
            assert_eq!(Arc::strong_count(&source), 1, "the thread has let go of the files");
        }
    }

    #[test]
    fn no_more_batches_are_read_ahead_than_asked_for() {
        for depth in 1..4 {
            // The batch after those that may be read ahead would fail.
            let (source, part) = source(&format!("bound-{depth}"), Some(6 * depth + 1));
            let mut ahead = ReadAhead::start(&source, part, 0, depth).unwrap();
            thread::sleep(std::time::Duration::from_millis(30));
            assert!(!ahead.thread.as_ref().unwrap().is_finished(), "it waits before the read that fails");
            ahead.take(3).unwrap();
            // The thread may end at the next read, and takes no more room then.
            assert_eq!(ahead.given, depth, "a batch that is taken makes room for another");
            for _ in 1..depth {
                ahead.take(3).unwrap();
            }
            let failed = ahead.take(3).unwrap_err().to_string();
            assert!(
                failed.starts_with("tokens: a token is outside the vocabulary of 9; got token 9 at"),
                "{failed}"
            );
            let ended = ahead.take(3).unwrap_err().to_string();
            assert!(ended.contains("the thread that reads ahead has ended"), "{ended}");
        }
    }
}
