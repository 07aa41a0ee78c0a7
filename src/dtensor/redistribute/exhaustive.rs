//! Tests of the planner against an exhaustive search: all sequences of up to four steps through all layouts, weighed
//! by counting the elements of every rank.

use std::collections::HashMap;

use super::cost::{CostModel, bytes_and_calls};
use super::redistribution::Redistribution;
use crate::placement::{Layout, Mesh, Placement, Spec, short::*};
use crate::tensor::{DType, ReduceOp, Shape};

const STEPS: usize = 4;

/// The elements that each rank holds, as bit sets.
type HeldBits = Vec<u128>;

struct ExhaustiveSearch {
    mesh: Mesh,
    dtype: DType,
    shape: Shape,
    call_bytes: u64,
    /// Every layout without `Partial`, or with `Partial` under `op` on some axes.
    layouts: Vec<Layout>,
    held: Vec<HeldBits>,
    op: ReduceOp,
}

impl ExhaustiveSearch {
    fn new(mesh: &str, shape: &[usize], dtype: DType, op: ReduceOp, call_bytes: u64) -> ExhaustiveSearch {
        let (mesh, shape) = (Mesh::parse(mesh, 0).unwrap(), Shape::from(shape));
        let mut placements = vec![R, partial(op)];
        placements.extend((0..shape.len()).map(shard));
        let mut all: Vec<Vec<Placement>> = vec![vec![]];
        for _ in 0..mesh.ndim() {
            all = all
                .iter()
                .flat_map(|p| placements.iter().map(|q| [&p[..], std::slice::from_ref(q)].concat()))
                .collect();
        }
        let mut layouts: Vec<Layout> = Vec::new();
        for placements in all {
            for order in orders(mesh.ndim()) {
                let layout = Layout::new(placements.clone()).with_order(&order).unwrap();
                if !layouts.contains(&layout) {
                    layouts.push(layout);
                }
            }
        }
        let hold = |layout: &Layout| -> HeldBits {
            let spec = Spec::new(&mesh, dtype, &shape, layout.clone()).unwrap();
            let of = |r: usize| {
                let mut bits = 0;
                spec.region_at(&mesh.coords_of(r).unwrap()).runs(&shape, |from, _, len| {
                    (from..from + len as u64).for_each(|e| bits |= 1u128 << e);
                });
                bits
            };
            mesh.ranks().map(of).collect()
        };
        let held = layouts.iter().map(hold).collect();
        ExhaustiveSearch { mesh, dtype, shape, call_bytes, layouts, held, op }
    }

    fn partials(&self, layout: &Layout) -> Vec<usize> {
        (0..self.mesh.ndim()).filter(|&a| layout.axis(a).is_partial()).collect()
    }

    /// Returns the bytes of the rank that receives most when the axes that are `Partial` only in `from` are folded,
    /// and whether this takes a call; `None` if it is no step, or would change the bits of a sum.
    fn step(&self, from: usize, to: usize) -> Option<(u64, bool)> {
        let (before, after) = (self.partials(&self.layouts[from]), self.partials(&self.layouts[to]));
        let folded: Vec<usize> = before.iter().copied().filter(|a| !after.contains(a)).collect();
        if after.iter().any(|a| !before.contains(a)) {
            return None;
        }
        let rounds = self.op == ReduceOp::Sum && self.dtype.is_float();
        if rounds && after.iter().any(|a| folded.iter().any(|f| f < a)) {
            return None;
        }
        let members: u64 = folded.iter().map(|&a| self.mesh.axis_len(a) as u64).product();
        let pairs = self.held[from].iter().zip(&self.held[to]);
        let lacks = |(have, want): (&u128, &u128)| {
            members * u64::from(want.count_ones()) - u64::from((have & want).count_ones())
        };
        let most = pairs.map(lacks).max().unwrap();
        Some((most * self.dtype.size_bytes() as u64, members > 1 || most > 0))
    }

    /// Returns the same for a ring's all-reduce.
    fn ring(&self, from: usize, to: usize) -> Option<u64> {
        let (a, b) = (&self.layouts[from], &self.layouts[to]);
        let same = |x: usize| a.axis(x) == b.axis(x) || a.axis(x).is_partial() && b.axis(x).is_replicate();
        if a == b || !(0..a.ndim()).all(same) || self.held[from] != self.held[to] {
            return None;
        }
        self.step(from, to)?;
        let folded = (0..a.ndim()).filter(|&x| a.axis(x) != b.axis(x));
        let members: u64 = folded.map(|x| self.mesh.axis_len(x) as u64).product();
        let whole = u64::from(self.held[from].iter().map(|h| h.count_ones()).max().unwrap());
        let share = whole.div_ceil(members);
        Some(((members - 1) * share + whole - share) * self.dtype.size_bytes() as u64)
    }

