//! The numbers of blocks of a ragged shard.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::sync::Arc;

/// The number of blocks that each rank along an axis owns, in rank order: a slice of counts that knows its sums, so that the shards
/// of all ranks are found in a time linear in their number. Clones share memory.
///
/// ```
/// use isoshard::placement::{Placement, RaggedUnits, short::ragged};
///
/// let units = RaggedUnits::from([3, 0, 2]);
/// assert_eq!((units.len(), units[2]), (3, 2));
/// assert_eq!(Placement::RaggedShard { dims: 1, units }, ragged(1, &[3, 0, 2]));
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct RaggedUnits {
    /// The counts, and then as many sums: of the first count, of the first two, up to all of them.
    counts_and_sums: Arc<[usize]>,
}

impl RaggedUnits {
    /// Returns the number of blocks of the ranks before this one.
    pub(crate) fn before(&self, rank: usize) -> usize {
        rank.checked_sub(1).map_or(0, |last| self.sums()[last])
    }

    /// Returns the number of all blocks. It saturates; a [`Spec`](super::Spec) refuses counts whose sum overflows.
    pub(crate) fn total(&self) -> usize {
        self.before(self.len())
    }

    fn sums(&self) -> &[usize] {
        &self.counts_and_sums[self.counts_and_sums.len() / 2..]
    }
}

impl Deref for RaggedUnits {
    type Target = [usize];

    fn deref(&self) -> &[usize] {
        &self.counts_and_sums[..self.counts_and_sums.len() / 2]
    }
}

impl From<Vec<usize>> for RaggedUnits {
    fn from(mut counts: Vec<usize>) -> RaggedUnits {
        let mut sum = 0usize;
        for i in 0..counts.len() {
            sum = sum.saturating_add(counts[i]);
            counts.push(sum);
        }
        RaggedUnits { counts_and_sums: counts.into() }
    }
}

impl From<&[usize]> for RaggedUnits {
    fn from(counts: &[usize]) -> RaggedUnits {
        counts.to_vec().into()
    }
}

impl<const N: usize> From<[usize; N]> for RaggedUnits {
    fn from(counts: [usize; N]) -> RaggedUnits {
        counts.to_vec().into()
    }
}

impl FromIterator<usize> for RaggedUnits {
    fn from_iter<I: IntoIterator<Item = usize>>(counts: I) -> RaggedUnits {
        counts.into_iter().collect::<Vec<usize>>().into()
    }
}

/// Counts alone are hashed, since they determine the sums.
impl Hash for RaggedUnits {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (**self).hash(state);
    }
}

impl fmt::Debug for RaggedUnits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_those_of_the_counts() {
        let units = RaggedUnits::from([3, 0, 2]);
        assert_eq!((0..=3).map(|rank| units.before(rank)).collect::<Vec<_>>(), [0, 3, 3, 5]);
        assert_eq!((units.total(), &units[..]), (5, &[3, 0, 2][..]));
        assert_eq!(
            (RaggedUnits::from([]).total(), RaggedUnits::from([usize::MAX, 1]).total()),
            (0, usize::MAX)
        );
    }
}
