//! The types that the engine synchronises by: the standard library's, or under `--cfg loom` and `--cfg shuttle` those of the
//! model checkers, which try the orders in which threads can run. The tests that use them say how to run them.

#[cfg(loom)]
pub(super) use loom::sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, atomic};
#[cfg(shuttle)]
pub(super) use shuttle::sync::{
    Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, atomic,
};
#[cfg(not(any(loom, shuttle)))]
pub(super) use std::sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, atomic};
