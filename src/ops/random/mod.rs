//! Random operators: numbers with a parameter per element, categories by weight, random orders. [`rng`](crate::rng)
//! fills whole tensors with random numbers.

pub(super) mod bernoulli;
mod cuda;
pub(super) mod exponential;
pub(super) mod gamma;
pub(super) mod multinomial;
mod per_element;
pub(super) mod poisson;
pub(super) mod shuffle;
