//! The search for the cheapest order of reductions and moves.
//!
//! A state is a set of `Partial` axes that have still to be folded, and a layout. A hop folds some of these axes:
//! either each rank receives the partial values of just the elements that it holds afterwards, or an exchange (mostly
//! a slice) and an all-reduce do the same. When all axes are folded, one exchange leads to the target. No other
//! sequence is cheaper: by the triangle inequality of set differences, an exchange before a fold costs at least what
//! the fold saves by it, and two exchanges cost at least what one does.
//!
//! On a network with fast and slow links, two exchanges may be cheaper: bytes cross the slow link once, and then
//! spread over the fast one. There, exchanges between all layouts are considered before and after each fold.
//!
//! Bits decide which axes may be folded next. Partial sums with a reduction tree keep the tree's order whatever is
//! folded first; maxima, minima and integers do not depend on the order. All other sums are one nested tree over the
//! ranks with the first axis outermost, so the last axes are folded first.

use std::cell::OnceCell;

use smallvec::SmallVec;

use super::cost::{CostModel, PlanCost, StepTraffic};
use super::rank_samples::{LayoutCuts, RankDifferences, RankSamples};
use super::states::candidate_layouts;
use crate::comm::{self, Network};
use crate::dtensor::redistribute::exchange_piece::communicating_axes;
use crate::error::Result;
use crate::placement::{Layout, Placement, ShardBounds, Spec};
use crate::tensor::{Dims, ReduceOp, short_list};

/// The largest number of layouts considered per level if links differ, since each may lead to each; beyond it, only
/// layouts near both ends.
const LINKED_LEN: usize = 64;

/// One part of a path from the source to the target.
#[derive(Clone, Debug)]
pub(super) enum Hop {
    /// These `Partial` axes become replicated.
    AllReduce(Dims),
    /// These `Partial` axes are folded, and each rank receives what it needs for this layout.
    Fold(Dims, Layout),
    /// Each rank receives the elements that it lacks.
    Exchange(Layout),
}

/// Returns the cheapest path from `src` to `target`, which adds no new `Partial`, and its cost.
pub(super) fn cheapest(src: &Spec, target: &Layout, costs: CostModel<'_>) -> Result<(Vec<Hop>, PlanCost)> {
    let leaving: Dims = leaving_partials(&src.layout, target);
    let open = src.open_axes();
    let (alone, long): (Dims, Dims) = leaving.iter().copied().partition(|&a| src.mesh.axis_len(a) == 1);
    let start = src.with_layout(replicated(&src.layout, &alone))?;
    let (tree, plain): (Dims, Dims) = long.iter().copied().partition(|a| open.contains(a));
    let (mut hops, cost) = if long.is_empty() && start.layout == *target {
        (Vec::new(), PlanCost::default())
    } else {
        Search::new(&start, target, costs, plain, tree).run()?
    };
    // Axes of one rank receive nothing: they are folded with other axes of their kind, or first.
    let (alone_tree, alone_plain): (Dims, Dims) = alone.iter().copied().partition(|a| open.contains(a));
    let mut first = Vec::new();
    for alone in [alone_plain, alone_tree].into_iter().filter(|axes| !axes.is_empty()) {
        match hops.first_mut() {
            Some(Hop::AllReduce(axes) | Hop::Fold(axes, _))
                if open.contains(&axes[0]) == open.contains(&alone[0]) =>
            {
                axes.extend(alone);
                axes.sort_unstable();
            }
            _ => first.push(Hop::AllReduce(alone)),
        }
    }
    Ok((first.into_iter().chain(hops).collect(), cost))
}

/// Returns the time of the cheapest path from `src` to `target`, which adds no new `Partial`.
pub(in crate::dtensor) fn cheapest_time(
    src: &Spec,
    target: &Layout,
    network: &Network,
) -> Result<comm::Cost> {
    Ok(cheapest(src, target, CostModel(network))?.1.time)
}

/// Returns the axes that are `Partial` in `layout` but not in `target`.
pub(super) fn leaving_partials(layout: &Layout, target: &Layout) -> Dims {
    let leaves = |a: &usize| layout.axis(*a).is_partial() && layout.axis(*a) != target.axis(*a);
    (0..layout.ndim()).filter(leaves).collect()
}

