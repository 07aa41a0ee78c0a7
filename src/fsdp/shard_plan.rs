//! The positions of tensors in a buffer that ranks share equally.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::tensor::sort_by_key;

/// A tensor as a planner sees it: its elements, in blocks that stay on one rank.
///
/// Blocks are counted from the tensor's first element. If `len` is not a multiple of `block`, the last block is shorter.
///
/// ```
/// use isoshard::fsdp::BlockedTensor;
/// // A matrix of 300 rows of 64 elements, quantised in tiles of 128 rows: three blocks, the last one of 44 rows.
/// let tensor = BlockedTensor { len: 300 * 64, block: 128 * 64 };
/// assert_eq!(tensor.len.div_ceil(tensor.block), 3);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockedTensor {
    /// The number of elements.
    pub len: usize,
    /// The number of elements of a block, at least 1.
    pub block: usize,
}

/// The positions of tensors in a buffer of `ranks` shards of equal length.
///
/// Each tensor is one run of elements of the buffer, and no two overlap. A boundary between shards that lies inside a
/// tensor lies between two of its blocks. So an all-gather of the shards gives every tensor as a view, and each rank's
/// part of a tensor is a [`RaggedShard`](crate::placement::Placement::RaggedShard) of whole blocks (Wang et al.,
/// *veScale-FSDP*, arXiv 2602.22437). Elements of the buffer outside all tensors are padding.
///
/// ```
/// use isoshard::fsdp::{BlockedTensor, ShardPlanner};
/// let tensors = [(12, 4), (5, 1), (8, 8)].map(|(len, block)| BlockedTensor { len, block });
/// let plan = ShardPlanner::new(3).align(1).plan(&tensors)?;
/// // Blocks of 4, then of 1, then of 8: 25 elements in three shards of 9.
/// assert_eq!((plan.shard_len(), plan.padding()), (9, 2));
/// // Each rank's part of a tensor, and where it lies in the rank's shard.
/// let parts: Vec<_> = (0..3).map(|rank| plan.part(0, rank)).collect();
/// assert_eq!(parts.iter().map(|part| part.len()).sum::<usize>(), 12);
/// assert!(parts.iter().all(|part| part.start % 4 == 0));
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardPlan {
    tensors: Box<[BlockedTensor]>,
    starts: Box<[usize]>,
    ranks: usize,
    shard_len: usize,
}

impl ShardPlan {
    /// Returns the plan with given starts, after checking that it keeps every rule.
    ///
    /// ```
    /// use isoshard::fsdp::{BlockedTensor, ShardPlan};
    /// let tensors = [(6, 2), (4, 4)].map(|(len, block)| BlockedTensor { len, block });
    /// assert_eq!(ShardPlan::new(&tensors, &[0, 6], 2, 6)?.padding(), 2);
    /// // The boundary at 5 would cut the third block of the first tensor.
    /// let error = ShardPlan::new(&tensors, &[0, 6], 2, 5).unwrap_err();
    /// assert!(error.to_string().contains("a shard boundary cuts a block; got tensor 0 at 0..6, a boundary at 5"));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses another number of starts than tensors, blocks of 0 elements, a buffer without ranks or of more elements
    /// than `usize` counts, tensors that overlap or end after the buffer, and a boundary that cuts a block.
    pub fn new(
        tensors: &[BlockedTensor],
        starts: &[usize],
        ranks: usize,
        shard_len: usize,
    ) -> Result<ShardPlan> {
        let refuse = |rule: &str, given: String| Err(Error::invalid("shard plan", rule, given, ""));
        if starts.len() != tensors.len() {
            let given = format!("{} starts for {} tensors", starts.len(), tensors.len());
            return refuse("each tensor needs a start", given);
        }
        let Some(end) = ranks.checked_mul(shard_len).filter(|_| ranks > 0) else {
            return refuse("no such buffer", format!("{ranks} shards of {shard_len} elements"));
        };
        let mut taken: Vec<(Range<usize>, usize)> = Vec::with_capacity(tensors.len());
        for (t, (&BlockedTensor { len, block }, &start)) in tensors.iter().zip(starts).enumerate() {
            if block == 0 {
                return refuse("a block has no elements", format!("tensor {t}"));
            }
            let range = match start.checked_add(len).filter(|&stop| stop <= end) {
                Some(stop) => start..stop,
                None => {
                    let given =
                        format!("tensor {t} of {len} elements at {start}, {ranks} shards of {shard_len}");
                    return refuse("a tensor ends after the buffer", given);
                }
            };
            if len > 0 && shard_len > 0 {
                let first = (start + 1).next_multiple_of(shard_len);
                let mut inside = (first..range.end).step_by(shard_len);
                if let Some(at) = inside.find(|at| (at - start) % block != 0) {
                    let given = format!(
                        "tensor {t} at {start}..{}, a boundary at {at}, blocks of {block}",
                        range.end
                    );
                    return refuse("a shard boundary cuts a block", given);
                }
            }
            taken.push((range, t));
        }
        taken.retain(|(range, _)| !range.is_empty());
        sort_by_key(&mut taken, |(range, _)| range.start);
        if let Some(pair) = taken.windows(2).find(|pair| pair[0].0.end > pair[1].0.start) {
            let [(a, first), (b, second)] = [&pair[0], &pair[1]];
            return refuse(
                "two tensors overlap",
                format!("tensor {first} at {a:?}, tensor {second} at {b:?}"),
            );
        }
        Ok(ShardPlan { tensors: tensors.into(), starts: starts.into(), ranks, shard_len })
    }

    /// Returns the tensors, in the order in which the planner was given them.
    pub fn tensors(&self) -> &[BlockedTensor] {
        &self.tensors
    }

    /// Returns the number of ranks that share the buffer.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Returns the number of elements of each rank's shard.
    pub fn shard_len(&self) -> usize {
        self.shard_len
    }

    /// Returns the number of elements of the buffer: the gathered shards of all ranks.
    pub fn buffer_len(&self) -> usize {
        self.ranks * self.shard_len
    }

    /// Returns the number of elements of the buffer that belong to no tensor.
    pub fn padding(&self) -> usize {
        self.buffer_len() - self.tensors.iter().map(|tensor| tensor.len).sum::<usize>()
    }

    /// Returns the range of a tensor in the buffer.
    ///
    /// # Panics
    /// Panics if there is no such tensor.
    pub fn range(&self, tensor: usize) -> Range<usize> {
        self.starts[tensor]..self.starts[tensor] + self.tensors[tensor].len
    }

    /// Returns the elements of a tensor that a rank holds, counted from the tensor's first element. The range is empty if
    /// the rank holds none.
    ///
    /// # Panics
    /// Panics if there is no such tensor or rank.
    pub fn part(&self, tensor: usize, rank: usize) -> Range<usize> {
        assert!(rank < self.ranks, "rank {rank} of {}", self.ranks);
        let Range { start, end } = self.range(tensor);
        let (low, high) = (rank * self.shard_len, (rank + 1) * self.shard_len);
        let (from, to) = (start.max(low).min(end), end.min(high).max(start));
        from - start..(to - start).max(from - start)
    }

    /// Returns the position of a rank's part of a tensor in the rank's shard.
    ///
    /// # Panics
    /// Panics if there is no such tensor or rank.
    pub fn position(&self, tensor: usize, rank: usize) -> usize {
        assert!(rank < self.ranks, "rank {rank} of {}", self.ranks);
        self.starts[tensor].saturating_sub(rank * self.shard_len).min(self.shard_len)
    }
}
