//! Optimizers, written on distributed tensors alone: they work on parameters however they lie, without communication
//! but for the global norm.
//!
//! An optimizer of one's own is an operator ([`Op`](crate::ops::Op)) that makes a parameter's new value from the parameter, its
//! gradient and what is kept of it. [`Params::update`](crate::nn::Params::update) applies it to many parameters, in place, on
//! a device in one launch if it has kernels for that ([`Batched`](crate::ops::Batched)). `examples/07_own_optimizer.rs` is one.

mod adamw;
mod clip;
mod schedule;
mod sgd;

pub use adamw::AdamW;
pub use clip::{clip_scale, global_norm};
pub use schedule::WarmupCosine;
pub use sgd::Sgd;