/// Returns `layout` with these axes replicated.
pub(super) fn replicated(layout: &Layout, axes: &[usize]) -> Layout {
    let of = |(a, p): (usize, &Placement)| if axes.contains(&a) { Placement::Replicate } else { p.clone() };
    let placements = layout.placements().iter().enumerate().map(of);
    Layout::new(placements).with_order(layout.order()).expect("a layout's own order")
}

/// Returns `cut` with these axes `Partial` as in `layout`.
pub(super) fn partial_as(layout: &Layout, axes: &[usize], cut: &Layout) -> Layout {
    let of = |(a, p): (usize, &Placement)| if axes.contains(&a) { layout.axis(a).clone() } else { p.clone() };
    let placements = cut.placements().iter().enumerate().map(of);
    Layout::new(placements).with_order(cut.order()).expect("a layout's own order")
}

/// Returns the axes along which ranks communicate when `axes` are folded on the way to `to`, ascending.
pub(super) fn fold_axes(from: &Layout, to: &Layout, dims: usize, axes: &[usize]) -> Dims {
    let mut all: Dims =
        short_list(communicating_axes(from, to, dims).into_iter().chain(axes.iter().copied()));
    all.sort_unstable();
    all.dedup();
    all
}

/// A search: states per set of axes that have still to be folded.
struct Search<'a> {
    src: &'a Spec,
    target: &'a Layout,
    costs: CostModel<'a>,
    /// The axes to fold: those of a tree over ranks, then those of a reduction tree. A set of them is a bit set.
    axes: Dims,
    plain: u32,
    any_order: bool,
    samples: RankSamples,
    /// The state after the last exchange.
    goal: State,
    levels: Vec<Option<SearchLevel>>,
    /// The cheapest complete path so far, by its last state.
    best: Option<(PlanCost, usize)>,
}

/// The states in which the same axes have still to be folded.
struct SearchLevel {
    /// The largest number of nodes of a sum on a rank, and the size of an element of one.
    parts: u64,
    size_bytes: u64,
    states: Vec<State>,
}

/// A layout in a level, with the cheapest path to it so far.
struct State {
    layout: Layout,
    cuts: LayoutCuts,
    /// The shard of the first rank, and those of the sampled ranks, once they have been asked for.
    first: OnceCell<ShardBounds>,
    shards: OnceCell<Vec<ShardBounds>>,
    best: Option<(PlanCost, ReachedBy)>,
    /// The cost of the remaining exchange to the target, if nothing is left to fold and it has been asked for.
    rest: Option<PlanCost>,
}

/// The hop by which a state is reached; an exchange if `set` is empty. The first state is reached from itself.
#[derive(Clone, Copy, PartialEq)]
struct ReachedBy {
    level: u32,
    state: usize,
    set: u32,
    all_reduce: bool,
}

impl State {
    fn new(src: &Spec, layout: Layout) -> State {
        let cuts = LayoutCuts::new(&src.mesh, &src.shape, &layout);
        State { layout, cuts, first: OnceCell::new(), shards: OnceCell::new(), best: None, rest: None }
    }
}

