//! Random numbers on a CUDA device, with the bits of the fills of [`rng`](super).
//!
//! `kernels/cuda/` has `philox.cuh` (words), `draws.cuh` (numbers), `random.cuh` (the elements of each thread), one file per random
//! operator, and `random.cu` for plain fills. A thread computes the numbers of one Philox block, so a shard costs its share of
//! the whole.
//!
//! Orthogonal matrices are computed on the host and copied, because each element depends on all others.

mod fills;
mod place;

pub(super) use fills::fill;
pub(crate) use fills::order;
pub(crate) use place::{DrawArg, Place, run_over};
