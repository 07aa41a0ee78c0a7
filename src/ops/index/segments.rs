//! Sums of rows by destination, used by `embedding_grad` and `scatter_add`.

use std::slice::{from_mut, from_ref};

use bytemuck::{Pod, cast_slice, cast_slice_mut};

use crate::error::{Error, Result};
use crate::tensor::{DType, Float, KernelList, LEAF, SplitRule, cpu};

use crate::ops::Meta;

/// Returns the index as `usize`, or an error that begins with `verb` if it is not one of the `n` indices of `dim`.
pub(in crate::ops) fn checked_index(verb: &str, index: i64, n: usize, dim: usize) -> Result<usize> {
    usize::try_from(index).ok().filter(|&i| i < n).ok_or_else(|| {
        Error::invalid(
            verb,
            format!("an index leaves dim {dim}"),
            format!("index {index} for {n} indices"),
            format!("indices run from 0 to below {n}"),
        )
    })
}

/// Refuses indices that are not i64.
pub(in crate::ops) fn expect_indices(verb: &str, index: &Meta) -> Result<()> {
    if index.dtype == DType::I64 {
        return Ok(());
    }
    Err(Error::invalid(verb, "indices are i64", index.to_string(), "cast them first"))
}

/// Adds rows of `src`, each of `width` elements, into rows of `out` by destination: one call per `out`.
///
/// Rows with the same destination are added along the reduction tree over the positions of `src`'s rows, which are
/// row-major indices over `extents`. It is the tree of [`cpu::reduce`](crate::tensor::cpu::reduce) without the
/// positions that have another destination.
pub(in crate::ops) struct SegmentSums<'a, T: Float> {
    extents: &'a [usize],
    width: usize,
    /// Positions by destination, and the end of each destination's run in them.
    order: KernelList<u32>,
    ends: KernelList<u32>,
    /// The sum of every destination of rows of one element, and in the second number's bytes its [`count`].
    sums: KernelList<[T::Acc; 2]>,
    /// The destinations of three or more elements, and the positions of their elements.
    long: KernelList<u32>,
    hits: KernelList<u32>,
    /// The path of every position; empty until a sum of three rows needs it.
    paths: KernelList<u64>,
    /// The unfinished sums of a [`LongRun`].
    strips: Vec<[T::Acc; STRIP]>,
}

