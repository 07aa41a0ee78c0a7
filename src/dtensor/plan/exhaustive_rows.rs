//! Tests of the choice of rows against an oracle: all products of all rows in all orders of axes, weighed by counting
//! the elements of every rank. On networks with links of several speeds, a move takes the time of the plan that will run.

use std::rc::Rc;

use rand_chacha::ChaCha12Rng;
use rand_core::Rng;
use smallvec::SmallVec;

use super::call_cost::{made_sums, moved_axes};
use super::choose_rows::{ChosenLayouts, choose_rows};
use super::row_product::{RowProduct, axis_with_splits};
use super::work_share::part_of_elements;
use crate::comm::{DryRun, Level, Machine, Network};
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::reduction::Reduction;
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::dtensor::redistribute::{Redistribution, communicating_axes, peers};
use crate::ops::{Meta, Op, Row, Sample, catalog, infer_results, rows_on_axis};
use crate::placement::{Layout, Mesh, Placement, Spec};
use crate::rng::Generator;
use crate::tensor::{Dims, ReduceOp, Shape, short_list};

/// The largest number of products that the oracle enumerates.
const MOST: usize = 1_000;

struct Oracle<'a> {
    mesh: &'a DeviceMesh,
    op: &'a dyn Op,
    ins: &'a [&'a Rc<TensorMeta>],
    metas: &'a [Meta],
    outs: &'a [Meta],
}

