//! Sharding rows: an operator's rules for one mesh axis.

use std::fmt;

use smallvec::SmallVec;

use crate::placement::Leaf;
use crate::tensor::{ReduceOp, short_list};

/// The placement of one operand or result in a row: what the row's mesh axis does to it.
///
/// ```
/// use isoshard::{ops::AxisPlacement, tensor::ReduceOp};
/// assert_eq!(AxisPlacement::R.to_string(), "R");
/// assert_eq!(AxisPlacement::S(1).to_string(), "S1");
/// assert_eq!(AxisPlacement::P(ReduceOp::Max).to_string(), "P(max)");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum AxisPlacement {
    /// Replicated: every rank stores the same elements.
    R,
    /// Sharded along a dim. Each rank stores `ceil(n / ranks)` consecutive indices; the last ranks store fewer or none.
    S(usize),
    /// Partial: every rank stores a contribution of the full shape, and the tensor is their sum, maximum or minimum.
    P(ReduceOp),
    /// Partial sum in the order of the reduction tree. For results only: each rank has the sum over its shard of the
    /// reduced dims.
    ///
    /// Each row that has this placement shards one reduced dim. The rows are listed in the tree's order of dims,
    /// outermost first. An operator with such rows promises that its kernel, run on the indices of one node of the
    /// tree, returns that node's bits.
    TreeSum(Leaf),
    /// Ragged over leading dims. All `Ragged` placements of a row have the same dims and units.
    Ragged,
    /// Ragged over this many leading dims, with the units of the row's `Ragged` operand. For results only, and only in
    /// rows for an axis that states how the operand is cut ([`MeshAxis::ragged`]).
    RaggedOver(usize),
}

/// One sharding rule for one mesh axis: if the operands have the placements `ins`, the results have the placements
/// `outs`.
///
/// ```
/// use isoshard::ops::{AxisPlacement, Row};
/// // A linear layer `x wᵀ` whose weight is sharded on dim 0: each rank computes some columns.
/// let row = Row::new([AxisPlacement::R, AxisPlacement::S(0)], [AxisPlacement::S(1)]);
/// assert_eq!(format!("{row:?}"), "R S0 -> S1");
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Row {
    /// One placement per operand.
    pub ins: SmallVec<[AxisPlacement; 4]>,
    /// One placement per result.
    pub outs: SmallVec<[AxisPlacement; 4]>,
    /// True if the results have the same bits as on a single rank. False if they differ by rounding, because a sum is
    /// computed in another order. Only [`Reduction::Fast`](crate::dtensor::Reduction::Fast) uses rows with `false`.
    pub by_bits: bool,
}

/// The mesh axis for which [`Op::rows`](super::Op::rows) lists rows.
///
/// ```
/// use isoshard::ops::MeshAxis;
/// let axis = MeshAxis::new(4);
/// assert_eq!((axis.ranks, axis.pieces(0)), (4, 4));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MeshAxis {
    /// The number of ranks along the axis.
    pub ranks: usize,
    /// For each dim of the first operand, the number of pieces into which the other axes split it.
    others: [usize; MeshAxis::DIMS],
    ragged: Option<RaggedCut>,
}

/// The cut of an operand that is ragged along a mesh axis: how many dims are flattened, and into how many blocks.
///
/// `RS(0..2; 3,0,9)` cuts two dims into twelve blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RaggedCut {
    /// The number of leading dims that are flattened; at least 1.
    pub dims: usize,
    /// The number of equal blocks into which they are split, over all ranks; at least 1.
    pub blocks: usize,
}

/// The algebraic property of an operator that decides which partial operands it accepts without reducing them first.
///
/// ```
/// use isoshard::ops::Algebra;
/// // x · y is linear in each factor: a partial sum may be multiplied by a replicated factor.
/// assert_eq!(format!("{:?}", Algebra::Multilinear.rows(2)), "[P(sum) R -> P(sum), R P(sum) -> P(sum)]");
/// assert!(Algebra::Opaque.rows(2).is_empty());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algebra {
    /// No known property: partial operands are reduced first.
    Opaque,
    /// `f(a + a', b + b') = f(a, b) + f(a', b')`: either all operands are partial sums, or none.
    Additive,
    /// Linear in the first operand: it alone may be a partial sum, the others are replicated.
    Linear,
    /// Linear in each operand: any one may be a partial sum, the others are replicated.
    Multilinear,
    /// Moves or repeats elements without computing with them: any partial is accepted.
    Structural,
    /// Never decreases in any operand, bit for bit: either all operands are partial maxima (or all minima), or none.
    Monotone,
}

