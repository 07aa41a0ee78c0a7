//! Model checks of the engine. They are built separately, because their threads synchronise by another library's
//! types:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test --lib --target-dir target/loom comm::transport::threads::models
//! RUSTFLAGS="--cfg shuttle" cargo test --lib --target-dir target/shuttle comm::transport::threads::models
//! ```
//!
//! In both, waiting has no timeout, so a lost wake-up is a deadlock, which the checker reports.

#[cfg(shuttle)]
mod programs;
#[cfg(loom)]
mod protocol;
