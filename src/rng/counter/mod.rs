//! Random bits by counter: Philox, the draws that number them, and the ranges of elements that read them.

pub(super) mod draw;
pub(super) mod generator;
pub(super) mod index_ranges;
pub mod philox;
