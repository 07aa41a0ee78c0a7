//! Parts of the keys in the backward pass.
//!
//! All blocks of queries pass over a part of the keys before the next one begins, so that the part's keys, values and their gradients
//! stay in the second cache with a block's scores. Parts are nodes of [the tree over keys](super): the gradients of queries are
//! the sums of their parts, joined along it. No length of a part changes a bit.

use std::ops::Range;

use super::query_block::LEAF_ROWS;
use super::scratch::Scratch;
use crate::gemm::Gemm;
use crate::isa::caches::Caches;
use crate::summation::LEAF;

/// Returns the parts of so many keys and values of `d` and `dv` elements.
pub(super) fn key_parts<T>(keys: usize, [d, dv]: [usize; 2]) -> impl Iterator<Item = Range<usize>> {
    let len = part_len::<T>([d, dv]).max(keys.div_ceil(MOST_PARTS).next_power_of_two());
    (0..keys).step_by(len).map(move |start| start..keys.min(start.saturating_add(len)))
}

/// Returns the number of keys of a part, a power of two, so that parts are nodes of the tree: the second cache holds two blocks of scores,
/// keys and values, and two nodes of the gradients of each.
fn part_len<T>([d, dv]: [usize; 2]) -> usize {
    let per_key =
        (2 * LEAF_ROWS).saturating_add(d.saturating_add(dv).saturating_mul(3)).saturating_mul(size_of::<T>());
    let fit = (Caches::current().second / per_key).max(LEAST_LEN);
    1 << fit.ilog2()
}

/// The blocks of all queries are planned for each part: more parts of more keys would take memory that grows with the square.
const MOST_PARTS: usize = 32;

/// A shorter part has too little work for what each block does once: transposing its queries and gradients.
const LEAST_LEN: usize = 16 * LEAF;

/// A step of a block's queries: the gradients over one part of the keys are joined with those of parts before, and kept or finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PartStep {
    /// The number of unfinished nodes of earlier parts.
    before: usize,
    /// The number of those that are joined with this part.
    joins: usize,
    /// True if this is the last part that the queries see.
    pub(super) last: bool,
}

impl PartStep {
    /// Returns the steps of a block that sees a range of parts, each with its part.
    pub(super) fn of(parts: Range<usize>) -> impl Iterator<Item = (usize, PartStep)> {
        let (end, mut count) = (parts.end, 0);
        parts.map(move |part| {
            let (before, last) = (count, part + 1 == end);
            // A node of the tree is complete after as many right children as the part's number ends with ones; nodes on the left that
            // no query sees are absent.
            let joins = if last { before } else { before.min(part.trailing_ones() as usize) };
            count = before + 1 - joins;
            (part, PartStep { before, joins, last })
        })
    }
}

/// The sums over parts of keys for the rows of a head's queries, which are not joined yet.
pub(super) struct UnfinishedParts<T> {
    nodes: Vec<Scratch<T>>,
    /// The number of elements of all rows.
    len: usize,
}

impl<T: Gemm> UnfinishedParts<T> {
    /// Returns no sums yet, for rows of so many elements altogether.
    pub(super) fn new(len: usize) -> UnfinishedParts<T> {
        UnfinishedParts { nodes: Vec::new(), len }
    }

    /// Joins the sums `rows` of a part, which are the elements `at` of all rows, with those of parts before, and keeps them, unless these
    /// are the last ones.
    pub(super) fn push(&mut self, step: PartStep, at: Range<usize>, rows: &mut [T]) {
        let kept = step.before - step.joins;
        for node in self.nodes[kept..step.before].iter_mut().rev() {
            rows.iter_mut().zip(&node.get()[at.clone()]).for_each(|(row, &left)| *row = left + *row);
        }
        if step.last {
            return;
        }
        if kept == self.nodes.len() {
            self.nodes.push(Scratch::new(self.len));
        }
        self.nodes[kept].get()[at].copy_from_slice(rows);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::caches::with_caches;
    use crate::sums::tree::join_leaves;

    /// Parts are joined in the order of the tree over them, wherever they begin and end.
    #[test]
    fn parts_follow_the_tree() {
        for (start, end) in (0..40).flat_map(|end| (0..end).map(move |start| (start, end))) {
            let mut sums = UnfinishedParts::<f32>::new(3);
            // The sum of products with different signs and sizes differs with the order.
            let value = |part: usize| {
                ((part * 7919 + 13) % 1009) as f32 * if part.is_multiple_of(3) { -1e5 } else { 1e-3 }
            };
            let mut row = [0.0];
            for (part, step) in PartStep::of(start..end) {
                row = [value(part)];
                sums.push(step, 1..2, &mut row);
                assert_eq!(step.last, part + 1 == end);
            }
            let mut nodes: Vec<f32> = (start..end).map(value).collect();
            let want = join_leaves(start, &mut nodes, |a, b| a + b);
            assert_eq!(row[0].to_bits(), want.to_bits(), "{start}..{end}");
        }
    }

    #[test]
    fn parts_are_powers_of_two_and_cover_all_keys() {
        let parts = || key_parts::<f32>(1300, [8, 8]).count();
        assert_eq!(with_caches(Caches { second: 1, ..Caches::USUAL }, parts), 3);
        for widths in [[64, 64], [1, 1], [usize::MAX, 7]] {
            let len = part_len::<f32>(widths);
            assert!(len.is_power_of_two() && len >= LEAST_LEN, "{len}");
            for keys in [0, 1, len, len + 1, 3 * len, 32 * len, 33 * len] {
                let parts: Vec<Range<usize>> = key_parts::<f32>(keys, widths).collect();
                assert_eq!(parts.len(), if keys > 32 * len { 17 } else { keys.div_ceil(len) });
                assert!(parts.iter().flat_map(Clone::clone).eq(0..keys));
            }
        }
    }
}
