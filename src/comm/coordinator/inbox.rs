//! A rank's received notices.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use super::message::{FirstFault, Notice};
use crate::base::{lock, unpoisoned};
use crate::comm::calls::Sequence;
use crate::comm::deadline::end_after;

/// The key of a wait: the group's number, and the call's sequence and number in it.
pub(in crate::comm) type WaitKey = (u64, Sequence, u64);

/// The notices that a rank has received and not read.
#[derive(Debug, Default)]
pub(super) struct NoticeInbox {
    state: Mutex<NoticeInboxState>,
    wake: Condvar,
    /// True once there is a first fault, to be read without the lock.
    is_final: AtomicBool,
}

#[derive(Debug, Default)]
struct NoticeInboxState {
    first_fault: Option<FirstFault>,
    values: HashMap<String, Vec<u8>>,
    /// The answers to messages of calls that are late.
    times: HashMap<WaitKey, Duration>,
    closing: bool,
}

impl NoticeInbox {
    pub fn put(&self, notice: Notice) {
        let mut state = lock(&self.state);
        match notice {
            Notice::FirstFault(fault) => {
                state.first_fault.get_or_insert(fault);
                self.is_final.store(true, Ordering::Release);
            }
            Notice::Value { key, value } => {
                state.values.insert(key, value);
            }
            Notice::WaitOn { group, sequence, seq, time } => {
                state.times.insert((group, sequence, seq), time);
            }
            Notice::Closing => state.closing = true,
        }
        self.wake.notify_all();
    }

    pub fn first_fault(&self) -> Option<FirstFault> {
        // A waiting rank asks this in every turn of its loop.
        self.is_final.load(Ordering::Acquire).then(|| lock(&self.state).first_fault.clone()).flatten()
    }

    pub fn is_closing(&self) -> bool {
        lock(&self.state).closing
    }

    /// Waits for a first fault for at most `at_most`.
    pub fn wait_for_fault(&self, at_most: Duration) -> Option<FirstFault> {
        self.wait(at_most, |state| state.first_fault.clone())
    }

    /// Waits for the value of a key. Returns `None` if there is a first fault instead, or after `at_most`.
    pub fn wait_for_value(&self, key: &str, at_most: Duration) -> Option<Vec<u8>> {
        let answer = |state: &mut NoticeInboxState| match state.values.remove(key) {
            Some(value) => Some(Some(value)),
            None => state.first_fault.is_some().then_some(None),
        };
        self.wait(at_most, answer).flatten()
    }

    /// Waits for the time for which a late call waits on. Returns `None` if there is a first fault instead, or after
    /// `at_most`.
    pub fn wait_for_time(&self, key: WaitKey, at_most: Duration) -> Option<Duration> {
        let answer = |state: &mut NoticeInboxState| match state.times.remove(&key) {
            Some(time) => Some(Some(time)),
            None => state.first_fault.is_some().then_some(None),
        };
        self.wait(at_most, answer).flatten()
    }

    /// Waits until the connections close or there is a first fault, for at most `at_most`.
    #[cfg(feature = "mpi")]
    pub fn wait_for_end(&self, at_most: Duration) {
        self.wait(at_most, |state| (state.closing || state.first_fault.is_some()).then_some(()));
    }

    fn wait<T>(
        &self,
        at_most: Duration,
        mut look: impl FnMut(&mut NoticeInboxState) -> Option<T>,
    ) -> Option<T> {
        let end = end_after(at_most);
        let mut state = lock(&self.state);
        loop {
            if let Some(found) = look(&mut state) {
                return Some(found);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            state = unpoisoned(self.wake.wait_timeout(state, left)).0;
        }
    }
}
