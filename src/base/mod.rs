//! Hashes, locks and a bounded cache. Every module may name them; they know no type of another module.

mod bounded_cache;
mod hash;
mod lock;

pub(crate) use bounded_cache::BoundedCache;
pub(crate) use hash::Fnv1a;
#[cfg(any(test, feature = "testing"))]
pub(crate) use hash::mix;
pub(crate) use lock::{lock, unpoisoned};
