//! Operators that read or add elements and rows by index.

pub(super) mod cuda;
pub(super) mod embedding;
pub(super) mod embedding_grad;
pub(super) mod gather;
pub(super) mod lines;
pub(super) mod scatter_add;
pub(super) mod segments;