impl Oracle<'_> {
    /// Returns the time of the slowest rank for these layouts.
    fn time(&self, chosen: &ChosenLayouts) -> f64 {
        let moves: f64 = self.ins.iter().zip(&chosen.ins).map(|(f, to)| self.of_move(f, to)).sum();
        let tensors: Vec<_> =
            chosen.ins.iter().chain(&chosen.outs).map(|m| (m.shape(), m.layout())).collect();
        let mesh = self.mesh.mesh();
        let part = |r| part_of_elements(mesh, &tensors, &mesh.coords_of(r).unwrap());
        let most = mesh.ranks().map(part).fold(0.0, f64::max);
        let work = self.op.work(self.metas, self.outs);
        let of = |n: u64| (n as f64 * most).ceil() as u64;
        let kernel = self.mesh.rank().machine().time(self.metas[0].dtype, of(work.flops), of(work.bytes));
        moves + kernel.seconds() + self.of_reductions(chosen)
    }

    /// Returns the time of a move: by the plan that will run if there are several paths, else for the rank that receives
    /// or sends most, counted rank by rank.
    fn of_move(&self, f: &TensorMeta, to: &TensorMeta) -> f64 {
        if f == to {
            return 0.0;
        }
        let (from, wanted, mesh) = (f.spec(), to.spec(), self.mesh.mesh());
        let network = self.mesh.rank().network();
        let folds = |a| from.layout.axis(a).is_partial() && from.layout.axis(a) != wanted.layout.axis(a);
        if (0..mesh.ndim()).any(folds) || network.levels().len() > 1 {
            return Redistribution::over(network, from, wanted).unwrap().cost().seconds();
        }
        let axes = communicating_axes(&from.layout, &wanted.layout, f.shape().len());
        if axes.is_empty() {
            return 0.0;
        }
        let numel = |a: &crate::placement::Region, b: &crate::placement::Region| -> usize {
            a.intersect(b).into_iter().map(|o| o.len.iter().product::<usize>()).sum()
        };
        let coords: Vec<Dims> = mesh.ranks().map(|r| mesh.coords_of(r).unwrap()).collect();
        let have: Vec<_> = coords.iter().map(|c| from.region_at(c)).collect();
        let want: Vec<_> = coords.iter().map(|c| wanted.region_at(c)).collect();
        let of = |r: usize| {
            let same_group =
                |s: &usize| (0..mesh.ndim()).all(|a| axes.contains(&a) || coords[*s][a] == coords[r][a]);
            let others: Vec<usize> = (0..coords.len()).filter(|s| *s != r && same_group(s)).collect();
            let received = want[r].numel() - numel(&have[r], &want[r]);
            let sent: usize = others.iter().map(|&s| numel(&have[r], &want[s])).sum();
            received.max(sent)
        };
        let most = (0..coords.len()).map(of).max().unwrap() * f.dtype().size_bytes();
        peers(self.mesh.rank().network(), mesh, &axes).cost(1, most as u64).seconds()
    }

    /// Returns the time that unreduced results add: for each node beyond one, and for sums that moves have made.
    fn of_reductions(&self, chosen: &ChosenLayouts) -> f64 {
        let mesh = self.mesh.mesh();
        let of = |out: &Rc<TensorMeta>| {
            let (spec, made) = (out.spec(), made_sums(mesh, chosen, out));
            if made.is_empty() {
                return 0.0;
            }
            let moved = moved_axes(&made, self.ins, chosen);
            let members: usize = moved.iter().map(|&a| mesh.axis_len(a)).product();
            let elements = |r: usize| {
                let coords = mesh.coords_of(r).unwrap();
                let more = spec.tree.as_ref().map_or(0, |_| spec.nodes_len_at(&coords).saturating_sub(1));
                let held = spec.local_shape_at(&coords).numel();
                more * held + held / members * (members - 1)
            };
            let bytes = mesh.ranks().map(elements).max().unwrap_or(0) * spec.stored_dtype().size_bytes();
            let axes = if moved.is_empty() { &made } else { &moved };
            peers(self.mesh.rank().network(), mesh, axes).cost(0, bytes as u64).seconds()
        };
        chosen.outs.iter().map(of).sum()
    }

    /// Returns the bytes above the machine's limit that moved operands and results take on the rank that takes most.
    fn over_limit(&self, chosen: &ChosenLayouts) -> u64 {
        let Some(limit) = self.mesh.rank().machine().call_memory_bytes else { return 0 };
        let mesh = self.mesh.mesh();
        let moved = self.ins.iter().zip(&chosen.ins).filter(|(f, to)| f.layout() != to.layout());
        let taken: Vec<_> = moved.map(|(_, to)| to).chain(&chosen.outs).collect();
        let at = |r: usize| -> usize {
            let coords = mesh.coords_of(r).unwrap();
            let bytes = |m: &&Rc<TensorMeta>| m.spec().region_at(&coords).numel() * m.dtype().size_bytes();
            taken.iter().map(bytes).sum()
        };
        (mesh.ranks().map(at).max().unwrap() as u64).saturating_sub(limit)
    }

    fn cost(&self, chosen: &ChosenLayouts) -> (u64, f64) {
        (self.over_limit(chosen), self.time(chosen))
    }

    /// Returns the least cost of all products of rows, or `None` if they are too many.
    fn least(&self) -> Option<((u64, f64), String)> {
        let mesh = self.mesh.mesh();
        let exact = self.mesh.reduction().is_exact();
        let ragged: Vec<Option<Placement>> = (0..mesh.ndim())
            .map(|a| {
                self.ins.iter().map(|f| f.layout().axis(a)).find(|p| p.ragged_units().is_some()).cloned()
            })
            .collect();
        let rows = |a: usize| -> Vec<Row> {
            let replicated = Row::replicated(self.ins.len(), self.outs.len());
            if self.ins.iter().all(|f| f.layout().axis(a).is_replicate()) {
                return vec![replicated];
            }
            let first = self.ins[0].layout().placements();
            let axis = axis_with_splits(self.mesh, a, first, ragged[a].as_ref());
            let mut all = rows_on_axis(self.op, self.metas, axis);
            all.push(replicated);
            all.retain(|r| r.by_bits || !exact);
            all.retain(|r| ragged[a].is_some() || !r.ins.iter().chain(&r.outs).any(|s| s.is_ragged()));
            all
        };
        let rows: Vec<Vec<Row>> = (0..mesh.ndim()).map(rows).collect();
        if rows.iter().map(Vec::len).product::<usize>() > MOST {
            return None;
        }
        let mut products: Vec<Vec<usize>> = vec![vec![]];
        for axis in &rows {
            products =
                products.iter().flat_map(|p| (0..axis.len()).map(move |i| [&p[..], &[i]].concat())).collect();
        }
        let mut least: Option<((u64, f64), String)> = None;
        for order in super::choose_rows::orders(self.ins) {
            for at in &products {
                let of = |(a, &i): (usize, &usize)| (&rows[a][i], ragged[a].as_ref());
                let rows: SmallVec<[_; 4]> = short_list(at.iter().enumerate().map(of));
                let product =
                    RowProduct { mesh: self.mesh, op: self.op, metas: self.metas, order: &order, rows };
                if let Ok(Some(chosen)) = product.lay_out(self.ins, self.outs) {
                    let opens = chosen.ins.iter().zip(self.ins).any(|(to, from)| {
                        (0..mesh.ndim()).any(|a| {
                            to.layout().axis(a).is_partial() && to.layout().axis(a) != from.layout().axis(a)
                        })
                    });
                    if !opens {
                        let cost = self.cost(&chosen);
                        if least.as_ref().is_none_or(|(best, _)| cost < *best) {
                            least = Some((cost, notation(&chosen)));
                        }
                    }
                }
            }
        }
        least
    }
}

