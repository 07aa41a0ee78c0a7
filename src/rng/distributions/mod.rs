//! From bits to numbers: the fills of each distribution, and distributions as values.

pub(super) mod continuous;
pub(super) mod counts;
pub(super) mod distribution;
pub(super) mod fill;
pub(super) mod gamma;
pub(super) mod integers;
pub(super) mod keep;
pub(super) mod poisson;
pub(super) mod random_element;
pub(super) mod rejection;
pub(super) mod sample;
pub(super) mod truncated;
pub(super) mod truncated_tail;
