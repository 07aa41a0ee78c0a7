//! Mutexes whose holders may have panicked: what they guard is sound after every step.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Holds a mutex.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