fn notation(chosen: &ChosenLayouts) -> String {
    let all: Vec<String> = chosen.ins.iter().chain(&chosen.outs).map(|f| f.layout().to_string()).collect();
    all.join(", ")
}

/// Compares the choice for one call with the oracle's; returns the ratio of both times, infinite if the choice takes
/// more memory above the limit than it must.
fn ratio(mesh: &DeviceMesh, op: &dyn Op, ins: &[Rc<TensorMeta>]) -> Option<(f64, String)> {
    let ins: Vec<&Rc<TensorMeta>> = ins.iter().collect();
    let metas: Vec<Meta> = ins.iter().map(|f| f.meta()).collect();
    let outs = infer_results(op, &metas).unwrap();
    let chosen = choose_rows(mesh, op, &ins, &metas, &outs).unwrap();
    let oracle = Oracle { mesh, op, ins: &ins, metas: &metas, outs: &outs };
    let ((over, time), ((least_over, least), other)) = (oracle.cost(&chosen), oracle.least()?);
    let given: Vec<String> = ins.iter().map(|f| f.spec().to_string()).collect();
    let (given, taken) = (given.join(", "), notation(&chosen));
    let said = format!(
        "{op:?} of {given} as {taken}: {time:e} s, {over} bytes too many; {other}: {least:e} s, {least_over} bytes"
    );
    // A call without work or moves takes no time.
    let ratio = match over == least_over {
        false => f64::INFINITY,
        true if time <= least + 1e-11 => 1.0,
        true => time / least,
    };
    Some((ratio, said))
}

/// Returns a random layout that fits: replicated, plain, ragged over one or more dims with idle ranks, or partial.
fn any_layout(mesh: &Mesh, meta: &Meta, random: &mut impl Rng) -> Spec {
    let mut below = |n: usize| random.next_u32() as usize % n.max(1);
    loop {
        let placement = |a: usize| match below(6) {
            0 | 1 => Placement::Replicate,
            2 | 3 => Placement::Shard(below(meta.shape.len())),
            4 => Placement::Partial([ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min][below(3)]),
            _ => {
                let dims = 1 + below(meta.shape.len());
                let blocks: usize = meta.shape.iter().take(dims).product();
                // Few enough to be given to ranks one by one.
                let blocks = (1..=blocks.min(1_000)).rev().find(|n| blocks.is_multiple_of(*n)).unwrap_or(0);
                // Each block goes to some rank.
                let mut units = vec![0; mesh.axis_len(a)];
                (0..blocks).for_each(|_| units[below(mesh.axis_len(a))] += 1);
                Placement::RaggedShard { dims, units: units.into() }
            }
        };
        let placements: Vec<Placement> = (0..mesh.ndim()).map(placement).collect();
        let mut order: Vec<usize> = (0..mesh.ndim()).collect();
        order.rotate_left(below(mesh.ndim()));
        let layout = Layout::new(placements).with_order(&order).expect("an order of the axes");
        if let Ok(spec) = Spec::new(mesh, meta.dtype, meta.shape.clone(), layout) {
            return spec;
        }
    }
}

