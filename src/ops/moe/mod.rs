//! Mixture of experts: slots of tokens by expert, rows moved to slots and back, and products per expert.
//!
//! Missing: an exchange of rows between the ranks of sharded experts whose sizes come from data (without a capacity the
//! experts' matrices are gathered, or in fast mode the rows); routing in which experts choose tokens; more than one batch
//! dim in front of the tokens, which `expert_slots` refuses; on CUDA devices, 2^31 assignments in one call.

pub(super) mod cpu;
mod cuda;
pub(super) mod expert_slots;
pub(super) mod group_sizes;
pub(super) mod grouped_matmul;
pub(super) mod grouped_matmul_grad;
pub(super) mod permute_tokens;
pub(super) mod unpermute_tokens;
