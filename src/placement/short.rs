//! Short constructors of placements, for a glob import in code that writes layouts by hand.
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

/// Short for [`Placement::Replicate`].
pub const R: Placement = Placement::Replicate;

/// Returns [`Placement::Shard`] of `dim`.
///
/// ```
/// use isoshard::placement::short::shard;
/// assert_eq!(shard(1).to_string(), "S1");
/// ```
pub fn shard(dim: usize) -> Placement {
    Placement::Shard(dim)
}

/// Returns [`Placement::Partial`] under `op`.
///
/// ```
/// use isoshard::{placement::short::partial, tensor::ReduceOp};
/// assert_eq!(partial(ReduceOp::Max).to_string(), "P(max)");
/// ```
pub fn partial(op: ReduceOp) -> Placement {
    Placement::Partial(op)
}

/// Returns [`Placement::RaggedShard`]: dims `0..dims` are flattened, and rank `i` owns the next `units[i]` blocks.
///
/// ```
/// use isoshard::placement::short::ragged;
/// assert_eq!(ragged(1, &[3, 0, 2]).to_string(), "RS(0..1; 3,0,2)");
/// ```
pub fn ragged(dims: usize, units: &[usize]) -> Placement {
    Placement::RaggedShard { dims, units: units.into() }
}
