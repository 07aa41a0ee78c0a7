//! Loops over a block of scores that lie [by keys](super::query_block::QueryBlock::lie_by_keys): exponentials and gradients.
//!
//! Sixteen queries are the lanes of vectors. So a query's largest score and its sum need no joins across a vector, and only
//! the cells of 16 queries and 16 keys on the edges of windows need masks. Scores with a soft cap, a bias, a mask, documents or
//! dropout, and those of a few queries, lie by queries: [`score_rows`](super::score_rows) has their loops, which give the same bits.

use super::lane_windows::{LANES, LaneWindows, Seen};
use super::query_block::QueryBlock;
use super::score_rows::{end_exponential, pick};
use crate::gemm::Gemm;
use crate::isa::simd::Kernel;
use crate::summation::LEAF;
use crate::sums::tree::join_leaves;

/// The vectors of one group of queries in a block: a vector for each key, `step` vectors apart.
struct Column<'a, T> {
    vectors: &'a mut [[T; LANES]],
    step: usize,
}

impl<T: Gemm> Column<'_, T> {
    #[inline(always)]
    fn at(&mut self, key: usize) -> &mut [T; LANES] {
        &mut self.vectors[key * self.step]
    }

    /// Writes -0 to the scores of a cell.
    #[inline(always)]
    fn leave_out(&mut self, cell: usize) {
        for i in 0..LANES {
            *self.at(cell * LANES + i) = [T::SUM_PAD; LANES];
        }
    }

    /// Writes -inf to the scores of a cell that queries do not see.
    #[inline(always)]
    fn hide(&mut self, windows: &LaneWindows, cell: usize) {
        for key in cell * LANES..(cell + 1) * LANES {
            let (seen, scores) = (windows.see(key), self.at(key));
            let before = *scores;
            for lane in 0..LANES {
                scores[lane] = pick(seen[lane], before[lane], T::LOWEST);
            }
        }
    }

    /// The first pass over a cell: replaces each score by one part of its exponential over `e^max`, and returns the others, or
    /// 0 for keys that are left out.
    #[inline(always)]
    fn begin_exponentials(&mut self, cell: usize, max: &[T; LANES]) -> [[T; LANES]; LANES] {
        let mut marks = [[T::ZERO; LANES]; LANES];
        for (i, marks) in marks.iter_mut().enumerate() {
            let scores = self.at(cell * LANES + i);
            for ((s, mark), &max) in scores.iter_mut().zip(marks).zip(max) {
                let [first, second] = (*s - max).exp_begin();
                *mark = pick(*s == T::LOWEST, T::ZERO, first);
                *s = second;
            }
        }
        marks
    }

    /// Replaces the scores of a cell by their exponentials over `e^max`, or by -0 for keys that are left out.
    #[inline(always)]
    fn exponentials(&mut self, cell: usize, max: &[T; LANES]) {
        let marks = self.begin_exponentials(cell, max);
        for (i, marks) in marks.iter().enumerate() {
            let scores = self.at(cell * LANES + i);
            scores.iter_mut().zip(marks).for_each(|(s, &mark)| *s = end_exponential(mark, *s));
        }
    }

    /// Replaces the scores likewise, in fewer operations, if their range [is mid](ScoreRange::is_mid).
    #[inline(always)]
    fn mid_exponentials(&mut self, cell: usize, seen: Seen, max: &[T; LANES]) {
        for i in 0..LANES {
            let scores = self.at(cell * LANES + i);
            *scores = mid_exponentials(*scores, max, seen);
        }
    }

    /// The scores of a cell, lane by lane.
    #[inline(always)]
    fn cell(&mut self, cell: usize) -> [[T; LANES]; LANES] {
        std::array::from_fn(|i| *self.at(cell * LANES + i))
    }

    /// The sums of a leaf of keys.
    #[inline(always)]
    fn leaf_sums(&mut self, leaf: usize) -> [T; LANES] {
        let mut eighths = [[T::ZERO; LANES]; LEAF / 8];
        for (i, eighth) in eighths.iter_mut().enumerate() {
            let x: [[T; LANES]; 8] = std::array::from_fn(|j| *self.at(leaf * LEAF + i * 8 + j));
            for (lane, sum) in eighth.iter_mut().enumerate() {
                let of = |j: usize| x[j][lane];
                *sum = ((of(0) + of(1)) + (of(2) + of(3))) + ((of(4) + of(5)) + (of(6) + of(7)));
            }
        }
        let [a, b, c, d] = eighths;
        added(added(a, b), added(c, d))
    }
}

