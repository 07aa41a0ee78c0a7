//! Hashes, locks and caches of the standard library's types. Every module may name these, and they name none.

mod bounded_cache;
mod hash;
mod lock;

pub(crate) use bounded_cache::BoundedCache;
pub(crate) use hash::Fnv1a;
#[cfg(any(test, feature = "testing"))]
pub(crate) use hash::mix;
pub(crate) use lock::{lock, unpoisoned};
