//! The search for a short shard.

use super::packing::{PackingProblem, lcm};
use super::shard_plan::{BlockedTensor, ShardPlan};
use crate::error::{Error, Result};
use crate::tensor::sort_by_key;

/// Shard lengths that the search tries one after the other from the lower bound on, and then in growing steps.
const TRIED: usize = 24;
/// Up to this number of tensors, all orders are tried.
const ALL_ORDERS: usize = 5;

/// Finds the positions of tensors in a buffer that ranks share equally, with shards as short as it can.
///
/// The problem is NP-hard: tensors of one block each are a bin packing. The search is that of veScale-FSDP (Wang et al.,
/// arXiv 2602.22437, §5) and goes on from there:
///
/// 1. The *paper's heuristic*: tensors in the given order; for the common multiples of the alignment and of ever more
///    blocks, from the shortest, the least multiple at which the tensors fit. For a given order and length, placing each
///    tensor as early as possible is optimal.
/// 2. Other orders: the longest blocks first, the longest tensors first, and all orders of up to five tensors. Gaps
///    before a block's boundary are filled with later tensors.
/// 3. Lengths between a [lower bound](ShardPlanner::lower_bound) and the best length so far, first one by one, then by
///    bisection.
///
/// The result is never longer than the heuristic's. It depends on the arguments only, not on a clock, so all ranks plan
/// alike. A unit of 800 tensors takes milliseconds.
#[derive(Clone, Copy, Debug)]
pub struct ShardPlanner {
    ranks: usize,
    align: usize,
}

impl ShardPlanner {
    /// Returns a planner for a buffer that `ranks` ranks share, whose shards are multiples of 8 elements: 16 bytes of
    /// 16-bit elements, so that every shard begins at a multiple of 16 bytes.
    ///
    /// ```
    /// use isoshard::fsdp::{BlockedTensor, ShardPlanner};
    /// let plan = ShardPlanner::new(4).plan(&[BlockedTensor { len: 100, block: 1 }])?;
    /// assert_eq!((plan.shard_len(), plan.padding()), (32, 28));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn new(ranks: usize) -> ShardPlanner {
        ShardPlanner { ranks, align: 8 }
    }

    /// Makes shards multiples of `elements` elements.
    ///
    /// ```
    /// use isoshard::fsdp::{BlockedTensor, ShardPlanner};
    /// let plan = ShardPlanner::new(4).align(1).plan(&[BlockedTensor { len: 100, block: 1 }])?;
    /// assert_eq!((plan.shard_len(), plan.padding()), (25, 0));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn align(mut self, elements: usize) -> ShardPlanner {
        self.align = elements;
        self
    }

    /// Returns the plan with the shortest shards that the search finds.
    ///
    /// ```
    /// use isoshard::fsdp::{BlockedTensor, ShardPlanner};
    /// // Two matrices that stay whole, and a vector, on two ranks.
    /// let tensors = [(40, 1), (64, 64), (64, 64)].map(|(len, block)| BlockedTensor { len, block });
    /// let plan = ShardPlanner::new(2).plan(&tensors)?;
    /// assert_eq!(plan.shard_len(), 88);
    /// assert!((0..2).all(|rank| [0, 64].contains(&plan.part(1, rank).len())));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses 0 ranks, an alignment or a block of 0 elements, and a buffer of more elements than `usize` counts.
    pub fn plan(&self, tensors: &[BlockedTensor]) -> Result<ShardPlan> {
        self.solve(tensors, search)
    }

    /// Returns a length that no plan's shards are shorter than.
    ///
    /// ```
    /// use isoshard::fsdp::{BlockedTensor, ShardPlanner};
    /// // A shard that boundaries of a long matrix cut at rows of 96 elements is a multiple of 96.
    /// let tensor = BlockedTensor { len: 96 * 100, block: 96 };
    /// assert_eq!(ShardPlanner::new(40).lower_bound(&[tensor])?, 288);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`ShardPlanner::plan`] refuses.
    pub fn lower_bound(&self, tensors: &[BlockedTensor]) -> Result<usize> {
        let (_, blocked) = self.check(tensors)?;
        Ok(if blocked.is_empty() { 0 } else { self.problem(&blocked).lower_bound() })
    }

    /// Returns the plan of the paper's heuristic, the first step of the search: for comparisons.
    ///
    /// ```
    /// use isoshard::fsdp::{BlockedTensor, ShardPlanner};
    /// // Matrices that stay whole: 64 and 16 on one rank, 40 and 40 on the other.
    /// let tensors = [40, 64, 40, 16].map(|len| BlockedTensor { len, block: len });
    /// let planner = ShardPlanner::new(2);
    /// assert_eq!([planner.plan_in_order(&tensors)?, planner.plan(&tensors)?].map(|plan| plan.shard_len()), [104, 80]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`ShardPlanner::plan`] refuses.
    pub fn plan_in_order(&self, tensors: &[BlockedTensor]) -> Result<ShardPlan> {
        self.solve(tensors, in_order)
    }

    fn solve(
        &self,
        tensors: &[BlockedTensor],
        solver: impl Fn(&PackingProblem<'_>) -> Option<Packing>,
    ) -> Result<ShardPlan> {
        let (kept, blocked) = self.check(tensors)?;
        if blocked.is_empty() {
            return ShardPlan::new(tensors, &vec![0; tensors.len()], self.ranks, 0);
        }
        let Some(found) = solver(&self.problem(&blocked)) else {
            let given = format!("{} tensors, {} ranks", tensors.len(), self.ranks);
            return Err(Error::invalid(
                "shard plan",
                "the buffer has too many elements",
                given,
                "use fewer ranks",
            ));
        };
        let mut starts = vec![0; tensors.len()];
        kept.iter().zip(found.starts).for_each(|(&t, start)| starts[t] = start);
        ShardPlan::new(tensors, &starts, self.ranks, found.shard_len)
    }

    fn problem<'a>(&self, tensors: &'a [BlockedTensor]) -> PackingProblem<'a> {
        let total = tensors.iter().map(|tensor| tensor.len).sum();
        PackingProblem { tensors, ranks: self.ranks, align: self.align, total }
    }

    /// Returns the tensors that have elements, and their indices.
    fn check(&self, tensors: &[BlockedTensor]) -> Result<(Vec<usize>, Vec<BlockedTensor>)> {
        let refuse = |rule: &str, given: String| Err(Error::invalid("shard plan", rule, given, ""));
        if self.ranks == 0 || self.align == 0 {
            return refuse(
                "no such buffer",
                format!("{} ranks, shards of multiples of {}", self.ranks, self.align),
            );
        }
        if let Some(t) = tensors.iter().position(|tensor| tensor.block == 0) {
            return refuse("a block has no elements", format!("tensor {t}"));
        }
        if tensors.iter().try_fold(0usize, |sum, tensor| sum.checked_add(tensor.len)).is_none() {
            return refuse("the buffer has too many elements", format!("{} tensors", tensors.len()));
        }
        let kept: Vec<usize> = (0..tensors.len()).filter(|&t| tensors[t].len > 0).collect();
        // A block that is longer than its tensor is the tensor.
        let whole = |&t: &usize| BlockedTensor { block: tensors[t].block.min(tensors[t].len), ..tensors[t] };
        let blocked = kept.iter().map(whole).collect();
        Ok((kept, blocked))
    }
}