impl<'a, T: Float<Acc: Pod>> SegmentSums<'a, T> {
    pub fn new(extents: &'a [usize], width: usize) -> SegmentSums<'a, T> {
        let (order, ends, long, hits) = Default::default();
        let (sums, paths, strips) = Default::default();
        SegmentSums { extents, width, order, ends, sums, long, hits, paths, strips }
    }

    /// Adds row `p` of `src` to row `index[p] - start` of `out` for each `p`, and skips rows that `out` does not have.
    /// `out` must be zero; a sum of zeros is +0.
    pub fn add(&mut self, index: &[i64], start: usize, src: &[T], out: &mut [T]) {
        let width = self.width;
        let held = out.len().checked_div(width).unwrap_or(0);
        let place = |i: i64| (i as usize).wrapping_sub(start);
        if held > 4 * index.len() + 1024 || held >= u32::MAX as usize {
            // Few rows in a large result: a sort of them costs less than a pass over all destinations.
            let hits = index.iter().enumerate().filter(|&(_, &i)| place(i) < held);
            let mut sorted = KernelList::<[u64; 2]>::new();
            hits.for_each(|(p, &i)| sorted.push([place(i) as u64, p as u64]));
            sorted.sort_unstable();
            let mut order = std::mem::take(&mut self.order);
            order.resize(sorted.len());
            order.iter_mut().zip(&*sorted).for_each(|(to, &[_, p])| *to = p as u32);
            let mut end = 0;
            for run in sorted.chunk_by(|a, b| a[0] == b[0]) {
                let positions = &order[end..end + run.len()];
                end += run.len();
                self.run(positions, src, &mut out[run[0][0] as usize * width..][..width]);
            }
            self.order = order;
            return;
        }
        if width == 1 {
            return self.add_elements(index, start, src, out);
        }
        let (mut order, mut ends) = (std::mem::take(&mut self.order), std::mem::take(&mut self.ends));
        ends.clear();
        ends.resize(held + 1);
        order.resize(index.len());
        let (placed, counts) = (&mut order[..], &mut ends[..]);
        // The last entry counts the rows that are skipped.
        index.iter().for_each(|&i| counts[place(i).min(held)] += 1);
        let mut next = 0;
        for end in &mut *counts {
            next += std::mem::replace(end, next);
        }
        for (p, &i) in index.iter().enumerate() {
            let end = &mut counts[place(i).min(held)];
            placed[*end as usize] = p as u32;
            *end += 1;
        }
        let mut first = 0;
        for (out, &end) in out.chunks_exact_mut(width.max(1)).zip(&ends[..held]) {
            self.run(&order[first as usize..end as usize], src, out);
            first = end;
        }
        (self.order, self.ends) = (order, ends);
    }

    /// Adds rows of one element. Sums of one or two elements have one order, so they are added as the elements come; the
    /// positions of longer sums are collected by destination.
    fn add_elements(&mut self, index: &[i64], start: usize, src: &[T], out: &mut [T]) {
        const LONG: u32 = 3;
        let (zero, held) = (T::Acc::default(), out.len());
        // The last place takes the elements that `out` does not have.
        let place = |i: i64| (i as usize).wrapping_sub(start).min(held);
        self.sums.clear();
        self.sums.resize(held + 1);
        self.long.resize(index.len() / LONG as usize + 1);
        let (sums, long, mut longs) = (&mut self.sums[..], &mut self.long[..], 0);
        // Lists grow without a branch: one that depends on random destinations costs more than a store.
        for (&i, x) in index.iter().zip(src) {
            let place = place(i);
            let [sum, counted] = &mut sums[place];
            *sum = *sum + x.widen();
            let count = count_mut(counted);
            *count += 1;
            long[longs] = place as u32;
            longs += usize::from(*count == LONG);
        }
        *count_mut(&mut sums[held][1]) = 0;
        out.iter_mut().zip(&*sums).for_each(|(out, &[sum, _])| *out = T::narrow(sum));
        if longs == 0 {
            return;
        }
        if self.paths.is_empty() {
            self.paths = tree_paths(self.extents);
        }
        self.ends.resize(held + 1);
        let (long, ends, mut all) = (&long[..longs], &mut self.ends[..], 0);
        for &place in long {
            ends[place as usize] = all;
            all += count(&sums[place as usize][1]);
        }
        self.hits.resize(index.len() + 1);
        let (hits, mut hits_len) = (&mut self.hits[..], 0);
        for (p, &i) in index.iter().enumerate() {
            hits[hits_len] = p as u32;
            hits_len += usize::from(count(&sums[place(i)][1]) >= LONG);
        }
        self.order.resize(all as usize);
        let order = &mut self.order[..];
        for &p in &hits[..hits_len] {
            let end = &mut ends[place(index[p as usize])];
            order[*end as usize] = p;
            *end += 1;
        }
        let mut first = 0;
        for &place in long {
            let end = ends[place as usize] as usize;
            if let Some(out) = out.get_mut(place as usize) {
                *out = T::narrow(zero + tree_sum(&order[first..end], &self.paths, src));
            }
            first = end;
        }
    }

    /// Writes the sum of the rows of `src` at ascending `positions`, if there are any.
    #[inline(always)]
    fn run(&mut self, positions: &[u32], src: &[T], out: &mut [T]) {
        let (zero, row) = (T::Acc::default(), |p: u32| &src[p as usize * self.width..][..self.width]);
        match *positions {
            [] => {}
            [p] => out.iter_mut().zip(row(p)).for_each(|(o, x)| *o = T::narrow(zero + x.widen())),
            [p, q] => {
                for (o, (x, y)) in out.iter_mut().zip(row(p).iter().zip(row(q))) {
                    *o = T::narrow(zero + (x.widen() + y.widen()));
                }
            }
            _ => self.long_run(positions, src, out),
        }
    }

    fn long_run(&mut self, positions: &[u32], src: &[T], out: &mut [T]) {
        if self.paths.is_empty() {
            self.paths = tree_paths(self.extents);
        }
        let (paths, strips) = (&self.paths, &mut self.strips);
        cpu::dispatch(LongRun { positions, paths, src, out, strips });
    }
}

/// Returns the number of elements of a sum, which lies in the bytes of the number beside it, so that both come from one
/// cache line.
#[inline(always)]
fn count<A: Pod>(bytes: &A) -> u32 {
    cast_slice(from_ref(bytes))[0]
}

/// Returns [`count`] for writing.
#[inline(always)]
fn count_mut<A: Pod>(bytes: &mut A) -> &mut u32 {
    &mut cast_slice_mut(from_mut(bytes))[0]
}

/// The number of columns that [`LongRun`] adds at a time, so that unfinished sums stay in the nearest cache.
const STRIP: usize = 1024;

/// Writes the sum of the rows of `src` at ascending `positions` to `out`, strip by strip.
///
/// The deeper of two neighbouring nodes is added first, so at most one sum per level waits for its right half.
struct LongRun<'a, T: Float> {
    positions: &'a [u32],
    paths: &'a [u64],
    src: &'a [T],
    out: &'a mut [T],
    /// The sums that wait, of higher nodes first, and after them the current sum.
    strips: &'a mut Vec<[T::Acc; STRIP]>,
}

