//! Mixture of experts: slots of tokens by expert, rows moved to slots and back, and products per expert.

pub(super) mod cpu;
mod cuda;
pub(super) mod expert_slots;
pub(super) mod group_sizes;
pub(super) mod grouped_matmul;
pub(super) mod grouped_matmul_grad;
pub(super) mod permute_tokens;
pub(super) mod unpermute_tokens;