/// Starts of all tensors in shards of one length.
struct Packing {
    shard_len: usize,
    starts: Vec<usize>,
}

/// Packs the tensors in their order, without filling gaps, in the least multiple of a common multiple of blocks at which
/// a bisection finds that they fit.
fn in_order(problem: &PackingProblem<'_>) -> Option<Packing> {
    let order: Vec<usize> = (0..problem.tensors.len()).collect();
    let mut blocks: Vec<usize> = problem.tensors.iter().map(|tensor| tensor.block).collect();
    blocks.sort_unstable();
    let mut multiples = vec![problem.align];
    for block in blocks {
        let last = multiples[multiples.len() - 1];
        let Some(next) = lcm(last, block).filter(|&next| next != last) else { continue };
        multiples.push(next);
    }
    let mut best: Option<Packing> = None;
    for multiple in multiples {
        let pack = |count: usize| {
            let shard_len = count.checked_mul(multiple)?;
            Some(Packing { shard_len, starts: problem.place(shard_len, &order, false)? })
        };
        // One shard holds all, if the others may be as long.
        let least = problem.total.div_ceil(problem.ranks).div_ceil(multiple);
        let longest = usize::MAX / problem.ranks / multiple;
        let (mut low, mut high) = (least, problem.total.div_ceil(multiple).min(longest));
        let Some(mut found) = pack(high) else { continue };
        while low < high {
            let middle = low + (high - low) / 2;
            match pack(middle) {
                Some(packing) => (found, high) = (packing, middle),
                None => low = middle + 1,
            }
        }
        if best.as_ref().is_none_or(|best| found.shard_len < best.shard_len) {
            best = Some(found);
        }
    }
    best
}

/// Packs the tensors in several orders, in the shortest shards that it finds.
fn search(problem: &PackingProblem<'_>) -> Option<Packing> {
    let mut best = in_order(problem)?;
    let orders = orders(problem);
    let pack = |shard_len: usize| {
        let starts = orders.iter().find_map(|order| problem.place(shard_len, order, true))?;
        Some(Packing { shard_len, starts })
    };
    let (mut next, mut step) = (problem.lower_bound(), 1);
    let mut refused = next.saturating_sub(1);
    for tried in 0.. {
        if next >= best.shard_len {
            break;
        }
        match pack(next) {
            Some(packing) => best = packing,
            None => refused = next,
        }
        step = if tried < TRIED { 1 } else { step * 2 };
        let Some(later) = next.checked_add(step).and_then(|from| problem.next_len(from)) else { break };
        next = later;
    }
    // Between the last length that was refused and the best one.
    for _ in 0..TRIED {
        let middle = refused + (best.shard_len - refused) / 2;
        let Some(middle) =
            problem.next_len(middle).filter(|&middle| middle > refused && middle < best.shard_len)
        else {
            break;
        };
        match pack(middle) {
            Some(packing) => best = packing,
            None => refused = middle,
        }
    }
    Some(best)
}

/// Returns the orders in which the search places tensors.
fn orders(problem: &PackingProblem<'_>) -> Vec<Vec<usize>> {
    let tensors = problem.tensors;
    let given: Vec<usize> = (0..tensors.len()).collect();
    if tensors.len() <= ALL_ORDERS {
        return permutations(&given);
    }
    let by = |key: &dyn Fn(BlockedTensor) -> (usize, usize)| {
        let mut order = given.clone();
        sort_by_key(&mut order, |&t| std::cmp::Reverse(key(tensors[t])));
        order
    };
    let [blocks, lens] = [by(&|t| (t.block, t.len)), by(&|t| (t.len, t.block))];
    vec![given, blocks, lens]
}

fn permutations(items: &[usize]) -> Vec<Vec<usize>> {
    if items.is_empty() {
        return vec![vec![]];
    }
    let mut all = Vec::new();
    for (i, &first) in items.iter().enumerate() {
        let rest: Vec<usize> =
            items.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, &item)| item).collect();
        all.extend(permutations(&rest).into_iter().map(|tail| [vec![first], tail].concat()));
    }
    all
}
