//! Short names for placements, to be imported whole where layouts are written by hand.
//!
//! ```
//! use isoshard::placement::{Layout, short::*};
//! use isoshard::tensor::ReduceOp;
//!
//! let layout = Layout::new([shard(0), R, partial(ReduceOp::Sum)]);
//! assert_eq!(layout.to_string(), "(S0, R, P(sum))");
//! ```

use super::Placement;
use crate::tensor::ReduceOp;

/// [`Placement::Replicate`].
pub const R: Placement = Placement::Replicate;

/// [`Placement::Shard`] of `dim`.
pub fn shard(dim: usize) -> Placement {
    Placement::Shard(dim)
}

/// [`Placement::Partial`] under `op`.
pub fn partial(op: ReduceOp) -> Placement {
    Placement::Partial(op)
}

/// [`Placement::RaggedShard`]: the flattened dims `0..dims`, rank `i` owning the next `units[i]` blocks.
pub fn ragged(dims: usize, units: &[usize]) -> Placement {
    Placement::RaggedShard { dims, units: units.into() }
}
