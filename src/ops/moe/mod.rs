//! Mixture of experts: slots of tokens by expert, rows moved to slots and back, and products per expert.
//!
//! Missing: an exchange of rows between the ranks of sharded experts whose sizes come from data (without a capacity the
//! experts' matrices are gathered, or in fast mode the rows); routing in which experts choose tokens; more than one batch
//! dim in front of the tokens, which `expert_slots` refuses; on CUDA devices, 2^31 assignments in one call.

mod cpu;
mod cuda;
mod expert_slots;
mod group_sizes;
mod grouped_matmul;
mod grouped_matmul_grad;
mod permute_tokens;
mod unpermute_tokens;

pub use expert_slots::ExpertSlots;
pub use group_sizes::GroupSizes;
pub use grouped_matmul::GroupedMatmul;
pub use grouped_matmul_grad::GroupedMatmulGrad;
pub use permute_tokens::PermuteTokens;
pub use unpermute_tokens::UnpermuteTokens;

use super::Sample;

/// Returns the samples of the family's operators.
pub(super) fn samples() -> Vec<Sample> {
    [
        expert_slots::samples(),
        grouped_matmul::samples(),
        grouped_matmul_grad::samples(),
        permute_tokens::samples(),
        unpermute_tokens::samples(),
    ]
    .concat()
}
