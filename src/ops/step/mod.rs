//! Steps of optimizers on a parameter, in place, and many at once on a device.

pub(super) mod adamw;
mod cuda;
pub(super) mod sgd;
