//! What one mesh axis does to a tensor.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::tensor::ReduceOp;

/// What one mesh axis does to a tensor. Written `R`, `S0`, `P(sum)`, `RS(0..1; 3,0,2)`.
#[derive(Clone, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Every rank along the axis holds the same values.
    Replicate,
    /// The ranks hold the [chunks](chunk) of this dim, in order.
    Shard(usize),
    /// Every rank holds a term for every index; the value is their reduction.
    Partial(ReduceOp),
    /// The flattened prefix of dims `0..dims` is cut into `sum(units)` equal blocks, of which rank `i` owns the next
    /// `units[i]`, possibly none.
    ///
    /// The local tensor keeps its dims where `dims` is 1. Otherwise the prefix becomes one dim: its shape is
    /// `[elements of the prefix, rest...]`.
    RaggedShard {
        /// How many leading dims are flattened; at least 1.
        dims: usize,
        /// The number of blocks of each rank along the axis.
        units: Arc<[usize]>,
    },
}

impl Placement {
    /// True for [`Placement::Replicate`].
    pub fn is_replicate(&self) -> bool {
        match self {
            Placement::Replicate => true,
            Placement::Shard(_) | Placement::Partial(_) | Placement::RaggedShard { .. } => false,
        }
    }

    /// True for [`Placement::Partial`] of any operation.
    pub fn is_partial(&self) -> bool {
        self.partial_op().is_some()
    }

    /// The operation of a [`Placement::Partial`].
    pub(crate) fn partial_op(&self) -> Option<ReduceOp> {
        match self {
            Placement::Partial(op) => Some(*op),
            Placement::Replicate | Placement::Shard(_) | Placement::RaggedShard { .. } => None,
        }
    }

    /// The dim of a [`Placement::Shard`].
    pub fn shard_dim(&self) -> Option<usize> {
        match self {
            Placement::Shard(dim) => Some(*dim),
            Placement::Replicate | Placement::Partial(_) | Placement::RaggedShard { .. } => None,
        }
    }

    /// The number of blocks of each rank, of a [`Placement::RaggedShard`].
    pub(crate) fn ragged_units(&self) -> Option<&[usize]> {
        match self {
            Placement::RaggedShard { units, .. } => Some(units),
            Placement::Replicate | Placement::Shard(_) | Placement::Partial(_) => None,
        }
    }

    /// The dims that are split among the ranks: one for `Shard`, the prefix for `RaggedShard`, else none.
    pub fn split_dims(&self) -> Range<usize> {
        match self {
            Placement::Shard(dim) => *dim..dim.saturating_add(1),
            Placement::RaggedShard { dims, .. } => 0..*dims,
            Placement::Replicate | Placement::Partial(_) => 0..0,
        }
    }

    /// True where `dim` is split among the ranks.
    pub fn splits(&self, dim: usize) -> bool {
        self.split_dims().contains(&dim)
    }

    /// True where both split some dim, so that it matters which is the outer one.
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

/// The indices of `0..n` that part `i` of `parts` holds under the ceil rule: `ceil(n / parts)` each, the last ones
/// shorter or empty, as PyTorch's `chunk` cuts. `parts` is at least 1 and `i` less than `parts`.
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
