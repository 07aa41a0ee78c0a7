//! Reading of later batches on a thread of its own.

use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use super::source::{BatchPart, EpochOrder, LocalBatch, TokenSource};
use crate::error::{Error, Result};

/// A thread that reads one rank's part of the batches from a sample on, a bounded number ahead. It ends when this value is
/// dropped, and after the first read that fails.
#[derive(Debug)]
pub(super) struct ReadAhead {
    part: BatchPart,
    /// The first sample of the batch that comes next.
    next: u64,
    /// `None` while this value is dropped. Never locked: the mutex lets threads share an open [`Tokens`](super::Tokens).
    batches: Option<Mutex<Receiver<Result<LocalBatch>>>>,
    thread: Option<JoinHandle<()>>,
}

impl ReadAhead {
    /// Starts to read the batches that begin at sample `first`, up to `depth` of them ahead, at least one.
    pub fn start(source: &Arc<TokenSource>, part: BatchPart, first: u64, depth: usize) -> Result<ReadAhead> {
        // The thread holds one batch more than the channel.
        let (sender, batches) = sync_channel(depth - 1);
        let (source, of_rank) = (source.clone(), part.clone());
        let read = move || {
            let (mut at, mut order) = (first, EpochOrder::default());
            loop {
                let batch = source.read(at, &of_rank, &mut order);
                let failed = batch.is_err();
                if sender.send(batch).is_err() || failed {
                    return;
                }
                at += source.config().batch as u64;
            }
        };
        let thread = thread::Builder::new().name("isoshard-tokens".into()).spawn(read);
        let thread = thread.map_err(|e| Error::other(format!("tokens: no thread to read ahead: {e}")))?;
        Ok(ReadAhead { part, next: first, batches: Some(Mutex::new(batches)), thread: Some(thread) })
    }

    /// Returns true if the next batch is this part of the batch at sample `first`.
    pub fn serves(&self, first: u64, part: &BatchPart) -> bool {
        self.next == first && self.part == *part
    }

    /// Waits for the next batch, of `batch` samples.
    ///
    /// # Errors
    /// Returns the error of the read, after which no batch follows.
    pub fn take(&mut self, batch: usize) -> Result<LocalBatch> {
        let batches = self.batches.as_mut().expect("taken only when dropped");
        let batches = batches.get_mut().unwrap_or_else(PoisonError::into_inner);
        let read =
            batches.recv().map_err(|_| Error::other("tokens: the thread that reads ahead has ended"))??;
        self.next += batch as u64;
        Ok(read)
    }
}

impl Drop for ReadAhead {
    fn drop(&mut self) {
        // Without a receiver the thread's next send fails, and the thread returns.
        self.batches = None;
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
    fn source(name: &str, bad: Option<usize>) -> (Arc<TokenSource>, BatchPart) {
        let path = std::env::temp_dir().join(format!("isoshard-ahead-{name}-{}", std::process::id()));
        let mut bytes = [0; 202];
        bad.into_iter().for_each(|at| bytes[2 * at] = 9);
        fs::write(&path, bytes).unwrap();
        let file = TokenFile::open(&path, TokenWidth::U16).unwrap();
        fs::remove_file(path).unwrap();
        let config = TokensConfig { shuffle: None, ..TokensConfig::new(9, 2, 3, 1) };
        let source = TokenSource::open(vec![file], TokenWidth::U16, config).unwrap();
        (Arc::new(source), BatchPart::new(&Region::whole(&[3, 2].into()), 3, 2))
    }

    #[test]
    fn the_thread_ends_when_it_is_no_longer_read() {
        for taken in 0..3 {
            let (source, part) = source(&format!("ends-{taken}"), None);
            let mut ahead = ReadAhead::start(&source, part.clone(), 0, 2).unwrap();
            for _ in 0..taken {
                assert_eq!(ahead.take(3).unwrap().tokens, [0; 6]);
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
            for _ in 0..depth {
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