    /// Returns the least weight from layout `src` to each other layout.
    fn cheapest(&self, src: usize, steps: &HashMap<(usize, usize), u64>) -> Vec<Option<u64>> {
        let mut best: Vec<Option<u64>> = vec![None; self.layouts.len()];
        best[src] = Some(0);
        for _ in 0..STEPS {
            let mut next = best.clone();
            for (&(from, to), weight) in steps {
                let Some(so_far) = best[from] else { continue };
                if next[to].is_none_or(|w| so_far + weight < w) {
                    next[to] = Some(so_far + weight);
                }
            }
            best = next;
        }
        best
    }

    fn steps(&self) -> HashMap<(usize, usize), u64> {
        let n = self.layouts.len();
        let pairs = (0..n).flat_map(|i| (0..n).map(move |j| (i, j))).filter(|(i, j)| i != j);
        let weigh = |(i, j)| {
            let (bytes, calls) = self.step(i, j)?;
            let bytes = self.ring(i, j).map_or(bytes, |ring| ring.min(bytes));
            Some(((i, j), bytes + self.call_bytes * u64::from(calls)))
        };
        pairs.filter_map(weigh).collect()
    }

    /// Returns the weight of the planned steps, from what every rank reports of its own part.
    fn planned(&self, src: usize, dst: usize) -> (u64, String) {
        let spec = |r: usize, l: usize| {
            let mesh = self.mesh.seen_from(r).unwrap();
            Spec::new(&mesh, self.dtype, &self.shape, self.layouts[l].clone()).unwrap()
        };
        let network = bytes_and_calls(self.call_bytes);
        let of = |r: usize| {
            Redistribution::plan_with_costs(&spec(r, src), &spec(r, dst), CostModel(&network)).unwrap()
        };
        let plans: Vec<Redistribution> = self.mesh.ranks().map(of).collect();
        let mut weight = 0;
        for k in 0..plans[0].steps.len() {
            weight += plans.iter().map(|p| p.steps[k].received_bytes).max().unwrap();
            let alike = |p: &Redistribution| {
                (&p.steps[k].action, &p.steps[k].to.layout)
                    == (&plans[0].steps[k].action, &plans[0].steps[k].to.layout)
            };
            assert!(plans.iter().all(alike), "ranks choose alike: {}", plans[0]);
        }
        assert!(plans.iter().all(|p| p.steps.len() == plans[0].steps.len()));
        (weight + self.call_bytes * plans[0].calls() as u64, plans[0].to_string())
    }

    /// Compares plans with the search, for every `every`th pair of layouts; returns the number of pairs.
    fn compare(&self, every: usize) -> usize {
        let (steps, mut pairs) = (self.steps(), 0);
        for src in 0..self.layouts.len() {
            let best = self.cheapest(src, &steps);
            for dst in (0..self.layouts.len()).filter(|d| *d != src && (src * 31 + d * 17) % every == 0) {
                // A new `Partial` costs nothing, so there is nothing to compare.
                let Some(best) = best[dst] else { continue };
                let (planned, said) = self.planned(src, dst);
                let (a, b) = (&self.layouts[src], &self.layouts[dst]);
                assert_eq!(planned, best, "{}{} {a} to {b} on {}: {said}", self.dtype, self.shape, self.mesh);
                pairs += 1;
            }
        }
        pairs
    }
}

fn orders(n: usize) -> Vec<Vec<usize>> {
    match n {
        1 => vec![vec![0]],
        2 => vec![vec![0, 1], vec![1, 0]],
        _ => [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]].map(Vec::from).into(),
    }
}

/// Every pair of layouts of two axes, on even and odd sizes, with and without a cost per call.
#[test]
fn nothing_is_cheaper_on_two_axes() {
    let mut pairs = 0;
    for (mesh, shape) in [
        ("a=2,b=2", &[4, 4][..]),
        ("a=2,b=2", &[5, 3]),
        ("a=2,b=4", &[8, 8]),
        ("a=2,b=4", &[8, 5]),
        ("a=2,b=4", &[3, 2]),
        ("a=3,b=2", &[6, 6]),
        ("a=3,b=2", &[7, 4]),
        ("a=3,b=2", &[11]),
        ("a=2,b=4", &[2, 3, 4]),
    ] {
        for call_bytes in [0, 40] {
            pairs += ExhaustiveSearch::new(mesh, shape, DType::F32, ReduceOp::Sum, call_bytes).compare(1);
        }
        pairs += ExhaustiveSearch::new(mesh, shape, DType::F32, ReduceOp::Max, 0).compare(1);
    }
    assert!(pairs > 5000, "{pairs} pairs");
}

/// A sample of the pairs on three axes.
#[test]
fn nothing_is_cheaper_on_three_axes() {
    let mut pairs = 0;
    for (shape, op, call_bytes) in [
        (&[8, 8][..], ReduceOp::Sum, 0),
        (&[8, 8], ReduceOp::Max, 0),
        (&[5, 3], ReduceOp::Sum, 0),
        (&[5, 3], ReduceOp::Max, 40),
    ] {
        pairs += ExhaustiveSearch::new("a=2,b=2,c=2", shape, DType::F32, op, call_bytes).compare(11);
    }
    assert!(pairs > 1000, "{pairs} pairs");
}
