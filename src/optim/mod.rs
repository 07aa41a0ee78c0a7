//! Optimizers, written on distributed tensors alone: they work on parameters however they lie, without communication
//! but for the global norm.

mod adamw;
mod clip;
mod schedule;
mod sgd;

pub use adamw::AdamW;
pub use clip::{clip_scale, global_norm};
pub use schedule::WarmupCosine;
pub use sgd::Sgd;
