//! Loops over the rows of a block of scores: mask, soft cap and bias; exponentials; gradients.

use std::ops::Range;
use std::sync::atomic::{Ordering, compiler_fence};

use super::lane_windows::LANES;
use super::query_block::{QueryBlock, ROWS};
use super::scores::ScoreInputs;
use crate::gemm::{Gemm, MatRef};
use crate::isa::simd::{Kernel, dispatch, prefetch_line_to_write};
use crate::summation::LEAF;
use crate::sums::reducer::SumReducer;
use crate::sums::tree::{BlockTree, RowTree, row_max};
use crate::threads::parts::SharedRows;

/// The number of leaves whose exponentials are computed in one go, in two passes.
const GROUP: usize = 16;

/// Returns one of two values. Both are computed, so that loops vectorise.
#[inline(always)]
pub(super) fn pick<T>(condition: bool, yes: T, no: T) -> T {
    if condition { yes } else { no }
}

/// The first pass over the scores of a leaf: replaces each by one [part](crate::num::real::Real::exp_begin) of its exponential over
/// `e^max`, and writes the other part to `marks`, or 0 for a key that is left out.
#[inline(always)]
fn begin_exponentials<T: Gemm>(leaf: &mut [T; LEAF], marks: &mut [T; LEAF], max: T) {
    for (s, mark) in leaf.iter_mut().zip(marks) {
        let [first, second] = (*s - max).exp_begin();
        *mark = pick(*s == T::LOWEST, T::ZERO, first);
        *s = second;
    }
}

/// The second pass: returns the exponential, or -0 for a key that is left out.
#[inline(always)]
pub(super) fn end_exponential<T: Gemm>(mark: T, second: T) -> T {
    pick(mark == T::ZERO, T::SUM_PAD, T::exp_end([mark, second]))
}

/// The second pass with gradients: replaces the gradients `ds` of a leaf's probabilities by those of the products, which `of` makes of
/// each key's number and the gradient of its score.
#[inline(always)]
fn end_gradients<T: Gemm>(
    (p, ds): (&mut [T; LEAF], &mut [T; LEAF]),
    marks: &[T; LEAF],
    delta: T,
    of: impl Fn(usize, T) -> T,
) {
    for (j, ((p, ds), &mark)) in p.iter_mut().zip(ds).zip(marks).enumerate() {
        *p = end_exponential(mark, *p);
        *ds = pick(mark == T::ZERO, T::SUM_PAD, of(j, *p * (*ds - delta)) + T::ZERO);
    }
}

/// Keeps the compiler from making masked stores of a loop that reads scores before this and writes most of them back after
/// it. Masked stores are slow (`benches/results/2026-11-26-calls-and-masks.md`).
#[inline(always)]
fn end_reads() {
    compiler_fence(Ordering::SeqCst);
}

/// Writes -inf to these places of a row of whole leaves. Its loops have a fixed length: one that began or ended at the
/// places would cost more than the leaves' exponentials.
#[inline(always)]
fn hide<T: Gemm>(row: &mut [T], places: Range<usize>) {
    if places.is_empty() {
        return;
    }
    let leaves = places.start / LEAF..places.end.div_ceil(LEAF);
    for (i, leaf) in leaves.clone().zip(&mut row.as_chunks_mut::<LEAF>().0[leaves]) {
        let [from, to] = [places.start, places.end].map(|at| at.saturating_sub(i * LEAF).min(LEAF) as u32);
        let scores = *leaf;
        end_reads();
        for (j, (s, score)) in (0u32..).zip(leaf.iter_mut().zip(scores)) {
            *s = pick((from <= j) & (j < to), T::LOWEST, score);
        }
    }
}

/// Writes -inf to the scores of a row whose mark, of `marks`, `keeps` refuses.
#[inline(always)]
fn leave_out<T: Gemm, M: Copy>(row: &mut [T], marks: &[M], keeps: impl Fn(M) -> bool) {
    let (leaves, rest) = row.as_chunks_mut::<LEAF>();
    let (leaf_marks, rest_marks) = marks.as_chunks::<LEAF>();
    for (leaf, marks) in leaves.iter_mut().zip(leaf_marks) {
        let scores = *leaf;
        end_reads();
        for (s, (score, &mark)) in leaf.iter_mut().zip(scores.into_iter().zip(marks)) {
            *s = pick(keeps(mark), score, T::LOWEST);
        }
    }
    for (s, &mark) in rest.iter_mut().zip(rest_marks) {
        *s = pick(keeps(mark), *s, T::LOWEST);
    }
}

