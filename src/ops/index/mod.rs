//! Operators that read, write, add and count by index.
//!
//! Missing: indices below 0, an index with smaller extents than the operand's other dims, `scatter_add` of u8 and
//! bools, and on CUDA devices `gather`, `scatter` and `scatter_add` of integers of more than 6 dims, which are refused; results whose size depends on values
//! (`nonzero`, selection by a bool mask); gradients of a table that store only the rows in use.

mod bincount;
pub(super) mod cuda;
mod embedding;
mod embedding_grad;
mod gather;
mod last_write;
mod linear_index;
pub(super) mod lines;
pub(super) mod radix;
pub(super) mod rows;
pub(super) mod rows_cuda;
mod scatter;
mod scatter_add;
mod scatter_cuda;
pub(super) mod segments;

pub use bincount::Bincount;
pub use embedding::Embedding;
pub use embedding_grad::EmbeddingGrad;
pub use gather::Gather;
pub use last_write::LastWrite;
pub use linear_index::LinearIndex;
pub use scatter::{Scatter, ScatterRule};
pub use scatter_add::ScatterAdd;

use super::Sample;

/// Returns the samples of the family's operators.
pub(super) fn samples() -> Vec<Sample> {
    [
        bincount::samples(),
        embedding::samples(),
        embedding_grad::samples(),
        gather::samples(),
        last_write::samples(),
        linear_index::samples(),
        scatter::samples(),
        scatter_add::samples(),
    ]
    .concat()
}