impl<T: Float> cpu::Kernel for LongRun<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let LongRun { positions, paths, src, out, strips } = self;
        let (zero, width) = (T::Acc::default(), out.len());
        let level = |k: usize| match positions.get(k) {
            Some(&p) => (paths[positions[k - 1] as usize] ^ paths[p as usize]).ilog2(),
            None => u64::BITS,
        };
        if strips.is_empty() {
            strips.push([zero; STRIP]);
        }
        for first in (0..width).step_by(STRIP) {
            let n = STRIP.min(width - first);
            let row = |k: usize| &src[positions[k] as usize * width + first..][..n];
            // The bits of `waiting` name the levels of the nodes that join the sums that wait; `at` counts these.
            let (mut waiting, mut at, mut next) = (0u64, 0, level(1));
            strips[0].iter_mut().zip(row(0)).for_each(|(sum, x)| *sum = x.widen());
            for k in 1..positions.len() {
                let here = std::mem::replace(&mut next, level(k + 1));
                if let Some(&later) = positions.get(k + 2) {
                    // Rows lie far apart, so the CPU does not foresee the next one.
                    cpu::prefetch(&src[later as usize * width + first..][..n]);
                }
                while waiting & ((1 << here) - 1) != 0 {
                    let (left, right) = strips.split_at_mut(at);
                    left[at - 1][..n].iter_mut().zip(&right[0]).for_each(|(a, &b)| *a = *a + b);
                    waiting &= waiting - 1;
                    at -= 1;
                }
                if here < next {
                    // The row's node is the lowest that is open, so the row is added at once.
                    strips[at].iter_mut().zip(row(k)).for_each(|(sum, x)| *sum = *sum + x.widen());
                } else {
                    waiting |= 1 << here;
                    at += 1;
                    if strips.len() == at {
                        strips.push([zero; STRIP]);
                    }
                    strips[at].iter_mut().zip(row(k)).for_each(|(sum, x)| *sum = x.widen());
                }
            }
            while at > 0 {
                let (left, right) = strips.split_at_mut(at);
                left[at - 1][..n].iter_mut().zip(&right[0]).for_each(|(a, &b)| *a = *a + b);
                at -= 1;
            }
            let out = out[first..first + n].iter_mut();
            out.zip(&strips[0]).for_each(|(out, &sum)| *out = T::narrow(zero + sum));
        }
    }
}

/// Returns the sum of the elements of `src` at one or more ascending `positions`.
#[inline(always)]
fn tree_sum<T: Float>(positions: &[u32], paths: &[u64], src: &[T]) -> T::Acc {
    if let [a, b, c] = *positions {
        let ([a_path, b_path, c_path], [a, b, c]) =
            ([a, b, c].map(|p| paths[p as usize]), [a, b, c].map(|p| src[p as usize].widen()));
        // The pair that a lower node joins is added first.
        let (left, right) = ((a + b) + c, a + (b + c));
        return if a_path ^ b_path < b_path ^ c_path { left } else { right };
    }
    // One sum per level at most waits for its right half; the bits of `waiting` name the levels.
    let (mut sums, mut waiting) = ([T::Acc::default(); 64], 0u64);
    let mut sum = src[positions[0] as usize].widen();
    for pair in positions.windows(2) {
        let level = (paths[pair[0] as usize] ^ paths[pair[1] as usize]).ilog2();
        while waiting & ((1 << level) - 1) != 0 {
            sum = sums[waiting.trailing_zeros() as usize] + sum;
            waiting &= waiting - 1;
        }
        sums[level as usize] = sum;
        waiting |= 1 << level;
        sum = src[pair[1] as usize].widen();
    }
    while waiting != 0 {
        sum = sums[waiting.trailing_zeros() as usize] + sum;
        waiting &= waiting - 1;
    }
    sum
}

