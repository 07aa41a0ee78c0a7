//! Random operators: numbers with a parameter per element, categories by weight, random orders. [`rng`](crate::rng)
//! fills whole tensors with random numbers.

mod bernoulli;
mod cuda;
mod exponential;
mod gamma;
mod multinomial;
mod per_element;
mod poisson;
mod shuffle;

pub use bernoulli::Bernoulli;
pub use exponential::Exponential;
pub use gamma::Gamma;
pub use multinomial::Multinomial;
pub use poisson::Poisson;
pub use shuffle::Shuffle;

use super::Sample;

/// Returns the samples of the family's operators.
pub(super) fn samples() -> Vec<Sample> {
    [
        bernoulli::samples(),
        exponential::samples(),
        gamma::samples(),
        multinomial::samples(),
        poisson::samples(),
        shuffle::samples(),
    ]
    .concat()
}
