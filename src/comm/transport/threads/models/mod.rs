//! Models of the engine. They are built apart from all else, since their threads synchronise by another library's types:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test --lib --target-dir target/loom comm::transport::threads::models
//! RUSTFLAGS="--cfg shuttle" cargo test --lib --target-dir target/shuttle comm::transport::threads::models
//! ```
//!
//! In both, no thread wakes unasked: waiting has no timeout, so a lost wake-up is a deadlock, which they report.

#[cfg(shuttle)]
mod programs;
#[cfg(loom)]
mod protocol;
