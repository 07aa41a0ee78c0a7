//! The place where notices lie until a rank reads them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::message::{FirstFault, Notice};
use crate::comm::deadline::end_after;
use crate::comm::lock::lock;

/// A rank's notices.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    state: Mutex<InboxState>,
    wake: Condvar,
    /// True once there is a first fault.
    is_final: AtomicBool,
}

#[derive(Debug, Default)]
struct InboxState {
    first_fault: Option<FirstFault>,
    values: HashMap<String, Vec<u8>>,
    closing: bool,
}

impl Inbox {
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
            Notice::Closing => state.closing = true,
        }
        self.wake.notify_all();
    }

    pub fn first_fault(&self) -> Option<FirstFault> {
        // Asked in every turn of a rank that waits.
        self.is_final.load(Ordering::Acquire).then(|| lock(&self.state).first_fault.clone()).flatten()
    }

    pub fn is_closing(&self) -> bool {
        lock(&self.state).closing
    }

    /// Waits for a first fault, but not longer than `at_most`.
    pub fn wait_for_fault(&self, at_most: Duration) -> Option<FirstFault> {
        self.wait(at_most, |state| state.first_fault.clone())
    }

    /// Waits for the value of a key; none where there is a first fault instead, or nothing within `at_most`.
    pub fn wait_for_value(&self, key: &str, at_most: Duration) -> Option<Vec<u8>> {
        let answer = |state: &mut InboxState| match state.values.remove(key) {
            Some(value) => Some(Some(value)),
            None => state.first_fault.is_some().then_some(None),
        };
        self.wait(at_most, answer).flatten()
    }

    /// Waits until the connections close, or there is a first fault, but not longer than `at_most`.
    #[cfg(feature = "mpi")]
    pub fn wait_for_end(&self, at_most: Duration) {
        self.wait(at_most, |state| (state.closing || state.first_fault.is_some()).then_some(()));
    }

    fn wait<T>(&self, at_most: Duration, mut look: impl FnMut(&mut InboxState) -> Option<T>) -> Option<T> {
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
            state = self.wake.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