/// The exponentials of a vector of scores over `e^max`, or -0 for those that are left out of some.
#[inline(always)]
fn mid_exponentials<T: Gemm>(scores: [T; LANES], max: &[T; LANES], seen: Seen) -> [T; LANES] {
    let mut e = scores;
    e.iter_mut().zip(max).for_each(|(e, &max)| *e = (*e - max).exp_mid());
    if seen == Seen::Some {
        e.iter_mut().zip(scores).for_each(|(e, s)| *e = pick(s == T::LOWEST, T::SUM_PAD, *e));
    }
    e
}

/// The least and the largest score of each query.
#[derive(Clone, Copy)]
struct ScoreRange<T> {
    min: [T; LANES],
    max: [T; LANES],
}

impl<T: Gemm> ScoreRange<T> {
    /// Returns the range of no scores.
    #[inline(always)]
    fn empty() -> ScoreRange<T> {
        ScoreRange { min: [-T::LOWEST; LANES], max: [T::LOWEST; LANES] }
    }

    /// Takes in the scores of a cell, without those that are hidden. A NaN may keep others out, so it must not be a hidden one.
    #[inline(always)]
    fn take(&mut self, mut x: [[T; LANES]; LANES], seen: Seen) {
        self.max = each_lane(self.max, &x, |a, b| pick(b > a, b, a));
        if seen == Seen::Some {
            x.as_flattened_mut().iter_mut().for_each(|x| *x = pick(*x == T::LOWEST, -T::LOWEST, *x));
        }
        self.min = each_lane(self.min, &x, |a, b| pick(b < a, b, a));
    }

    /// Returns true if the exponentials of all scores over `e^by` are [normal numbers](crate::num::real::Real::exp_mid). NaNs are ignored.
    #[inline(always)]
    fn is_mid(&self, by: &[T; LANES]) -> bool {
        let [least, most] = T::EXP_MID;
        let bounds = self.min.iter().zip(&self.max).zip(by);
        bounds.fold(true, |mid, ((&min, &max), &by)| mid & (min - by >= least) & (max - by <= most))
    }
}

/// Joins a vector with those of a cell, lane by lane: as a tree, because each join waits for the one before.
#[inline(always)]
fn each_lane<T: Gemm>(with: [T; LANES], x: &[[T; LANES]; LANES], join: impl Fn(T, T) -> T) -> [T; LANES] {
    let mut joined = with;
    for (lane, joined) in joined.iter_mut().enumerate() {
        let four = |i: usize| join(join(x[i][lane], x[i + 1][lane]), join(x[i + 2][lane], x[i + 3][lane]));
        *joined = join(*joined, join(join(four(0), four(4)), join(four(8), four(12))));
    }
    joined
}

#[inline(always)]
fn added<T: Gemm>(mut a: [T; LANES], b: [T; LANES]) -> [T; LANES] {
    a.iter_mut().zip(b).for_each(|(a, b)| *a = *a + b);
    a
}

/// Returns the scores of a group of queries.
#[inline(always)]
fn column<'s, T: Gemm>(s: &'s mut [T], block: &QueryBlock, group: usize) -> Column<'s, T> {
    Column { vectors: &mut s.as_chunks_mut::<LANES>().0[group..], step: block.lanes.len() }
}

/// The kernel that turns the products of a block into scores and exponentials, and computes their sums and the logarithms of the
/// sums, like [`Probabilities`](super::score_rows::Probabilities).
pub(super) struct ColumnProbabilities<'a, T> {
    pub(super) s: &'a mut [T],
    pub(super) block: &'a QueryBlock,
    /// Room for the sums of a query's leaves.
    pub(super) nodes: &'a mut [[T; LANES]],
    pub(super) sums: &'a mut [T],
    pub(super) lse: &'a mut [T],
}