/// Returns each position's path in the tree over `extents`, with one bit per level: left 0, right 1. Paths ascend, and
/// the highest bit in which two differ is the level of the node that joins their positions.
fn tree_paths(extents: &[usize]) -> KernelList<u64> {
    let mut paths = KernelList::new();
    paths.push(0u64);
    for (d, &n) in extents.iter().enumerate() {
        let innermost = d + 1 == extents.len();
        // Within a leaf the path is the index in the leaf.
        let leaf_bits = if innermost { LEAF.ilog2() } else { 0 };
        let levels = SplitRule::Halves.depth(n, 1 << leaf_bits) + leaf_bits;
        let mut of_dim = KernelList::new();
        halve(n, 0, levels, leaf_bits, &mut of_dim);
        assert!(
            paths.last().is_none_or(|&p| p.leading_zeros() >= levels),
            "no memory holds so many positions"
        );
        let mut finer = KernelList::new();
        finer.resize(paths.len() * of_dim.len());
        for (finer, outer) in finer.chunks_exact_mut(of_dim.len().max(1)).zip(&*paths) {
            finer.iter_mut().zip(&*of_dim).for_each(|(to, p)| *to = outer << levels | p);
        }
        paths = finer;
    }
    paths
}

/// Appends the paths of a range of `n` indices, which lies `levels` above single indices.
fn halve(n: usize, path: u64, levels: u32, leaf_bits: u32, out: &mut KernelList<u64>) {
    if levels == leaf_bits {
        (0..n as u64).for_each(|i| out.push(path << leaf_bits | i));
        return;
    }
    let left = if n < 2 { n } else { SplitRule::Halves.left_of(n) };
    halve(left, path << 1, levels - 1, leaf_bits, out);
    if n > left {
        halve(n - left, path << 1 | 1, levels - 1, leaf_bits, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{ReduceOp, Tensor, cpu};

    #[test]
    fn one_destination_gives_the_bits_of_a_reduction() {
        for extents in [&[1][..], &[2], &[3], &[31], &[32], &[33], &[100], &[257], &[3, 5], &[7, 1, 45]] {
            let n: usize = extents.iter().product();
            let src: Vec<f32> = (0..n).map(|i| ((i * 7919 + 13) as f32).sin() * 1e3).collect();
            let mut out = [0.0; 3];
            SegmentSums::new(extents, 1).add(&vec![6; n], 5, &src, &mut out);
            let x = Tensor::from_slice(&src, extents).unwrap();
            let dims: Vec<usize> = (0..extents.len()).collect();
            let sum = cpu::reduce("sum", &x, &dims, ReduceOp::Sum, false).unwrap();
            assert_eq!(out, [0.0, sum.item().unwrap() as f32, 0.0], "{extents:?}");
        }
    }

    #[test]
    fn results_of_any_size_have_the_same_bits() {
        for (len, places, width) in [(80, 7, 3), (80, 7, 1), (100, 40, 1), (300, 3, 1), (65, 30, 2)] {
            let src: Vec<f32> = (0..len * width).map(|i| ((i * 7919 + 13) as f32).sin() * 1e3).collect();
            let index: Vec<i64> = (0..len).map(|i| (i * i * 31 / 7 % places) as i64).collect();
            let (mut small, mut large) = (vec![0.0; width * places], vec![0.0; width * 5000]);
            let extents = [len];
            let mut sums = SegmentSums::new(&extents, width);
            sums.add(&index, 0, &src, &mut small);
            sums.add(&index, 0, &src, &mut large);
            assert_eq!(small, large[..width * places], "{len} {places} {width}");
            let mut part = vec![0.0; 2 * width];
            sums.add(&index, 1, &src, &mut part);
            assert_eq!(part, small[width..][..2 * width], "{len} {places} {width}");
        }
    }
}