/// Turns the products of row `i` of a block into scores in its `seen` leaves: soft cap, bias, and -inf for keys that are
/// left out. Writes the derivative of each score by its product, divided by the scale, to `slopes` if there is a soft cap.
/// The other leaves become [`Num::SUM_PAD`](crate::num::real::Num::SUM_PAD).
#[inline(always)]
fn prepare_row<T: Gemm>(
    inputs: &ScoreInputs<'_, T>,
    block: &QueryBlock,
    ([b, h], i): ([usize; 2], usize),
    (row, seen): (&mut [T], &Range<usize>),
    mut slopes: Option<&mut [T]>,
) {
    let span = inputs.rule.span(block.position + i, block.keys);
    let leaves = row.as_chunks_mut::<LEAF>().0;
    for unseen in [0..seen.start, seen.end..leaves.len()] {
        leaves[unseen].iter_mut().for_each(|leaf| *leaf = [T::SUM_PAD; LEAF]);
    }
    let seen = seen.start * LEAF..seen.end * LEAF;
    if !inputs.treat_scores && block.leaves.len() == 1 {
        let [from, to] = [span.start, span.end].map(|key| key.clamp(block.from, block.to) - block.from);
        hide(row, seen.start..from.clamp(seen.start, seen.end));
        return hide(row, to.clamp(seen.start, seen.end)..seen.end);
    }
    let mut done = seen.start;
    for run in &block.leaves {
        let from = (run.start * LEAF).max(span.start).max(block.from);
        let to = (run.end * LEAF).min(span.end);
        if from >= to {
            continue;
        }
        let (keys, at) = (from..to, from - block.from);
        hide(row, done..at);
        done = to - block.from;
        let row = &mut row[at..done];
        if let Some(cap) = inputs.soft_cap {
            let cap = T::of(cap);
            match &mut slopes {
                Some(slopes) => {
                    for (s, slope) in row.iter_mut().zip(&mut slopes[at..]) {
                        let t = (*s / cap).tanh();
                        *s = cap * t;
                        *slope = T::ONE - t * t;
                    }
                }
                None => row.iter_mut().for_each(|s| *s = cap * (*s / cap).tanh()),
            }
        }
        let at = [b, h, block.start + i];
        if let Some(bias) = inputs.bias {
            match bias.row(at, keys.clone()) {
                &[all] if bias.single => row.iter_mut().for_each(|s| *s = *s + all),
                bias => row.iter_mut().zip(bias).for_each(|(s, &bias)| *s = *s + bias),
            }
        }
        if let Some(mask) = inputs.mask {
            match mask.row(at, keys.clone()) {
                &[all] if mask.single => {
                    if !all {
                        row.fill(T::LOWEST);
                    }
                }
                mask => leave_out(row, mask, |seen| seen),
            }
        }
        if let Some([of_q, of_k]) = inputs.documents {
            let own = of_q.row(b)[block.start + i];
            leave_out(row, &of_k.row(b)[keys], |of_k| of_k == own);
        }
    }
    hide(&mut row[..seen.end], done..seen.end);
}

/// The kernel that turns the products of a block, row by row, into [scores](prepare_row) and exponentials, and computes
/// their sums and the logarithms of the sums. The exponential of a key that is left out is -0, which no other
/// exponential is.
pub(super) struct Probabilities<'a, T> {
    pub(super) inputs: &'a ScoreInputs<'a, T>,
    pub(super) head: [usize; 2],
    pub(super) s: &'a mut [T],
    pub(super) block: &'a QueryBlock,
    pub(super) tree: &'a mut BlockTree<T>,
    pub(super) sums: &'a mut [T],
    pub(super) lse: &'a mut [T],
}

