//! Reductions over dims: `sum`, `max`, `min`, `argmax`, `first_index`, and the sums of terms that
//! variances and norms are composed of; and `expand`, the transpose of `sum`.
//!
//! The loops of `sum`, `max` and `min` are [`tensor::cpu::reduce`](crate::tensor::cpu::reduce) and its CUDA counterpart.
//! `cpu` and `cuda` hold the kernels of `argmax` and `first_index`; `terms` has its own.
//!
//! Missing: `median` and `mode`; running sums and maxima along a dim; on CUDA devices, 2^32 elements in one `argmax`, which
//! is refused.

mod argmax;
mod blocks;
pub(super) mod cpu;
mod cuda;
pub(super) mod dims;
mod expand;
mod first_index;
mod inverse_power_of_two;
mod max;
mod min;
mod sum;
mod terms;

pub use argmax::Argmax;
pub use expand::Expand;
pub use first_index::FirstIndex;
pub(crate) use inverse_power_of_two::InversePowerOfTwo;
pub use max::{Max, MaxOrMin};
pub use min::Min;
pub use sum::{Sum, SumIn, WideSum};
pub use terms::TermSum;
pub use terms::sum_term::SumTerm;

use super::Sample;

/// Returns the samples of the family's operators.
pub(super) fn samples() -> Vec<Sample> {
    [
        argmax::samples(),
        expand::samples(),
        first_index::samples(),
        inverse_power_of_two::samples(),
        max::samples(),
        min::samples(),
        sum::samples(),
        terms::samples(),
    ]
    .concat()
}
