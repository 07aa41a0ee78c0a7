//! Matrix products, by our own kernels: the summation tree is folded inside the tile loop.
//!
//! An element of a product is the sum over a [tree](contraction) of leaves of at most 32 indices; a leaf is one chain of
//! fused multiply-adds in ascending order, begun with a product; nodes are added left plus right. That is a function of
//! the contraction's extents, of one row and one column. It does not depend on the rows and columns around it, on
//! strides, the batch, the place in a tile, the instruction set or the number of threads, so any slice of a product has
//! the bits of the whole; and a node of the tree computed apart has the bits it has inside, so the parts of a
//! contraction that is cut at nodes add up to the whole by bits. (NaNs stay NaNs; their payloads are not kept track of.)
//!
//! How it is computed: a [tile] holds a leaf's accumulators in registers and finished nodes on a small stack.
//! [`blocks`] has the loops around it, which take operands where they lie wherever that is quick, and [`pack`] them
//! otherwise; f16 and bf16 become f32 on that way. An [`epilogue`] takes finished sums: straight into the result, or
//! by way of a factor, a bias, a function, a rounding.

mod blocks;
mod contraction;
mod epilogue;
mod matrix;
mod pack;
mod product;
mod scratch;
mod tensors;
mod threads;
mod tile;
mod transpose;
mod vector;

pub use epilogue::UnaryF;
pub use matrix::{MatMut, MatRef};
pub use product::Gemm;
pub use tensors::{Unchanged, gemm, gemm_fused};
pub use threads::with_threads;
