//! Mutexes whose holders may have panicked: what they guard is sound after every step.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, whoever panicked while holding it.
pub(in crate::comm) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