fn dry(mesh: &str, network: Network, machine: Machine) -> DeviceMesh {
    let len = mesh.split(',').map(|axis| axis.split('=').nth(1).unwrap().parse::<usize>().unwrap()).product();
    let dry = DryRun::with_network(len, 0, network).unwrap().with_machine(machine).unwrap();
    DeviceMesh::parse(&dry.rank().unwrap(), mesh).unwrap()
}

/// Compared calls: their number, and the largest ratio of the choice's time to the least.
struct Compared {
    calls: usize,
    worst: (f64, String),
    random: ChaCha12Rng,
}

impl Compared {
    fn new(seed: u64) -> Compared {
        Compared { calls: 0, worst: (1.0, String::new()), random: Generator::new(seed).host("layouts") }
    }

    /// Compares the choices for every `every`th operator's sample, in random layouts on this mesh; with all extents
    /// `times` as large if the operator takes such operands. `ISOSHARD_ORACLE_STEP=1` compares all samples.
    fn on(&mut self, mesh: &DeviceMesh, every: usize, times: usize) {
        let every = std::env::var("ISOSHARD_ORACLE_STEP").map_or(every, |step| step.parse().unwrap());
        let few = |sample: &&Sample| sample.metas().len() <= 5;
        for sample in catalog().iter().filter(few).step_by(every) {
            let large = |m: Meta| Meta::new(m.dtype, m.shape.iter().map(|n| n * times).collect::<Shape>());
            let large: Vec<Meta> = sample.metas().into_iter().map(large).collect();
            let metas = if sample.op.infer(&large).is_ok() { large } else { sample.metas() };
            let specs = metas.into_iter().map(|m| any_layout(mesh.mesh(), &m, &mut self.random));
            let ins: Vec<_> =
                specs.map(|s| mesh.meta(s.dtype, &s.shape, &s.layout).expect("it fits")).collect();
            let Some((ratio, said)) = ratio(mesh, &*sample.op, &ins) else { continue };
            self.calls += 1;
            if ratio > self.worst.0 {
                self.worst = (ratio, format!("{said} on {}", mesh.mesh()));
            }
        }
    }

    /// Asserts that these were at least `calls` calls, none of them above 1.02 times the least time.
    #[track_caller]
    fn check(&self, calls: usize) {
        println!("{} calls: at most {} of the least time", self.calls, self.worst.0);
        assert!(self.calls >= calls, "{}", self.calls);
        assert!(self.worst.0 <= 1.02, "{} times: {}", self.worst.0, self.worst.1);
    }
}

/// A network of nodes of some ranks, fast inside a node and slow between nodes.
fn two_levels(ranks: usize, latency_s: f64) -> Network {
    let near = Level { ranks, latency_s: latency_s / 5.0, bytes_per_s: 1e11 };
    let far = Level { ranks: usize::MAX, latency_s, bytes_per_s: 1e10 };
    Network::new([near, far]).unwrap()
}

/// Every operator's samples, in random layouts on small meshes, over slow links and fast ones, in both modes: at most
/// 1.02 times the least time of all shardings.
#[test]
fn no_product_of_rows_takes_less_time() {
    let fast = Network::uniform(1e-7, 1e12).unwrap();
    let bytes = Network::uniform(0.0, 1e9).unwrap();
    let mut compared = Compared::new(17);
    for mesh in ["a=8", "a=3", "a=2,b=2", "a=2,b=4", "a=3,b=2", "a=2,b=2,c=2"] {
        for (network, reduction) in [
            (Network::default(), Reduction::Exact),
            (fast.clone(), Reduction::Exact),
            (bytes.clone(), Reduction::Fast),
        ] {
            let mesh = dry(mesh, network, Machine::default());
            mesh.set_reduction(reduction);
            compared.on(&mesh, if mesh.mesh().ndim() > 2 { 8 } else { 2 }, 1);
        }
    }
    compared.check(4_000);
}