impl<T: Gemm> Kernel for Probabilities<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let (block, rule) = (self.block, &self.inputs.rule);
        // Each loop is over all rows: a row's maximum, its exponentials and its sum are a chain, and a CPU overlaps chains
        // only if they are short. It also waits if it reads what it has just written in part. Fewer rows at a time, whose
        // scores fit the first cache, are no faster.
        let mut maxima = [T::ZERO; ROWS];
        let mut leaves = [const { 0..0 }; ROWS];
        for (i, (row, leaves)) in self.s.chunks_exact_mut(block.width).zip(&mut leaves).enumerate() {
            *leaves = block.seen_leaves(rule, i);
            prepare_row(self.inputs, block, (self.head, i), (&mut *row, leaves), None);
        }
        let rows = self.s.chunks_exact(block.width).zip(&leaves);
        for ((row, leaves), max) in rows.zip(&mut maxima) {
            *max = row_max(&row[leaves.start * LEAF..leaves.end * LEAF]);
        }
        // Scores of NaN alone, which are ignored, or no score at all.
        maxima.iter_mut().for_each(|max| *max = pick(*max == T::LOWEST, T::ZERO, *max));
        let mut marks = [[T::ZERO; LEAF]; GROUP];
        for (row, (leaves, &max)) in self.s.chunks_exact_mut(block.width).zip(leaves.iter().zip(&maxima)) {
            for group in row.as_chunks_mut::<LEAF>().0[leaves.clone()].chunks_mut(GROUP) {
                for (leaf, marks) in group.iter_mut().zip(&mut marks) {
                    begin_exponentials(leaf, marks, max);
                }
                for (leaf, marks) in group.iter_mut().zip(&marks) {
                    leaf.iter_mut().zip(marks).for_each(|(s, &mark)| *s = end_exponential(mark, *s));
                }
            }
        }
        let (rows, first) = (block.rows, block.from / LEAF);
        self.tree.fold_rows::<SumReducer>(first, (self.s, block.width), &leaves[..rows], self.sums);
        for (lse, (&sum, &max)) in self.lse.iter_mut().zip(self.sums.iter().zip(&maxima)) {
            *lse = pick(sum == T::ZERO, T::LOWEST, sum.ln() + max);
        }
    }
}

/// The kernel that turns products `p` of queries and keys into [scores](prepare_row) and probabilities, and gradients
/// `ds` of the probabilities into those of the products. Entries of keys that are left out become -0; no other entry is
/// -0.
pub(super) struct ScoreGradients<'a, T> {
    pub(super) inputs: &'a ScoreInputs<'a, T>,
    pub(super) head: [usize; 2],
    pub(super) p: &'a mut [T],
    pub(super) ds: &'a mut [T],
    pub(super) block: &'a QueryBlock,
    pub(super) scale: T,
    /// A row for the derivatives of the scores, divided by the scale, if they are wanted and there is a soft cap.
    pub(super) slopes: Option<&'a mut [T]>,
    pub(super) lse: &'a [T],
    /// The [dot product](RowDots) of each query's output and its gradient.
    pub(super) deltas: &'a [T],
}

impl<T: Gemm> Kernel for ScoreGradients<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run(mut self) {
        let (block, rule) = (self.block, &self.inputs.rule);
        let width = block.width;
        // Apart from the next loop, because a CPU waits if it reads what it has just written in part.
        if self.slopes.is_none() {
            for (i, p) in self.p.chunks_exact_mut(width).enumerate() {
                let leaves = block.seen_leaves(rule, i);
                prepare_row(self.inputs, block, (self.head, i), (&mut *p, &leaves), None);
            }
        }
        let mut marks = [[T::ZERO; LEAF]; GROUP];
        let rows = self.p.chunks_exact_mut(width).zip(self.ds.chunks_exact_mut(width));
        for (i, ((p, ds), (&lse, &delta))) in rows.zip(self.lse.iter().zip(self.deltas)).enumerate() {
            let leaves = block.seen_leaves(rule, i);
            if let Some(slopes) = &mut self.slopes {
                prepare_row(self.inputs, block, (self.head, i), (&mut *p, &leaves), Some(slopes));
            }
            let lse = pick(lse == T::LOWEST, T::ZERO, lse);
            let (p, ds) = (p.as_chunks_mut::<LEAF>().0, ds.as_chunks_mut::<LEAF>().0);
            for unseen in [0..leaves.start, leaves.end..ds.len()] {
                ds[unseen].iter_mut().for_each(|leaf| *leaf = [T::SUM_PAD; LEAF]);
            }
            let slopes = self.slopes.as_ref().map(|slopes| &slopes.as_chunks::<LEAF>().0[leaves.clone()]);
            let groups = p[leaves.clone()].chunks_mut(GROUP).zip(ds[leaves].chunks_mut(GROUP));
            for (g, (p, ds)) in groups.enumerate() {
                for (p, marks) in p.iter_mut().zip(&mut marks) {
                    begin_exponentials(p, marks, lse);
                }
                for (i, ((p, ds), marks)) in p.iter_mut().zip(ds).zip(&marks).enumerate() {
                    match slopes {
                        Some(slopes) => {
                            let slopes = &slopes[g * GROUP + i];
                            end_gradients((p, ds), marks, delta, |j, change| {
                                self.scale * (slopes[j] * change)
                            });
                        }
                        None => end_gradients((p, ds), marks, delta, |_, change| self.scale * change),
                    }
                }
            }
        }
    }
}