impl<'a> Search<'a> {
    fn new(src: &'a Spec, target: &'a Layout, costs: CostModel<'a>, plain: Dims, tree: Dims) -> Search<'a> {
        let sums = plain.iter().any(|&a| src.layout.axis(a).partial_op() == Some(ReduceOp::Sum));
        let samples = RankSamples::new(&src.mesh, [&src.layout, target].into_iter());
        let plain_bits = (1 << plain.len()) - 1;
        let axes: Dims = short_list(plain.into_iter().chain(tree));
        let levels = (0..1 << axes.len()).map(|_| None).collect();
        let any_order = !(sums && src.dtype.is_float());
        Search {
            src,
            target,
            costs,
            axes,
            plain: plain_bits,
            any_order,
            samples,
            goal: State::new(src, target.clone()),
            levels,
            best: None,
        }
    }

    /// Visits the levels from all axes to none, and returns the cheapest path.
    fn run(mut self) -> Result<(Vec<Hop>, PlanCost)> {
        let all = (1u32 << self.axes.len()) - 1;
        let mut start = self.level(all)?;
        let at =
            start.states.iter().position(|s| s.layout == self.src.layout).expect("the path begins there");
        let from = ReachedBy { level: all, state: at, set: 0, all_reduce: false };
        self.relax(&mut start, at, PlanCost::default(), from, all == 0);
        self.levels[all as usize] = Some(start);
        for left in (0..=all).rev() {
            let Some(mut level) = self.levels[left as usize].take() else { continue };
            if self.costs.has_levels() {
                self.relax_exchanges(&mut level, left);
            }
            for i in 0..level.states.len() {
                for set in self.next_sets(left) {
                    self.fold(&level, left, i, set)?;
                }
            }
            self.levels[left as usize] = Some(level);
        }
        Ok(self.path())
    }

    /// Considers every exchange between states of a level, from the cheapest state on (as Dijkstra does).
    fn relax_exchanges(&mut self, level: &mut SearchLevel, left: u32) {
        let mut done = vec![false; level.states.len()];
        let next = |level: &SearchLevel, done: &[bool]| {
            let reached = (0..done.len()).filter(|&i| !done[i]);
            reached.filter_map(|i| Some((level.states[i].best?.0, i))).min()
        };
        while let Some((so_far, i)) = next(level, &done) {
            done[i] = true;
            if self.best.is_some_and(|(best, _)| so_far >= best) {
                return;
            }
            for f in (0..done.len()).filter(|&f| !done[f]).collect::<Vec<_>>() {
                let goal = &level.states[f];
                let cost = so_far + self.exchange(level, &level.states[i], goal);
                self.relax(
                    level,
                    f,
                    cost,
                    ReachedBy { level: left, state: i, set: 0, all_reduce: false },
                    left == 0,
                );
            }
        }
    }

    /// Returns the sets of axes that may be folded together next, the set of all of them first.
    fn next_sets(&self, left: u32) -> SmallVec<[u32; 8]> {
        let plain = left & self.plain;
        let from = if plain == 0 { left } else { plain };
        let any = plain == 0 || self.any_order;
        let mut sets = SmallVec::new();
        let mut set = from;
        while set != 0 {
            sets.push(set);
            // Bits ascend with axes: without the lowest bits, the last axes are left.
            set = if any { (set - 1) & from } else { set & (set - 1) };
        }
        sets
    }

    /// Considers every hop from state `i` of a level that folds `set`.
    fn fold(&mut self, level: &SearchLevel, left: u32, i: usize, set: u32) -> Result<()> {
        let state = &level.states[i];
        let Some((so_far, _)) = state.best else { return Ok(()) };
        if self.best.is_some_and(|(best, _)| so_far >= best) {
            return Ok(());
        }
        let (to, axes) = (left & !set, self.axes_of(set));
        let mut next = match self.levels[to as usize].take() {
            Some(next) => next,
            None => self.level(to)?,
        };
        let members = axes.iter().map(|&a| self.src.mesh.axis_len(a) as u64).product::<u64>();
        let from = |all_reduce| ReachedBy { level: left, state: i, set, all_reduce };
        for f in 0..next.states.len() {
            // Among equal costs the all-reduce wins, which engines run best.
            if axes.iter().all(|&a| next.states[f].layout.axis(a).is_replicate()) {
                let cost = so_far + self.all_reduce(level, state, &next.states[f], &axes, next.parts);
                self.relax(&mut next, f, cost, from(true), to == 0);
            }
            let goal = &next.states[f];
            let most = self.most_lacking(state, goal, members);
            let communicating = fold_axes(&state.layout, &goal.layout, self.src.shape.len(), &axes);
            let cost = so_far
                + self
                    .cost(&communicating, most.saturating_mul(level.parts).saturating_mul(level.size_bytes));
            self.relax(&mut next, f, cost, from(false), to == 0);
        }
        self.levels[to as usize] = Some(next);
        Ok(())
    }

    /// Returns the cost of an all-reduce that leaves `parts` nodes, and of an exchange (mostly a slice) before it if
    /// the splits differ.
    fn all_reduce(
        &self,
        level: &SearchLevel,
        from: &State,
        to: &State,
        axes: &[usize],
        parts: u64,
    ) -> PlanCost {
        let members = axes.iter().map(|&a| self.src.mesh.axis_len(a) as u64).product::<u64>();
        // A ring's bytes: all partial values of one share of the elements, then the sums of the other shares.
        let whole = self.most_held(to);
        let share = whole.div_ceil(members);
        let partial = (members - 1).saturating_mul(share).saturating_mul(level.parts);
        let elements = partial.saturating_add((whole - share).saturating_mul(parts));
        let cost = self.cost(axes, elements.saturating_mul(level.size_bytes));
        let splits_stay = to.layout == replicated(&from.layout, axes);
        if splits_stay { cost } else { cost + self.exchange(level, from, to) }
    }

    /// Returns the cost of an exchange that changes splits only.
    fn exchange(&self, level: &SearchLevel, from: &State, to: &State) -> PlanCost {
        let most = self.most_lacking(from, to, 1);
        let communicating = communicating_axes(&from.layout, &to.layout, self.src.shape.len());
        self.cost(&communicating, most.saturating_mul(level.parts).saturating_mul(level.size_bytes))
    }

    /// Returns the number of values that the sampled rank that lacks most lacks, if each element takes those of `members`
    /// ranks.
    fn most_lacking(&self, from: &State, to: &State, members: u64) -> u64 {
        let ranks = RankDifferences::between((&from.layout, &from.cuts), (&to.layout, &to.cuts));
        let lacks = |have: &ShardBounds, want: &ShardBounds| {
            members.saturating_mul(want.numel() as u64) - have.common_numel(want) as u64
        };
        if ranks.apart {
            return members.saturating_mul(self.first(to).numel() as u64);
        }
        if ranks.axes.is_empty() {
            return lacks(self.first(from), self.first(to));
        }
        let each = self.shards(from).iter().zip(self.shards(to));
        each.map(|(have, want)| lacks(have, want)).max().unwrap_or(0)
    }

    /// Returns the number of elements of the sampled rank that holds most.
    fn most_held(&self, state: &State) -> u64 {
        let at = (&state.layout, &state.cuts);
        let ranks = RankDifferences::between(at, at);
        let most = match ranks.axes.is_empty() {
            true => self.first(state).numel(),
            false => self.shards(state).iter().map(ShardBounds::numel).max().unwrap_or(0),
        };
        most as u64
    }

    /// Returns the shards of the sampled ranks.
    fn shards<'s>(&self, state: &'s State) -> &'s [ShardBounds] {
        state.shards.get_or_init(|| {
            let mut all = Vec::new();
            self.visit(|_| true, |coords| all.push(self.bounds(&state.layout, coords)));
            all
        })
    }

    /// Calls `f` with the coordinates of the sampled ranks along the axes in `varied`, and of the first along others.
    fn visit(&self, varied: impl Fn(usize) -> bool, f: impl FnMut(&[usize])) {
        self.samples.visit(Dims::from_elem(0, self.src.mesh.ndim()), varied, f);
    }

    /// Returns the shard of the first rank.
    fn first<'s>(&self, state: &'s State) -> &'s ShardBounds {
        state.first.get_or_init(|| self.bounds(&state.layout, &Dims::from_elem(0, self.src.mesh.ndim())))
    }

    fn bounds(&self, layout: &Layout, coords: &[usize]) -> ShardBounds {
        ShardBounds::at(&self.src.mesh, layout, &self.src.shape, coords)
    }

    /// Records a path to state `f` if it is the cheapest so far.
    fn relax(&mut self, level: &mut SearchLevel, f: usize, cost: PlanCost, from: ReachedBy, last: bool) {
        let state = &level.states[f];
        if state.best.is_some_and(|(best, _)| cost >= best) {
            return;
        }
        // A state from which no path is the cheapest needs no cost of the rest.
        if last && self.best.is_none_or(|(best, _)| cost < best) {
            let rest = state.rest.unwrap_or_else(|| match state.layout == *self.target {
                true => PlanCost::default(),
                false => self.exchange(level, state, &self.goal),
            });
            let whole = cost + rest;
            level.states[f].rest = Some(rest);
            if self.best.is_none_or(|(best, _)| whole < best) {
                self.best = Some((whole, f));
            }
        }
        level.states[f].best = Some((cost, from));
    }

    /// Returns the hops of the cheapest path, and its cost.
    fn path(&self) -> (Vec<Hop>, PlanCost) {
        let (cost, mut state) = self.best.expect("an all-reduce and an exchange always lead there");
        let at =
            |level: u32, state: usize| &self.levels[level as usize].as_ref().expect("reached").states[state];
        let mut hops = Vec::new();
        if at(0, state).layout != *self.target {
            hops.push(Hop::Exchange(self.target.clone()));
        }
        let mut level = 0;
        loop {
            let reached = at(level, state);
            let (_, from) = reached.best.expect("on the path");
            if (from.level, from.state) == (level, state) {
                break;
            }
            let axes = self.axes_of(from.set);
            if axes.is_empty() {
                hops.push(Hop::Exchange(reached.layout.clone()));
            } else if from.all_reduce {
                let before = &at(from.level, from.state).layout;
                let cut = partial_as(before, &axes, &reached.layout);
                let moves = *before != cut;
                hops.push(Hop::AllReduce(axes));
                hops.extend(moves.then_some(Hop::Exchange(cut)));
            } else {
                hops.push(Hop::Fold(axes, reached.layout.clone()));
            }
            (level, state) = (from.level, from.state);
        }
        hops.reverse();
        (hops, cost)
    }

    /// Creates the level in which the axes in `left` have still to be folded.
    fn level(&self, left: u32) -> Result<SearchLevel> {
        let all = (1u32 << self.axes.len()) - 1;
        let spec = self.src.with_layout(replicated(&self.src.layout, &self.axes_of(all & !left)))?;
        let open = spec.open_axes();
        let mut parts = 1;
        self.visit(|a| open.contains(&a), |coords| parts = parts.max(spec.nodes_len_at(coords) as u64));
        let size_bytes = spec.stored_dtype().size_bytes() as u64;
        let mut level = SearchLevel { parts, size_bytes, states: Vec::new() };
        let mut all_layouts = if left == all && !self.costs.has_levels() {
            vec![spec.layout.clone()]
        } else {
            // Partial axes stay `Partial` until they are folded; those of the target stay to the end.
            let stays = |a: &usize| spec.layout.axis(*a).is_partial();
            let fixed: Dims = (0..spec.mesh.ndim()).filter(stays).collect();
            candidate_layouts(&spec, self.target, &fixed)
        };
        if self.costs.has_levels() && all_layouts.len() > LINKED_LEN {
            let near = |l: &Layout, a: usize| {
                l.axis(a).is_replicate()
                    || l.axis(a) == spec.layout.axis(a)
                    || l.axis(a) == self.target.axis(a)
            };
            all_layouts.retain(|l| (0..l.ndim()).all(|a| near(l, a)));
            all_layouts.truncate(LINKED_LEN);
        }
        // A plain all-reduce is always a path.
        let alone = std::iter::once(spec.layout.clone()).filter(|l| !all_layouts.contains(l));
        let all_layouts: Vec<Layout> = all_layouts.iter().cloned().chain(alone).collect();
        level.states = all_layouts.into_iter().map(|layout| State::new(self.src, layout)).collect();
        Ok(level)
    }

    fn cost(&self, axes: &[usize], received_bytes: u64) -> PlanCost {
        self.costs.cost(&StepTraffic { mesh: &self.src.mesh, axes, received_bytes })
    }

    fn axes_of(&self, set: u32) -> Dims {
        let mut axes: Dims =
            (0..self.axes.len()).filter(|i| set >> i & 1 == 1).map(|i| self.axes[i]).collect();
        axes.sort_unstable();
        axes
    }
}
