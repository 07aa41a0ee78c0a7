//! Locks that ignore poisoning: what they guard is valid after every single step, so a panic leaves it usable.

use std::sync::{LockResult, Mutex, MutexGuard, PoisonError};

/// Locks a mutex, even if a thread panicked while it held it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    unpoisoned(mutex.lock())
}

/// Returns the guard or the value, poisoned or not, of other calls and of the locks of model checkers.
pub(crate) fn unpoisoned<T>(result: LockResult<T>) -> T {
    result.unwrap_or_else(PoisonError::into_inner)
}
