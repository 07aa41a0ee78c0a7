//! Sharding rows: what one mesh axis may do to an operator's operands and results.

use std::fmt;

use smallvec::SmallVec;

use crate::placement::Leaf;
use crate::tensor::ReduceOp;

/// What a row says of one operand or result on one mesh axis.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum AxisPlacement {
    /// Replicated.
    R,
    /// Sharded along a dim by the ceil rule.
    S(usize),
    /// Every rank has a part of the reduction.
    P(ReduceOp),
    /// Of a result: every rank has the sum over those indices of summed dims that it holds. The rows with this slot that
    /// cut one dim name the dims summed over; in the order of the summation tree, outermost first. An operator that lists
    /// them promises that evaluated on one node of the tree it gives that node's bits.
    TreeSum(Leaf),
    /// Ragged over some prefix; all `Ragged` slots of a row have the same prefix and units.
    Ragged,
}

/// Slots of all operands and of all results: if the operands lie so, the results lie so.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Row {
    /// One an operand.
    pub ins: SmallVec<[AxisPlacement; 4]>,
    /// One a result.
    pub outs: SmallVec<[AxisPlacement; 4]>,
    /// True where the row holds by bits; false where it holds up to rounding, because a sum is taken apart or put together
    /// in another order than a single rank's. Only [`Reduction::Fast`](crate::dtensor::Reduction::Fast) uses those.
    pub by_bits: bool,
}

/// The mesh axis a row is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MeshAxis {
    /// The number of ranks along it.
    pub ranks: usize,
    /// For each dim of the first operand, in how many pieces the other axes split it.
    others: [usize; MeshAxis::DIMS],
}

/// What an operator commutes with, in one word: says which `Partial` may pass through it unreduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algebra {
    /// Nothing is known: reduce first.
    Opaque,
    /// `f(a + a', b + b') = f(a, b) + f(a', b')`: all operands partial sums, or none.
    Additive,
    /// Linear in the first operand, the others held: it alone may be a partial sum.
    Linear,
    /// Linear in each operand, the others held: any one may be a partial sum.
    Multilinear,
    /// Moves or repeats elements without touching them: any partial passes.
    Structural,
    /// Never decreases in any operand, by bits: all operands partial maxima (minima), or none.
    Monotone,
}

impl AxisPlacement {
    /// A part of a sum.
    pub const SUM: AxisPlacement = AxisPlacement::P(ReduceOp::Sum);

    /// True for [`AxisPlacement::R`].
    pub(crate) fn is_replicated(self) -> bool {
        match self {
            AxisPlacement::R => true,
            AxisPlacement::S(_) | AxisPlacement::P(_) | AxisPlacement::TreeSum(_) | AxisPlacement::Ragged => {
                false
            }
        }
    }

    /// True for [`AxisPlacement::SUM`]: a sum in parts passes.
    pub(crate) fn is_sum(self) -> bool {
        match self {
            AxisPlacement::P(op) => op == ReduceOp::Sum,
            AxisPlacement::R | AxisPlacement::S(_) | AxisPlacement::TreeSum(_) | AxisPlacement::Ragged => {
                false
            }
        }
    }

    /// True for [`AxisPlacement::Ragged`].
    pub(crate) fn is_ragged(self) -> bool {
        match self {
            AxisPlacement::Ragged => true,
            AxisPlacement::R | AxisPlacement::S(_) | AxisPlacement::P(_) | AxisPlacement::TreeSum(_) => false,
        }
    }

    /// The dim of a [`AxisPlacement::S`].
    pub(crate) fn dim(self) -> Option<usize> {
        match self {
            AxisPlacement::S(dim) => Some(dim),
            AxisPlacement::R | AxisPlacement::P(_) | AxisPlacement::TreeSum(_) | AxisPlacement::Ragged => {
                None
            }
        }
    }

    /// The form of the summation tree's leaves, of [`AxisPlacement::TreeSum`].
    pub(crate) fn tree_leaf(self) -> Option<Leaf> {
        match self {
            AxisPlacement::TreeSum(leaf) => Some(leaf),
            AxisPlacement::R | AxisPlacement::S(_) | AxisPlacement::P(_) | AxisPlacement::Ragged => None,
        }
    }
}

impl MeshAxis {
    /// Dims from this one on count as split by whatever splits any of them.
    const DIMS: usize = 8;

    /// An axis of `ranks` ranks, beside which nothing splits the first operand.
    pub fn new(ranks: usize) -> MeshAxis {
        MeshAxis { ranks, others: [1; MeshAxis::DIMS] }
    }

    /// The same axis, where another one of `ranks` ranks splits dim `dim` of the first operand.
    pub fn with_split(mut self, dim: usize, ranks: usize) -> MeshAxis {
        self.others[dim.min(MeshAxis::DIMS - 1)] *= ranks;
        self
    }

    /// The number of pieces of dim `dim` of the first operand if this axis splits it too. A dim whose extent divides by
    /// it is cut evenly whatever the nesting; if it equals `ranks`, this axis alone cuts.
    pub fn pieces(&self, dim: usize) -> usize {
        self.ranks * self.others[dim.min(MeshAxis::DIMS - 1)]
    }
}

impl Row {
    /// A row. It holds by bits unless a sum passes in parts ([`AxisPlacement::SUM`]); where such a one does, say so with
    /// [`Row::exact`].
    pub fn new(
        ins: impl IntoIterator<Item = AxisPlacement>,
        outs: impl IntoIterator<Item = AxisPlacement>,
    ) -> Row {
        let (ins, outs): (SmallVec<[AxisPlacement; 4]>, SmallVec<[AxisPlacement; 4]>) =
            (ins.into_iter().collect(), outs.into_iter().collect());
        let by_bits = !ins.iter().chain(&outs).any(|s| s.is_sum());
        Row { ins, outs, by_bits }
    }

    /// The same row, of which it is known that it holds by bits: elements of parts are moved or replaced by +0 on every rank
    /// and nothing else, or each element comes from one rank and all others give -0, which no sum notices. The parts of an
    /// f16 or bf16 sum that pass are f32.
    pub fn exact(mut self) -> Row {
        self.by_bits = true;
        self
    }

    /// True if some operand is [`AxisPlacement::Ragged`].
    pub(crate) fn takes_ragged(&self) -> bool {
        self.ins.iter().any(|s| s.is_ragged())
    }

    /// True if every operand and every result is [`AxisPlacement::R`].
    pub(crate) fn is_replicated(&self) -> bool {
        self.ins.iter().chain(&self.outs).all(|s| s.is_replicated())
    }

    /// The same slot everywhere, for `ins` operands and one result.
    pub fn same(slot: AxisPlacement, ins: usize) -> Row {
        Row::new(std::iter::repeat_n(slot, ins), [slot])
    }
}

impl Algebra {
    /// The rows that let a `Partial` through, for `ins` operands and one result.
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
        }
    }
}

impl fmt::Debug for AxisPlacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// `S0 R -> S0`.
impl fmt::Debug for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.ins.iter().try_for_each(|s| write!(f, "{s} "))?;
        f.write_str("->")?;
        self.outs.iter().try_for_each(|s| write!(f, " {s}"))
    }
}
