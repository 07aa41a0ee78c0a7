//! The threads of a kernel, and the results that they write in parts.

pub(crate) mod parts;
pub(crate) mod team;

pub use team::{MOST_THREADS, chosen_threads, given_threads};
