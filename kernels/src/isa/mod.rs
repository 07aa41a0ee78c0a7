//! Instruction sets and caches of the CPU, by which loops are compiled and sized.

pub(crate) mod caches;
pub(crate) mod map_slice;
pub mod simd;