impl AxisPlacement {
    /// A partial sum.
    pub const SUM: AxisPlacement = AxisPlacement::P(ReduceOp::Sum);

    /// Returns true for [`AxisPlacement::R`].
    pub(crate) fn is_replicated(self) -> bool {
        match self {
            AxisPlacement::R => true,
            AxisPlacement::S(_)
            | AxisPlacement::P(_)
            | AxisPlacement::TreeSum(_)
            | AxisPlacement::Ragged
            | AxisPlacement::RaggedOver(_) => false,
        }
    }

    /// Returns true for [`AxisPlacement::SUM`].
    pub(crate) fn is_sum(self) -> bool {
        match self {
            AxisPlacement::P(op) => op == ReduceOp::Sum,
            AxisPlacement::R
            | AxisPlacement::S(_)
            | AxisPlacement::TreeSum(_)
            | AxisPlacement::Ragged
            | AxisPlacement::RaggedOver(_) => false,
        }
    }

    /// Returns true for [`AxisPlacement::Ragged`] and [`AxisPlacement::RaggedOver`].
    pub(crate) fn is_ragged(self) -> bool {
        match self {
            AxisPlacement::Ragged | AxisPlacement::RaggedOver(_) => true,
            AxisPlacement::R | AxisPlacement::S(_) | AxisPlacement::P(_) | AxisPlacement::TreeSum(_) => false,
        }
    }

    /// Returns the dim of an [`AxisPlacement::S`].
    pub(crate) fn dim(self) -> Option<usize> {
        match self {
            AxisPlacement::S(dim) => Some(dim),
            AxisPlacement::R
            | AxisPlacement::P(_)
            | AxisPlacement::TreeSum(_)
            | AxisPlacement::Ragged
            | AxisPlacement::RaggedOver(_) => None,
        }
    }

    /// Returns the form of the reduction tree's leaves of an [`AxisPlacement::TreeSum`].
    pub(crate) fn tree_leaf(self) -> Option<Leaf> {
        match self {
            AxisPlacement::TreeSum(leaf) => Some(leaf),
            AxisPlacement::R
            | AxisPlacement::S(_)
            | AxisPlacement::P(_)
            | AxisPlacement::Ragged
            | AxisPlacement::RaggedOver(_) => None,
        }
    }
}

/// A number of pieces that divides no extent but 0.
const UNEVEN: usize = usize::MAX >> 8;

impl MeshAxis {
    /// The number of entries of `others`. The last entry stands for all further dims together.
    const DIMS: usize = 8;

    /// Creates an axis of `ranks` ranks in a mesh whose other axes do not shard the first operand.
    pub fn new(ranks: usize) -> MeshAxis {
        MeshAxis { ranks, others: [1; MeshAxis::DIMS], ragged: None }
    }

    /// Adds that an operand is ragged along this axis.
    pub(crate) fn with_ragged(self, cut: RaggedCut) -> MeshAxis {
        MeshAxis { ragged: Some(cut), ..self }
    }

    /// Returns the cut of the operands that are ragged along this axis; `None` if there are none.
    pub fn ragged(&self) -> Option<RaggedCut> {
        self.ragged
    }

    /// Returns the axis with as many ranks as make pieces of one index of dim `dim`, of `extent` indices: a row that
    /// holds there holds for every cut between two indices.
    pub(crate) fn cut_at_each_index(self, dim: usize, extent: usize) -> MeshAxis {
        let others = self.pieces(dim) / self.ranks;
        MeshAxis { ranks: extent.div_ceil(others).max(1), ragged: None, ..self }
    }

    /// Adds that another axis of `ranks` ranks shards dim `dim` of the first operand.
    pub(crate) fn with_split(mut self, dim: usize, ranks: usize) -> MeshAxis {
        let others = &mut self.others[dim.min(MeshAxis::DIMS - 1)];
        *others = others.saturating_mul(ranks).min(UNEVEN);
        self
    }

    /// Adds that another axis shards dim `dim` of the first operand raggedly: no extent is cut evenly.
    pub(crate) fn with_ragged_split(mut self, dim: usize) -> MeshAxis {
        self.others[dim.min(MeshAxis::DIMS - 1)] = UNEVEN;
        self
    }

    /// Returns the number of pieces of dim `dim` of the first operand if this axis shards it too. An extent that is a
    /// multiple of this number is cut evenly in any order of the axes. The number equals `ranks` if no other axis
    /// shards the dim. If another axis shards it raggedly, the number is larger than any extent.
    pub fn pieces(&self, dim: usize) -> usize {
        self.ranks.saturating_mul(self.others[dim.min(MeshAxis::DIMS - 1)]).min(UNEVEN)
    }
}