/// Compares on networks that are fast inside a node of some ranks and slow between nodes: there a move may go through
/// another layout.
#[test]
fn no_product_of_rows_takes_less_time_between_nodes() {
    let mut compared = Compared::new(18);
    for (mesh, node, every) in [
        ("a=8", 4, 8),
        ("a=2,b=2", 2, 8),
        ("a=2,b=4", 4, 8),
        ("a=4,b=2", 4, 8),
        ("a=3,b=2", 2, 8),
        ("a=2,b=2,c=2", 4, 32),
    ] {
        for (latency_s, reduction) in [(1e-5, Reduction::Exact), (0.0, Reduction::Fast)] {
            let mesh = dry(mesh, two_levels(node, latency_s), Machine::default());
            mesh.set_reduction(reduction);
            compared.on(&mesh, every, 1);
        }
    }
    compared.check(500);
}

/// Compares on meshes of 12 and 16 ranks, with operands whose extents are mostly larger than the meshes.
#[test]
fn no_product_of_rows_takes_less_time_on_larger_meshes() {
    let mut compared = Compared::new(19);
    for (mesh, every) in
        [("a=12", 8), ("a=16", 8), ("a=2,b=8", 8), ("a=4,b=4", 8), ("a=3,b=4", 8), ("a=2,b=2,c=4", 32)]
    {
        for (network, reduction) in [
            (Network::default(), Reduction::Exact),
            (Network::uniform(0.0, 1e9).unwrap(), Reduction::Fast),
            (two_levels(8, 1e-6), Reduction::Exact),
        ] {
            let mesh = dry(mesh, network, Machine::default());
            mesh.set_reduction(reduction);
            compared.on(&mesh, every, 8);
        }
    }
    compared.check(500);
}

/// Compares with a limit on the memory of moved operands and results: no product of rows takes fewer bytes above the
/// limit, and none that takes as few takes less time.
#[test]
fn no_product_of_rows_takes_less_memory_above_a_limit() {
    let mut compared = Compared::new(20);
    for (mesh, every) in [("a=8", 8), ("a=2,b=4", 8), ("a=4,b=2", 8), ("a=2,b=2,c=2", 32)] {
        for limit in [0, 24, 96, 384] {
            for reduction in [Reduction::Exact, Reduction::Fast] {
                let machine = Machine { call_memory_bytes: Some(limit), ..Machine::default() };
                let mesh = dry(mesh, Network::default(), machine);
                mesh.set_reduction(reduction);
                compared.on(&mesh, every, 1);
            }
        }
    }
    compared.check(500);
}

/// In a call of more products than are visited, one of the best product's neighbours was not visited.
#[test]
fn neighbours_of_the_best_product_are_visited() {
    let mesh = dry("a=2,b=2,c=4", Network::uniform(0.0, 1e9).unwrap(), Machine::default());
    mesh.set_reduction(Reduction::Fast);
    let layouts = ["(P(sum), RS(0..3; 15,15), P(sum))", "(P(sum), R, RS(0..3; 7,14,15,9))"];
    let samples = catalog().into_iter().filter(|s| s.op.name() == "grouped_matmul_grad");
    let (mut compared, mut worst) = (0, 1.0f64);
    for sample in samples {
        let metas = sample.metas();
        let fit = |(m, l): (&Meta, &str)| mesh.meta(m.dtype, &m.shape, &l.parse().unwrap()).ok();
        let Some(ins) = metas.iter().zip(layouts).map(fit).collect::<Option<Vec<_>>>() else { continue };
        let Some((ratio, _)) = ratio(&mesh, &*sample.op, &ins) else { continue };
        (compared, worst) = (compared + 1, worst.max(ratio));
    }
    assert!(compared > 0 && worst < 1.001, "{compared} calls, {worst} times the least");
}
