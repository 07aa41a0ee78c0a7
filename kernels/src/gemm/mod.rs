//! Matrix products whose sums follow a fixed tree, so that any slice of a product has the bits of the whole.
//!
//! An element of a product is a sum over a [tree](contraction) of leaves of at most 32 indices. A leaf is one chain of
//! fused multiply-adds in ascending order, which starts with a product; a node is its left half plus its right half.
//! The element depends on the contraction's extents and on one row and one column alone: not on neighbouring rows and
//! columns, strides, the batch, the position in a tile, the instruction set or the number of threads. A node that is
//! computed by itself has the same bits as inside the whole sum, so the parts of a contraction that is split at nodes
//! add up to the whole by bits. (A NaN stays a NaN; its payload is not kept.)
//!
//! A [tile](tiles::tile) holds a leaf's accumulators in registers and finished nodes on a small stack. [`block_loops`] has the
//! loops around the tile, which read operands in place if that is fast and else [pack](block_loops::pack) them; f16 and bf16
//! are converted to f32 while they are packed. [`banded`](block_loops::banded) has loops for products whose rows leave out columns
//! or indices. [`thin`] has the products of a few rows and a matrix that is read once, in the order in which it lies, with the kernels
//! of [lines](tiles::thin_tile) and of [strips](tiles::strip). [`blocking`](block_loops::blocking) fits the loops to the caches. An
//! [`epilogue`] stores finished sums: directly, with a factor and an added matrix or bias, or after a function and a rounding.

mod batched;
mod block_loops;
mod contraction;
mod epilogue;
mod matrix;
mod product;
mod thin;
mod threads;
mod tiles;

pub use batched::{Product, Stack};
pub(crate) use block_loops::banded::{Band, BandedProduct};
pub use block_loops::blocking::packs_lines;
pub use contraction::LeafRuns;
pub use matrix::{MatMut, MatRef, MatrixFault};
pub use product::{Gemm, LeafContraction, contraction_len};