impl Row {
    /// Creates a row. [`Row::by_bits`] is set unless the row has a partial sum ([`AxisPlacement::SUM`]); [`Row::exact`]
    /// sets it for such rows.
    ///
    /// ```
    /// use isoshard::ops::{AxisPlacement, Row};
    /// assert!(Row::new([AxisPlacement::S(0)], [AxisPlacement::S(0)]).by_bits);
    /// assert!(!Row::new([AxisPlacement::SUM], [AxisPlacement::SUM]).by_bits);
    /// ```
    pub fn new(
        ins: impl IntoIterator<Item = AxisPlacement>,
        outs: impl IntoIterator<Item = AxisPlacement>,
    ) -> Row {
        let mut row = Row { ins: short_list(ins), outs: short_list(outs), by_bits: true };
        row.by_bits = !row.ins.iter().chain(&row.outs).any(|s| s.is_sum());
        row
    }

    /// States that the results have the same bits as on a single rank although the row has a partial sum.
    ///
    /// That is so in two cases: the operator only moves elements, or replaces the same elements by +0 on every rank; or
    /// one rank contributes each element and all others contribute -0, which leaves a sum's bits unchanged. Partial
    /// sums of f16 and bf16 are f32.
    ///
    /// ```
    /// use isoshard::ops::{AxisPlacement, Row};
    /// assert!(Row::same(AxisPlacement::SUM, 1).exact().by_bits);
    /// ```
    pub fn exact(mut self) -> Row {
        self.by_bits = true;
        self
    }

    /// Returns true if an operand is [`AxisPlacement::Ragged`].
    pub(crate) fn takes_ragged(&self) -> bool {
        self.ins.iter().any(|s| s.is_ragged())
    }

    /// Returns true if every operand and every result is [`AxisPlacement::R`].
    pub(crate) fn is_replicated(&self) -> bool {
        self.ins.iter().chain(&self.outs).all(|s| s.is_replicated())
    }

    /// Creates the row of replicated operands and results, which holds for every operator.
    pub(crate) fn replicated(ins: usize, outs: usize) -> Row {
        let all = |n| std::iter::repeat_n(AxisPlacement::R, n);
        Row::new(all(ins), all(outs))
    }

    /// Creates a row of `ins` operands and one result that all have the same placement.
    ///
    /// ```
    /// use isoshard::ops::{AxisPlacement, Row};
    /// assert_eq!(format!("{:?}", Row::same(AxisPlacement::S(0), 2)), "S0 S0 -> S0");
    /// ```
    pub fn same(placement: AxisPlacement, ins: usize) -> Row {
        Row::new(std::iter::repeat_n(placement, ins), [placement])
    }
}

impl Algebra {
    /// Returns the rows with partial operands, for `ins` operands and one result.
    pub fn rows(self, ins: usize) -> Vec<Row> {
        let sum = AxisPlacement::SUM;
        let one = |at: usize| Row::new((0..ins).map(|i| if i == at { sum } else { AxisPlacement::R }), [sum]);
        match self {
            Algebra::Opaque => vec![],
            Algebra::Additive => vec![Row::same(sum, ins)],
            Algebra::Linear => vec![one(0)],
            Algebra::Multilinear => (0..ins).map(one).collect(),
            Algebra::Monotone => {
                [ReduceOp::Max, ReduceOp::Min].map(|op| Row::same(AxisPlacement::P(op), ins)).to_vec()
            }
            Algebra::Structural => [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min]
                .map(|op| Row::same(AxisPlacement::P(op), ins).exact())
                .to_vec(),
        }
    }
}

impl fmt::Display for AxisPlacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AxisPlacement::R => f.write_str("R"),
            AxisPlacement::S(dim) => write!(f, "S{dim}"),
            AxisPlacement::P(op) => write!(f, "P({op})"),
            AxisPlacement::TreeSum(_) => f.write_str("P(sum)"),
            AxisPlacement::Ragged => f.write_str("RS"),
            AxisPlacement::RaggedOver(dims) => write!(f, "RS(0..{dims})"),
        }
    }
}

impl fmt::Debug for AxisPlacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Writes `S0 R -> S0`.
impl fmt::Debug for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.ins.iter().try_for_each(|s| write!(f, "{s} "))?;
        f.write_str("->")?;
        self.outs.iter().try_for_each(|s| write!(f, " {s}"))
    }
}
