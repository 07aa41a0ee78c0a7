//! Hashes, locks and caches of the standard library's types. Every module may name these, and they name none.

mod bounded_cache;

pub(crate) use bounded_cache::BoundedCache;
