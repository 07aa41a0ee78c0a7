//! Operators that read, write, add and count by index.
//!
//! Missing: indices below 0, an index with smaller extents than the operand's other dims, `scatter_add` of u8 and
//! bools, and on CUDA devices `gather`, `scatter` and `scatter_add` of integers of more than 6 dims, which are refused; results whose size depends on values
//! (`nonzero`, selection by a bool mask); gradients of a table that store only the rows in use.

pub(super) mod bincount;
pub(super) mod cuda;
pub(super) mod embedding;
pub(super) mod embedding_grad;
pub(super) mod gather;
pub(super) mod last_write;
pub(super) mod linear_index;
pub(super) mod lines;
pub(super) mod rows;
pub(super) mod rows_cuda;
pub(super) mod scatter;
pub(super) mod scatter_add;
mod scatter_cuda;
pub(super) mod segments;
