//! Matrix products on a CUDA device: exact ones with the bits of the CPU, or fast ones by the vendor's library.
//!
//! The exact kernels (`kernels/cuda/matmul.cuh`) follow the summation tree of [`cpu::gemm`](crate::tensor::cpu::gemm()):
//! the leaves, their chains and the joins do not depend on the tile, nor on the parts into which a contraction is
//! cut. The library is faster, uses matrix units, and sums in its own order.
//!
//! Missing: fused biases and functions; matrix units in exact mode, for f16 and bf16.

mod exact;
mod fast;
mod plan;
mod product;
mod tree;

pub use fast::set_tf32;
pub use product::gemm;