impl<T: Gemm> Kernel for ColumnProbabilities<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let block = self.block;
        let cells = block.width / LANES;
        let nodes = &mut self.nodes[..block.width / LEAF];
        let rows = self.sums.chunks_mut(LANES).zip(self.lse.chunks_mut(LANES));
        for ((group, windows), (sums, lse)) in block.lanes.iter().enumerate().zip(rows) {
            let mut column = column(self.s, block, group);
            let mut range = ScoreRange::empty();
            for cell in 0..cells {
                let seen = windows.seen(cell);
                if seen == Seen::None {
                    continue;
                }
                if seen == Seen::Some {
                    column.hide(windows, cell);
                }
                range.take(column.cell(cell), seen);
            }
            // Scores of NaN alone, which are ignored, or no score at all.
            range.max.iter_mut().for_each(|max| *max = pick(*max == T::LOWEST, T::ZERO, *max));
            let (max, mid) = (range.max, range.is_mid(&range.max));
            for (leaf, node) in nodes.iter_mut().enumerate() {
                for cell in leaf * (LEAF / LANES)..(leaf + 1) * (LEAF / LANES) {
                    match windows.seen(cell) {
                        Seen::None => column.leave_out(cell),
                        seen if mid => column.mid_exponentials(cell, seen, &max),
                        _ => column.exponentials(cell, &max),
                    }
                }
                *node = column.leaf_sums(leaf);
            }
            let sum = join_leaves(block.from / LEAF, nodes, added);
            let mut logs = [T::ZERO; LANES];
            for ((log, &sum), &max) in logs.iter_mut().zip(&sum).zip(&max) {
                *log = pick(sum == T::ZERO, T::LOWEST, sum.ln() + max);
            }
            sums.copy_from_slice(&sum[..sums.len()]);
            lse.copy_from_slice(&logs[..lse.len()]);
        }
    }
}

/// The kernel that turns products `p` of queries and keys into probabilities, and gradients `ds` of the probabilities into those
/// of the products, like [`ScoreGradients`](super::score_rows::ScoreGradients).
pub(super) struct ColumnGradients<'a, T> {
    pub(super) p: &'a mut [T],
    pub(super) ds: &'a mut [T],
    pub(super) block: &'a QueryBlock,
    pub(super) scale: T,
    pub(super) lse: &'a [T],
    /// The [dot product](super::score_rows::RowDots) of each query's output and its gradient.
    pub(super) deltas: &'a [T],
}

impl<T: Gemm> Kernel for ColumnGradients<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let block = self.block;
        for (group, windows) in block.lanes.iter().enumerate() {
            let first = group * LANES;
            let (mut lse, mut delta) = ([T::ZERO; LANES], [T::ZERO; LANES]);
            for (lane, i) in (first..block.rows.min(first + LANES)).enumerate() {
                lse[lane] = pick(self.lse[i] == T::LOWEST, T::ZERO, self.lse[i]);
                delta[lane] = self.deltas[i];
            }
            let mut p = column(self.p, block, group);
            let mut ds = column(self.ds, block, group);
            let cells = || (0..block.width / LANES).map(|cell| (cell, windows.seen(cell)));
            let mut range = ScoreRange::empty();
            for (cell, seen) in cells().filter(|(_, seen)| *seen != Seen::None) {
                if seen == Seen::Some {
                    p.hide(windows, cell);
                }
                range.take(p.cell(cell), seen);
            }
            let mid = range.is_mid(&lse);
            for (cell, seen) in cells() {
                if seen == Seen::None {
                    p.leave_out(cell);
                    ds.leave_out(cell);
                    continue;
                }
                if mid {
                    for key in cell * LANES..(cell + 1) * LANES {
                        let (p, ds) = (p.at(key), ds.at(key));
                        let scores = *p;
                        *p = mid_exponentials(scores, &lse, seen);
                        let mut changes = changes(self.scale, p, ds, &delta);
                        if seen == Seen::Some {
                            changes
                                .iter_mut()
                                .zip(scores)
                                .for_each(|(c, s)| *c = pick(s == T::LOWEST, T::SUM_PAD, *c));
                        }
                        *ds = changes;
                    }
                    continue;
                }
                let marks = p.begin_exponentials(cell, &lse);
                for (i, marks) in marks.iter().enumerate() {
                    let (p, ds) = (p.at(cell * LANES + i), ds.at(cell * LANES + i));
                    p.iter_mut().zip(marks).for_each(|(p, &mark)| *p = end_exponential(mark, *p));
                    let mut changes = changes(self.scale, p, ds, &delta);
                    changes
                        .iter_mut()
                        .zip(marks)
                        .for_each(|(c, &mark)| *c = pick(mark == T::ZERO, T::SUM_PAD, *c));
                    *ds = changes;
                }
            }
        }
    }
}

/// The gradients of a vector of products from those of the probabilities `p`, without -0.
#[inline(always)]
fn changes<T: Gemm>(scale: T, p: &[T; LANES], ds: &[T; LANES], delta: &[T; LANES]) -> [T; LANES] {
    let mut changes = *ds;
    for (change, (&p, &delta)) in changes.iter_mut().zip(p.iter().zip(delta)) {
        *change = scale * (p * (*change - delta)) + T::ZERO;
    }
    changes
}
