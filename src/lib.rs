//! Eager SPMD distributed tensors.
//!
//! Every shard computes what the whole would.

pub mod comm;
pub mod dtensor;
mod error;
pub mod nn;
pub mod ops;
pub mod optim;
pub mod placement;
pub mod rng;
pub mod tensor;

pub use error::{CallId, CommFault, Error, Failure, Refusal, Result};
