//! Matrix products on a CUDA device: by our own kernels with the processor's bits, or by the vendor's library.
//!
//! The kernels (`kernels/matmul.cuh`) follow the same summation tree as [`cpu::gemm`](crate::tensor::cpu::gemm()): same leaves,
//! same chains, same joins, whatever the tile and however long contractions are cut. The library is quicker, uses matrix
//! units, and sums in an order of its own.
//!
//! Missing: fused biases and functions; matrix units in exact mode, for f16 and bf16.

mod exact;
mod fast;
mod plan;
mod product;
mod tree;

pub use fast::set_tf32;
pub use product::gemm;
