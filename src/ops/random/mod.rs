//! Operators that draw: numbers with a parameter for each element, categories by their weights, random orders. Fills of whole
//! tensors are [`rng`](crate::rng)'s.

pub(super) mod bernoulli;
mod cuda;
pub(super) mod exponential;
pub(super) mod gamma;
pub(super) mod multinomial;
mod per_element;
pub(super) mod poisson;
pub(super) mod shuffle;
