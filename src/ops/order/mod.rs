//! Operators that order the elements along a dim: `sort`, `topk` and `topk_blocks`.
//!
//! All follow one order: ascending by value, with -0 equal to 0 and NaN after every number; equal elements by their
//! index. Descending order reverses the values and not the indices, so NaN comes first and equal elements stay in the
//! order of their indices. This is PyTorch's order of a stable sort. Elements are copied, so zeros keep their sign.
//!
//! Missing: a sort that shards its dim, which is gathered instead; several dims at once; `unique`, whose size depends on
//! values; a dim of 2^32 elements or more, which is refused.

mod cuda;
mod sort;
mod topk;
mod topk_blocks;

pub use sort::Sort;
pub use topk::TopK;
pub use topk_blocks::TopKBlocks;

use super::{AxisPlacement, Meta, Row, Sample};
use crate::error::{Error, Result};

/// Returns the rows of an operator whose results have the operand's dims and which needs `dim` whole.
fn rows_but(x: &Meta, dim: usize) -> Vec<Row> {
    let others = (0..x.shape.len()).filter(|&d| d != dim);
    others.map(|d| Row::new([AxisPlacement::S(d)], [AxisPlacement::S(d); 2])).collect()
}

/// Refuses a dim that `x` does not have, and one whose indices do not fit 32 bits.
fn expect_dim(verb: &str, x: &Meta, dim: usize) -> Result<usize> {
    match x.shape.get(dim) {
        None => Err(Error::invalid(verb, "no such dim", format!("dim {dim} of {x}"), "")),
        Some(&n) if n > u32::MAX as usize => {
            Err(Error::unsupported(verb, "a dim of 2^32 elements or more", x.to_string(), "split it"))
        }
        Some(&n) => Ok(n),
    }
}

/// Returns the samples of the family's operators.
pub(super) fn samples() -> Vec<Sample> {
    [sort::samples(), topk::samples(), topk_blocks::samples()].concat()
}
