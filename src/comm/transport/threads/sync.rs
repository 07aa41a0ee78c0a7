//! The engine's synchronisation types: the standard library's, or those of the model checkers under `--cfg loom` and
//! `--cfg shuttle`. `models` says how to run them.

#[cfg(loom)]
pub(super) use loom::sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, atomic};
#[cfg(shuttle)]
pub(super) use shuttle::sync::{
    Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, atomic,
};
#[cfg(not(any(loom, shuttle)))]
pub(super) use std::sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, atomic};
