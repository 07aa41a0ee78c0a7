//! The sizes of the groups of a grouped product.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ops::Window;
use crate::tensor::Shape;

/// The number of rows of each expert in each batch entry, for rows that are sorted by expert. A group is the rows of
/// one expert in one batch entry.
///
/// Every rank needs the same sizes; [`DTensor::group_sizes`](crate::dtensor::DTensor::group_sizes) reads them from
/// counts.
///
/// ```
/// use isoshard::ops::GroupSizes;
/// let sizes = GroupSizes::new(3, [2, 0, 1, 1, 1, 1])?; // two batch entries of three rows each
/// assert_eq!((sizes.experts(), sizes.batch()), (3, 2));
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GroupSizes {
    experts: usize,
    sizes: Arc<[usize]>,
}

/// The rows of one group that a rank stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GroupRows {
    /// The batch entry, counted from the rank's first.
    pub entry: usize,
    /// The expert.
    pub expert: usize,
    /// The first row, counted from the rank's first.
    pub start: usize,
    /// The number of rows.
    pub len: usize,
}

impl GroupSizes {
    /// Creates it from the sizes of all experts of the first batch entry, then of the second, and so on.
    ///
    /// # Errors
    /// Refuses a number of sizes that is no multiple of `experts`, and sizes of one batch entry whose sum overflows.
    pub fn new(experts: usize, sizes: impl AsRef<[usize]>) -> Result<GroupSizes> {
        let sizes = sizes.as_ref();
        if experts == 0 || !sizes.len().is_multiple_of(experts) {
            let given = format!("{} sizes for {experts} experts", sizes.len());
            let rule = "wants one size per batch entry and expert";
            return Err(Error::invalid(
                "group_sizes",
                rule,
                given,
                "list the experts of one entry after another",
            ));
        }
        let sum = |of_entry: &[usize]| of_entry.iter().try_fold(0usize, |sum, &n| sum.checked_add(n));
        if let Some(entry) = sizes.chunks_exact(experts).position(|of_entry| sum(of_entry).is_none()) {
            let given = format!("the sizes of batch entry {entry}");
            return Err(Error::invalid("group_sizes", "the number of rows overflows", given, ""));
        }
        Ok(GroupSizes { experts, sizes: sizes.into() })
    }

    /// Returns the number of experts.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Returns the number of batch entries.
    pub fn batch(&self) -> usize {
        self.sizes.len() / self.experts
    }

    /// Returns the sizes of the groups of one batch entry, one per expert.
    ///
    /// # Panics
    /// Panics if there is no such entry.
    pub(crate) fn of_entry(&self, entry: usize) -> &[usize] {
        &self.sizes[entry * self.experts..][..self.experts]
    }

    /// Refuses rows of shape `[rows, ..]` or `[batch, rows, ..]` that the sizes do not fit.
    pub(super) fn expect(&self, verb: &str, x: &Shape, experts: usize) -> Result<()> {
        let (batch, rows) = if x.len() == 3 { (x[0], x[1]) } else { (1, x[0]) };
        let fits = experts == self.experts
            && batch == self.batch()
            && (0..batch).all(|b| self.of_entry(b).iter().sum::<usize>() == rows);
        if fits {
            return Ok(());
        }
        let rule = format!(
            "wants sizes of {experts} experts that add up to {rows} rows in each of {batch} batch entries"
        );
        const SHOWN: usize = 16;
        let more = if self.sizes.len() > SHOWN { " and more" } else { "" };
        let shown = &self.sizes[..self.sizes.len().min(SHOWN)];
        let given = format!("sizes {shown:?}{more} of {} experts", self.experts);
        Err(Error::invalid(verb, rule, given, "pass the sizes of these rows"))
    }

    /// Returns the parts of groups, in ascending order and without empty ones, that a rank stores whose window of the
    /// rows is `at`: `entries` batch entries and `rows` rows of each.
    pub(super) fn parts(&self, at: &Window, entries: usize, rows: usize) -> Vec<GroupRows> {
        let (first_entry, first_row) =
            if at.global.len() == 3 { (at.start(0), at.start(1)) } else { (0, at.start(0)) };
        let mut parts = Vec::new();
        for entry in 0..if rows == 0 { 0 } else { entries } {
            let mut group = 0;
            for (expert, &size) in self.of_entry(first_entry + entry).iter().enumerate() {
                let (from, to) = (group.max(first_row), (group + size).min(first_row + rows));
                if from < to {
                    parts.push(GroupRows { entry, expert, start: from - first_row, len: to - from });
                }
                group += size;
            }
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::Region;
    use crate::tensor::Dims;

    #[test]
    fn windows_cut_groups() {
        let sizes = GroupSizes::new(3, [2, 0, 3, 1, 4, 0]).unwrap();
        let at = |start: [usize; 3], local: [usize; 3]| Window {
            global: [2, 5, 7].into(),
            region: Region::of_box(Dims::from_slice(&start), local.into()),
        };
        let of = |start: [usize; 3], local: [usize; 3]| -> Vec<[usize; 4]> {
            let parts = sizes.parts(&at(start, local), local[0], local[1]);
            parts.into_iter().map(|p| [p.entry, p.expert, p.start, p.len]).collect()
        };
        assert_eq!(of([0; 3], [2, 5, 7]), [[0, 0, 0, 2], [0, 2, 2, 3], [1, 0, 0, 1], [1, 1, 1, 4]]);
        assert_eq!(of([1, 0, 0], [1, 5, 7]), [[0, 0, 0, 1], [0, 1, 1, 4]]);
        assert_eq!(of([0, 1, 0], [2, 2, 7]), [[0, 0, 0, 1], [0, 2, 1, 1], [1, 1, 0, 2]]);
        assert!(of([0, 0, 0], [2, 0, 7]).is_empty());
    }
}