/// The kernel that computes the dot products of the rows of two matrices, along the tree over a row.
pub(super) struct RowDots<'a, T> {
    pub(super) x: MatRef<'a, T>,
    pub(super) y: MatRef<'a, T>,
    pub(super) tree: &'a mut RowTree<T>,
    /// Room for the products of the elements.
    pub(super) products: &'a mut [T],
    pub(super) dots: &'a mut [T],
}

impl<T: Gemm> Kernel for RowDots<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let (rows, d) = self.x.shape();
        let products = &mut self.products[..rows * d];
        for (i, products) in products.chunks_exact_mut(d.max(1)).enumerate() {
            for (product, (&x, &y)) in products.iter_mut().zip(self.x.row(i).iter().zip(self.y.row(i))) {
                *product = x * y;
            }
        }
        self.tree.fold_rows::<SumReducer>(products, self.dots);
    }
}

/// Writes rows to the rows of a result from `first` on, `step` rows apart, with 0 instead of -0. With `sums` each row is
/// divided by its sum first, and a row of sum 0 becomes 0. Returns true if no element is an infinity or a NaN.
///
/// # Safety
/// No other thread has these rows of the result.
pub(super) unsafe fn put_rows<T: Gemm>(
    rows: &[T],
    to: &SharedRows<'_, T>,
    (first, step): (usize, usize),
    sums: Option<&[T]>,
) -> bool {
    dispatch(PutRows { rows, to, first, step, sums })
}

/// The kernel of [`put_rows`], which alone makes one.
struct PutRows<'a, 'o, T> {
    rows: &'a [T],
    to: &'a SharedRows<'o, T>,
    first: usize,
    step: usize,
    sums: Option<&'a [T]>,
}

impl<T: Gemm> Kernel for PutRows<'_, '_, T> {
    type Out = bool;
    #[inline(always)]
    fn run(self) -> bool {
        // Zero times an infinity or a NaN is a NaN, and so is each sum that has it. The sums of vectors stay in registers.
        let (mut zeros, mut rest_zero) = ([T::ZERO; LANES], T::ZERO);
        for (i, row) in self.rows.chunks_exact(self.to.row_len().max(1)).enumerate() {
            let mut ahead = self.to.address(self.first + (i + ROWS_AHEAD) * self.step);
            // SAFETY: the promise of `put_rows`' caller; this thread's last reference to a row has ended.
            let to = unsafe { self.to.row(self.first + i * self.step) };
            let scale =
                self.sums.map_or(T::ONE, |sums| if sums[i] == T::ZERO { T::ZERO } else { sums[i].recip() });
            let ((vectors, rest), (to_vectors, to_rest)) =
                (row.as_chunks::<LANES>(), to.as_chunks_mut::<LANES>());
            for (x, to) in vectors.iter().zip(to_vectors) {
                prefetch_line_to_write(ahead);
                ahead = ahead.wrapping_add(LANES);
                // A vector of its own: through references the compiler takes element by element.
                let mut y = *x;
                y.iter_mut().for_each(|y| *y = *y * scale + T::ZERO);
                *to = y;
                zeros.iter_mut().zip(y).for_each(|(zero, y)| *zero = *zero + y * T::ZERO);
            }
            if !rest.is_empty() {
                rest_zero = rest_zero + put_rest(rest, to_rest, scale);
            }
        }
        zeros.iter().all(|&zero| zero == T::ZERO) && rest_zero == T::ZERO
    }
}

/// Writes the last elements of a row, and returns the sum of zero times each.
#[inline(never)]
fn put_rest<T: Gemm>(rest: &[T], to: &mut [T], scale: T) -> T {
    let mut zero = T::ZERO;
    for (&x, to) in rest.iter().zip(to) {
        *to = x * scale + T::ZERO;
        zero = zero + *to * T::ZERO;
    }
    zero
}

/// The number of rows that are asked for before they are written. Neighbouring rows of a head are as far apart as all heads are wide, so the
/// machine does not find them by itself.
const ROWS_AHEAD: usize = 8;
