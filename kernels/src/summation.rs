//! The order of additions in a sum: the rule that splits a range of summed indices.
//!
//! A sum over dims follows one tree, which depends on the summed extents alone. The outermost dim's range is split down
//! to single indices, then the next dim's; the innermost dim's range is split down to *leaves* of at most [`LEAF`]
//! indices, in which [`Leaf`] gives the order. A node is the sum of its left part and its right part.
//!
//! [`SplitRule::left_of`] splits a range by its length alone, not by its first index. So a node that is evaluated by
//! itself (by a thread, a warp or another process) has the same bits as inside the whole sum: its two parts are nodes
//! themselves, down to leaves, whose additions depend on their length alone.
//!
//! There are two rules. [`SplitRule::Halves`] splits in the middle, so that equal cuts by layouts fall on nodes.
//! [`SplitRule::PowerOfTwo`] splits at the largest power of two below the length, so that the tree of a longer range,
//! restricted to a prefix, is the prefix's own tree. Attention's sums over keys follow the second rule.
//!
//! All code that splits a sum calls this module. `cuda/iso.cuh` repeats the rules for CUDA kernels, and a test
//! compares them.
//!
//! ```
//! use isoshard_kernels::{LEAF, Leaf, SplitRule};
//!
//! /// The lengths of the leaves of a sum over `n` indices.
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

/// The largest number of indices in a leaf of the summation tree.
pub const LEAF: usize = 32;

/// The rule that splits a range of summed indices in two.
///
/// ```
/// use isoshard_kernels::SplitRule;
/// let rule = SplitRule::Halves;
/// assert_eq!((rule.left_of(7), rule.mid(10, 17), rule.depth(100, 32)), (4, 14, 2)); // 100 = (25 + 25) + (25 + 25)
/// let rule = SplitRule::PowerOfTwo;
/// assert_eq!((rule.left_of(7), rule.mid(10, 17), rule.depth(100, 32)), (4, 14, 2)); // 100 = (32 + 32) + (32 + 4)
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SplitRule {
    /// The range `[a, b)` is split at `a + ceil((b - a) / 2)`.
    Halves,
    /// The range `[a, b)` is split at `a` plus the largest power of two below `b - a`. Leaves begin at multiples of
    /// [`LEAF`] after `a`, whatever the length, and indices that are appended change no earlier node.
    PowerOfTwo,
}

/// The order of additions in a leaf, a range of at most [`LEAF`] indices of the innermost dim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Leaf {
    /// Neighbours are added, then the sums of neighbours, and so on; an element without a neighbour moves up unchanged.
    /// A leaf is a tree itself, so parts of it can be evaluated apart.
    Pairs,
    /// One chain of fused multiply-adds in ascending order, as in a matrix product. It cannot be split.
    Chain,
}

impl SplitRule {
    /// Returns the number of indices in the left part of a range of `len` indices, at least 2.
    #[inline(always)]
    pub const fn left_of(self, len: usize) -> usize {
        match self {
            SplitRule::Halves => len.div_ceil(2),
            SplitRule::PowerOfTwo => len.next_power_of_two() / 2,
        }
    }

    /// Returns the index at which `from..to`, a range of at least 2 indices, is split.
    #[inline(always)]
    pub const fn mid(self, from: usize, to: usize) -> usize {
        from + self.left_of(to - from)
    }

    /// Returns how many times a range of `len` indices is split until no part is longer than `leaf`, which is at least
    /// 1.
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
    /// Returns the number of indices in the left part of a range of `len` indices, at least 2, of the innermost dim of
    /// a sum that follows `split`, or `None` if the range is a leaf that cannot be split.
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
                for rule in [SplitRule::Halves, SplitRule::PowerOfTwo] {
                    assert_eq!(rule.depth(len, leaf), by_halving, "{rule:?}: {len} down to {leaf}");
                }
            }
        }
        assert_eq!((SplitRule::Halves.mid(3, 8), SplitRule::Halves.mid(3, 5)), (6, 4));
    }

    /// So an aligned range whose length is a power of two is a node of a leaf of pairs.
    #[test]
    fn pairs_are_split_at_the_largest_power_of_two_below_their_number() {
        for len in 2..=LEAF {
            let left = Leaf::Pairs.left_of(SplitRule::Halves, len).unwrap();
            assert!(left.is_power_of_two() && left < len && len <= 2 * left, "{len}: {left}");
        }
    }

    /// The lemma of docs/exactness.md: a tree without the leaves after a prefix, in which a node with one part is that
    /// part, is the prefix's tree.
    #[test]
    fn a_tree_restricted_to_a_prefix_is_the_prefixs_tree() {
        fn tree(len: usize) -> String {
            if len <= LEAF {
                return len.to_string();
            }
            let left = SplitRule::PowerOfTwo.left_of(len);
            format!("({} {})", tree(left), tree(len - left))
        }
        fn restricted(len: usize, prefix: usize) -> String {
            if len <= LEAF {
                return prefix.min(len).to_string();
            }
            let left = SplitRule::PowerOfTwo.left_of(len);
            match prefix.checked_sub(left) {
                None | Some(0) => restricted(left, prefix),
                Some(rest) => format!("({} {})", restricted(left, left), restricted(len - left, rest)),
            }
        }
        for len in 1..400 {
            for prefix in 1..=len {
                assert_eq!(restricted(len, prefix), tree(prefix), "{prefix} of {len}");
            }
        }
    }

    /// The device's copy of the rules.
    #[test]
    fn kernels_split_by_the_same_rule() {
        let (_, text) = crate::cuda::headers().iter().find(|(name, _)| *name == "iso.cuh").unwrap();
        assert!(text.contains(&format!("enum {{ LEAF = {LEAF} }};")), "the leaf of iso.cuh");
        assert!(text.contains("left_of(u32 len) { return len - len / 2; }"), "the split of iso.cuh");
        for len in 2..1000 {
            assert_eq!(SplitRule::Halves.left_of(len), len - len / 2);
            let left = SplitRule::PowerOfTwo.left_of(len);
            assert!(left.is_power_of_two() && left < len && len <= 2 * left, "{len}: {left}");
        }
    }
}
