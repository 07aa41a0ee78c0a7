//! Optimizer steps, which update a parameter in place. One CUDA launch updates many parameters.

pub(super) mod adamw;
mod cuda;
pub(super) mod operands;
pub(super) mod param_loop;
pub(super) mod sgd;
