//! A packing problem: tensors, the ranks that share their buffer, and the rules of each shard length.

use std::collections::BTreeSet;

use super::shard_plan::BlockedTensor;

/// Tensors that a buffer of `ranks` equal shards is to hold. No tensor is empty, and no block is longer than its tensor.
#[derive(Debug)]
pub(super) struct PackingProblem<'a> {
    pub tensors: &'a [BlockedTensor],
    pub ranks: usize,
    /// A shard's length is a multiple of this number of elements.
    pub align: usize,
    /// The sum of the tensors' lengths.
    pub total: usize,
}

/// Returns the least start of a tensor at `from` or later, in shards of `shard_len` elements, or `None` if there is no
/// start. A later `from` never has an earlier start, so for tensors in a given order it is best to place each one as
/// early as possible.
pub(super) fn earliest_start(tensor: BlockedTensor, from: usize, shard_len: usize) -> Option<usize> {
    let BlockedTensor { len, block } = tensor;
    let boundary = from.checked_next_multiple_of(shard_len)?;
    let room = boundary - from;
    // It ends before the next boundary.
    if len <= room {
        return Some(from);
    }
    // It begins with whole blocks before the boundary, and goes on to the next one. If shards hold whole blocks, then any
    // number of boundaries may follow.
    let longest = if shard_len.is_multiple_of(block) { usize::MAX } else { shard_len };
    let before = room - room % block;
    if before > 0 && len - before <= longest {
        return Some(boundary - before);
    }
    // It begins at the boundary.
    if len <= longest {
        return Some(boundary);
    }
    // It lies in two shards, on both sides of the boundary after that.
    let before = shard_len - shard_len % block;
    if len - before <= shard_len { boundary.checked_add(shard_len - before) } else { None }
}

impl PackingProblem<'_> {
    /// Returns starts for shards of `shard_len` elements, placing the tensors in `order`, each as early as possible, or
    /// `None` if they do not fit. If `fills`, a gap before a tensor takes the longest later ones that fit into it whole.
    pub fn place(&self, shard_len: usize, order: &[usize], fills: bool) -> Option<Vec<usize>> {
        const UNPLACED: usize = usize::MAX;
        let end = shard_len.checked_mul(self.ranks)?;
        let mut starts = vec![UNPLACED; self.tensors.len()];
        let mut rest: BTreeSet<(usize, usize)> = BTreeSet::new();
        if fills {
            rest.extend(order.iter().map(|&t| (self.tensors[t].len, t)));
        }
        let mut at = 0;
        for &t in order {
            if starts[t] != UNPLACED {
                continue;
            }
            let tensor = self.tensors[t];
            let start = earliest_start(tensor, at, shard_len)?;
            if tensor.len > end.saturating_sub(start) {
                return None;
            }
            rest.remove(&(tensor.len, t));
            while at < start && !rest.is_empty() {
                // Up to the next boundary, which may lie in the gap.
                let stop = start.min((at + 1).next_multiple_of(shard_len));
                match rest.range(..=(stop - at, usize::MAX)).next_back().copied() {
                    Some((len, filler)) => {
                        rest.remove(&(len, filler));
                        starts[filler] = at;
                        at += len;
                    }
                    None => at = stop,
                }
            }
            starts[t] = start;
            at = start + tensor.len;
        }
        Some(starts)
    }

    /// Returns a lower bound of the lengths of legal shards.
    ///
    /// It follows from the sum of the tensors, from the number of blocks that a shard holds, and from the blocks of
    /// tensors that are longer than two shards: such a tensor holds two boundaries, so a shard is a multiple of its block.
    pub fn lower_bound(&self) -> usize {
        /// Lengths that are refused one after the other, before the bound is taken as it is.
        const STEPS: usize = 256;
        let (mut low, mut high) = (self.total.div_ceil(self.ranks).max(1), self.total);
        while low < high {
            let middle = low + (high - low) / 2;
            if self.holds_all_blocks(middle) { high = middle } else { low = middle + 1 }
        }
        for _ in 0..STEPS {
            let Some(next) = self.next_len(low) else { break };
            if self.tensors.iter().all(|tensor| earliest_start(*tensor, 0, next).is_some()) {
                return next;
            }
            low = next + 1;
        }
        self.next_len(low).unwrap_or(low)
    }

    /// Returns the least shard length from `from` on that is a multiple of the alignment, and of the blocks of tensors
    /// that are longer than two shards; `None` if that exceeds `usize`.
    pub fn next_len(&self, from: usize) -> Option<usize> {
        let mut low = from.max(1);
        loop {
            // Up to this length the same tensors are longer than two shards.
            let longer = |len: usize| self.tensors.iter().filter(move |tensor| tensor.len.div_ceil(2) > len);
            let high = longer(low).map(|tensor| tensor.len.div_ceil(2)).min();
            let divisor = longer(low).try_fold(self.align, |all, tensor| lcm(all, tensor.block));
            match (divisor.and_then(|divisor| low.checked_next_multiple_of(divisor)), high) {
                (Some(next), None) => return Some(next),
                (Some(next), Some(high)) if next < high => return Some(next),
                (_, Some(high)) => low = high,
                (None, None) => return None,
            }
        }
    }

    /// Returns false if no distribution of the blocks to shards of this length can hold them all. Of blocks of at least
    /// some length, a shard holds only as many as fit with that length; of blocks beyond its half, one (Martello and
    /// Toth, *Lower bounds and reduction procedures for the bin packing problem*, 1990).
    fn holds_all_blocks(&self, shard_len: usize) -> bool {
        let ranks = self.ranks as u128;
        let mut blocks: Vec<(usize, u128)> = Vec::new();
        for &BlockedTensor { len, block } in self.tensors {
            blocks.push((block, (len / block) as u128));
            blocks.push((len % block, 1));
        }
        blocks.retain(|(len, _)| *len > 0);
        blocks.sort_unstable();
        blocks.dedup_by(|next, one| {
            let same = next.0 == one.0;
            one.1 += if same { next.1 } else { 0 };
            same
        });
        let mut longer = 0;
        let each_kind_fits = blocks.iter().rev().all(|&(len, n)| {
            longer += n;
            len <= shard_len && longer.div_ceil((shard_len / len) as u128) <= ranks
        });
        let half = shard_len / 2;
        let together = |least: usize| {
            let (mut alone, mut large, mut middle) = (0, (0, 0), 0);
            for &(len, n) in &blocks {
                match len {
                    _ if len > shard_len - least => alone += n,
                    _ if len > half => large = (large.0 + n, large.1 + len as u128 * n),
                    _ if len >= least => middle += len as u128 * n,
                    _ => {}
                }
            }
            let room = large.0 * shard_len as u128 - large.1;
            alone + large.0 + u128::div_ceil(middle.saturating_sub(room), shard_len as u128) <= ranks
        };
        let leasts = blocks.iter().map(|block| block.0).take_while(|&len| len <= half);
        each_kind_fits && together(0) && leasts.into_iter().all(together)
    }
}

/// Returns the least common multiple, or `None` if it exceeds `usize`.
pub(super) fn lcm(a: usize, b: usize) -> Option<usize> {
    let (mut gcd, mut rest) = (a, b);
    while rest > 0 {
        (gcd, rest) = (rest, gcd % rest);
    }
    (a / gcd).checked_mul(b)
}
