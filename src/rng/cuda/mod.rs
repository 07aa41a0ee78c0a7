//! Random numbers on a CUDA device: those of the fills of [`rng`](super), by bits, wherever a tensor's parts lie.
//!
//! What stands in `kernels/`: `philox.cuh` (words), `draws.cuh` (numbers), `random.cuh` (which thread makes which), a file
//! for each operator, and `random.cu` for what only fills. A thread makes what one block gives, so that part of a tensor costs
//! its share of the whole.
//!
//! Orthogonal matrices are made on the host, as every element depends on all others, and copied.

mod fills;
mod place;

pub(super) use fills::fill;
pub(crate) use fills::order;
pub(crate) use place::{DrawArg, Place, run_over};
