//! Operators that draw: numbers with a parameter for each element, categories by their weights, random orders. Fills of whole
//! tensors are [`rng`](crate::rng)'s.

pub(super) mod bernoulli;
mod cuda;
mod each;
pub(super) mod exponential;
pub(super) mod gamma;
pub(super) mod multinomial;
pub(super) mod poisson;
pub(super) mod shuffle;
