//! Operators that read, write, add and count by index.

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
