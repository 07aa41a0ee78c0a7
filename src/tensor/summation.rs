//! The order of a sum: where a range of summed indices is split.
//!
//! A sum over dims has one tree, a function of the summed extents alone. The outermost dim's range is split down to single
//! indices, then the next dim's; the innermost one's down to *leaves* of at most [`LEAF`] indices, which continue as
//! [`Leaf`] says. A node is the sum of its left and its right part, in this order.
//!
//! The place where a range is split depends on its length alone ([`SplitRule::left_of`]), never on where it begins. So whatever evaluates
//! a node by itself (a thread, a warp, another process, a kernel that has never seen the rest) gives the bits that the node has
//! inside the whole: by induction, since both of its parts are nodes of which the same holds, down to leaves, which are
//! sequences of operations given by their length.
//!
//! Everything that splits a sum asks here. `kernels/iso.cuh` has the rule once more, for the device, and a test compares the
//! two.
//!
//! ```
//! use isoshard::tensor::{LEAF, Leaf, SplitRule};
//!
//! /// The leaves of a sum over `n` indices, by their lengths.
//! fn leaves(n: usize) -> Vec<usize> {
//!     if n <= LEAF {
//!         return vec![n];
//!     }
//!     let left = SplitRule::Halves.left_of(n); // [a, b) is split at a + ceil((b - a) / 2)
//!     [leaves(left), leaves(n - left)].concat()
//! }
//! assert_eq!(leaves(65), [17, 16, 32]);
//! assert_eq!(leaves(33), leaves(65)[..2], "a node looks the same by itself");
//! // Inside a leaf neighbours are added: of 5 elements (((0 1) (2 3)) 4), so 4 go to the left.
//! assert_eq!(Leaf::Pairs.left_of(SplitRule::Halves, 5), Some(4));
//! // A chain of fused multiply-adds cannot be cut.
//! assert_eq!(Leaf::Chain.left_of(SplitRule::Halves, 5), None);
//! ```

/// The widest leaf of the summation tree.
pub const LEAF: usize = 32;

/// A rule by which a range of summed indices is split in two. All sums follow one; the kinds are named, so that a sum which
/// has to follow another says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SplitRule {
    /// `[a, b)` is split at `a + ceil((b - a) / 2)`.
    Halves,
}

/// The form of the tree below ranges of [`LEAF`] indices of the innermost dim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Leaf {
    /// Neighbours are added, then the sums of neighbours, and so on; what has no neighbour is passed on. Any range consists
    /// of nodes.
    Pairs,
    /// One chain of fused multiply-adds in ascending order, as in a matrix product: it cannot be cut.
    Chain,
}

impl SplitRule {
    /// The number of indices that go to the left, of a range of `len`, at least 2.
    #[inline(always)]
    pub const fn left_of(self, len: usize) -> usize {
        match self {
            SplitRule::Halves => len.div_ceil(2),
        }
    }

    /// The index at which `from..to`, of at least 2 indices, is split.
    #[inline(always)]
    pub const fn mid(self, from: usize, to: usize) -> usize {
        from + self.left_of(to - from)
    }

    /// The number of times that a range of `len` is split until no part is longer than `leaf`, at least 1.
    pub const fn depth(self, len: usize, leaf: usize) -> u32 {
        let (mut longest, mut depth) = (len, 0);
        while longest > leaf {
            longest = self.left_of(longest);
            depth += 1;
        }
        depth
    }
}

impl Leaf {
    /// The number of indices that go to the left, of a range of `len`, at least 2, of the innermost dim of a sum that
    /// follows `split`; `None` if the range is a leaf that cannot be cut.
    #[inline(always)]
    pub const fn left_of(self, split: SplitRule, len: usize) -> Option<usize> {
        match self {
            Leaf::Pairs if len <= LEAF => Some(len.next_power_of_two() / 2),
            Leaf::Chain if len <= LEAF => None,
            Leaf::Pairs | Leaf::Chain => Some(split.left_of(len)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_split_until_no_part_is_longer_than_a_leaf() {
        for leaf in [1, 4, LEAF] {
            for len in 0..700usize {
                let by_halving = (0..).find(|&k| len.div_ceil(1 << k) <= leaf).unwrap();
                assert_eq!(SplitRule::Halves.depth(len, leaf), by_halving, "{len} down to {leaf}");
            }
        }
        assert_eq!((SplitRule::Halves.mid(3, 8), SplitRule::Halves.mid(3, 5)), (6, 4));
    }

    /// An aligned power of two of neighbours is a node of a leaf of pairs.
    #[test]
    fn pairs_are_split_at_the_largest_power_of_two_below_their_number() {
        for len in 2..=LEAF {
            let left = Leaf::Pairs.left_of(SplitRule::Halves, len).unwrap();
            assert!(left.is_power_of_two() && left < len && len <= 2 * left, "{len}: {left}");
        }
    }

    /// The device's copy of the rule.
    #[test]
    fn kernels_split_by_the_same_rule() {
        let (_, text) = crate::tensor::cuda::headers().iter().find(|(name, _)| *name == "iso.cuh").unwrap();
        assert!(text.contains(&format!("enum {{ LEAF = {LEAF} }};")), "the leaf of kernels/iso.cuh");
        assert!(text.contains("left_of(u32 len) { return len - len / 2; }"), "the split of kernels/iso.cuh");
        for len in 2..1000 {
            assert_eq!(SplitRule::Halves.left_of(len), len - len / 2);
        }
    }
}
