//! Models of the engine. They are built apart from all else, since what threads synchronise with is another library's:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test --lib --target-dir target/loom comm::threads::models
//! RUSTFLAGS="--cfg shuttle" cargo test --lib --target-dir target/shuttle comm::threads::models
//! ```
//!
//! In both, nobody wakes by himself: waiting has no timeout, so a lost wake-up is a deadlock, which they report.

#[cfg(shuttle)]
mod programs;
#[cfg(loom)]
mod protocol;
