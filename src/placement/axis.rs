//! The placement of a tensor along one mesh axis.

use std::fmt;
use std::ops::Range;

use super::ragged_units::RaggedUnits;
use crate::tensor::ReduceOp;

/// The placement of a tensor along one mesh axis: replicated, sharded, or held as partial values.
///
/// Displayed and parsed as `R`, `S0`, `P(sum)` or `RS(0..1; 3,0,2)`. [`short`](super::short) has short constructors.
///
/// ```
/// use isoshard::placement::{Placement, short::*};
/// use isoshard::tensor::ReduceOp;
///
/// let placements = [R, shard(0), partial(ReduceOp::Sum), ragged(1, &[3, 0, 2])];
/// assert_eq!(placements[1], Placement::Shard(0));
/// assert_eq!(placements.each_ref().map(|p| p.to_string()), ["R", "S0", "P(sum)", "RS(0..1; 3,0,2)"]);
/// assert_eq!("P(sum)".parse::<Placement>()?, placements[2]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Every rank along the axis holds the same values.
    Replicate,
    /// Each rank along the axis holds one [chunk](chunk) of this dim, in rank order.
    Shard(usize),
    /// Each rank holds a partial value for every index; the tensor's value is their reduction by this operation.
    Partial(ReduceOp),
    /// The flattened dims `0..dims` are split into `sum(units)` equal blocks. Rank `i` owns the next `units[i]` blocks,
    /// possibly none.
    ///
    /// If `dims` is 1 the local tensor keeps its dims. Otherwise the flattened dims become one dim, and the local shape
    /// is `[elements of the prefix, rest...]`.
    RaggedShard {
        /// The number of leading dims that are flattened; at least 1.
        dims: usize,
        /// The number of blocks that each rank along the axis owns.
        units: RaggedUnits,
    },
}

impl From<&Placement> for Placement {
    fn from(placement: &Placement) -> Placement {
        placement.clone()
    }
}

impl Placement {
    /// Returns true for [`Placement::Replicate`].
    ///
    /// ```
    /// use isoshard::placement::short::*;
    /// assert!(R.is_replicate() && !shard(0).is_replicate());
    /// ```
    pub fn is_replicate(&self) -> bool {
        match self {
            Placement::Replicate => true,
            Placement::Shard(_) | Placement::Partial(_) | Placement::RaggedShard { .. } => false,
        }
    }

    /// Returns true for [`Placement::Partial`] with any operation.
    ///
    /// ```
    /// use isoshard::{placement::short::*, tensor::ReduceOp};
    /// assert!(partial(ReduceOp::Max).is_partial() && !shard(0).is_partial());
    /// ```
    pub fn is_partial(&self) -> bool {
        self.partial_op().is_some()
    }

    /// Returns the operation of a [`Placement::Partial`], otherwise `None`.
    pub(crate) fn partial_op(&self) -> Option<ReduceOp> {
        match self {
            Placement::Partial(op) => Some(*op),
            Placement::Replicate | Placement::Shard(_) | Placement::RaggedShard { .. } => None,
        }
    }

    /// Returns the dim of a [`Placement::Shard`], otherwise `None`; a ragged shard has no single dim.
    ///
    /// ```
    /// use isoshard::placement::short::*;
    /// assert_eq!([R, shard(1), ragged(1, &[2, 3])].map(|p| p.shard_dim()), [None, Some(1), None]);
    /// ```
    pub fn shard_dim(&self) -> Option<usize> {
        match self {
            Placement::Shard(dim) => Some(*dim),
            Placement::Replicate | Placement::Partial(_) | Placement::RaggedShard { .. } => None,
        }
    }

    /// Returns the number of blocks per rank of a [`Placement::RaggedShard`], otherwise `None`.
    pub(crate) fn ragged_units(&self) -> Option<&RaggedUnits> {
        match self {
            Placement::RaggedShard { units, .. } => Some(units),
            Placement::Replicate | Placement::Shard(_) | Placement::Partial(_) => None,
        }
    }

    /// Returns the dims that this placement splits: one for `Shard`, the flattened prefix for `RaggedShard`,
    /// otherwise none.
    ///
    /// ```
    /// use isoshard::placement::short::*;
    /// assert_eq!(shard(1).split_dims(), 1..2);
    /// assert_eq!(ragged(2, &[2, 3]).split_dims(), 0..2);
    /// ```
    pub fn split_dims(&self) -> Range<usize> {
        match self {
            Placement::Shard(dim) => *dim..dim.saturating_add(1),
            Placement::RaggedShard { dims, .. } => 0..*dims,
            Placement::Replicate | Placement::Partial(_) => 0..0,
        }
    }

    /// Returns true if this placement splits `dim` among the ranks.
    ///
    /// ```
    /// use isoshard::placement::short::*;
    /// assert!(shard(1).splits(1) && !shard(1).splits(0));
    /// assert!(ragged(2, &[2, 3]).splits(0) && ragged(2, &[2, 3]).splits(1));
    /// ```
    pub fn splits(&self, dim: usize) -> bool {
        self.split_dims().contains(&dim)
    }

    /// Returns true if both placements split a common dim, so that the order of the two axes matters.
    pub(crate) fn meets(&self, other: &Placement) -> bool {
        let (a, b) = (self.split_dims(), other.split_dims());
        a.start.max(b.start) < a.end.min(b.end)
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Placement::Replicate => f.write_str("R"),
            Placement::Shard(dim) => write!(f, "S{dim}"),
            Placement::Partial(op) => write!(f, "P({op})"),
            Placement::RaggedShard { dims, units } => {
                write!(f, "RS(0..{dims}; ")?;
                for (i, n) in units.iter().enumerate() {
                    write!(f, "{}{n}", if i == 0 { "" } else { "," })?;
                }
                f.write_str(")")
            }
        }
    }
}

impl fmt::Debug for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Returns the indices of `0..n` in part `i` of `parts`, by the ceil rule: each part has `ceil(n / parts)` indices, and
/// the last parts are shorter or empty. PyTorch's `chunk` splits the same way. `parts` is at least 1, and `i < parts`.
///
/// ```
/// use isoshard::placement::chunk;
/// assert_eq!([0, 1, 2, 3].map(|i| chunk(5, 4, i)), [0..2, 2..4, 4..5, 5..5]);
/// ```
pub fn chunk(n: usize, parts: usize, i: usize) -> Range<usize> {
    debug_assert!(i < parts, "part {i} of {parts}");
    let each = n.div_ceil(parts);
    let start = i.saturating_mul(each).min(n);
    start..start.saturating_add(each).min(n)
}
