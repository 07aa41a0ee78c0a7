//! Tests of the choice of rows against an oracle: all products of all rows in all orders of axes, weighed by counting
//! the elements of every rank.

use std::rc::Rc;

use rand_core::Rng;
use smallvec::SmallVec;

use super::call_cost::{made_sums, moved_axes};
use super::choose_rows::{ChosenLayouts, choose_rows};
use super::device_mesh::DeviceMesh;
use super::redistribute::{Redistribution, communicating_axes, peers};
use super::reduction::Reduction;
use super::row_product::{RowProduct, axis_with_splits};
use super::tensor_meta::TensorMeta;
use super::work_share::part_of_elements;
use crate::comm::{DryRun, Machine, Network};
use crate::ops::{Meta, Op, Row, Sample, catalog, infer_results, rows_on_axis};
use crate::placement::{Layout, Mesh, Placement, Spec};
use crate::rng::Generator;
use crate::tensor::{Dims, ReduceOp};

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

    /// Returns the time of a move: for the rank that receives or sends most, counted rank by rank.
    fn of_move(&self, f: &TensorMeta, to: &TensorMeta) -> f64 {
        if f == to {
            return 0.0;
        }
        let (from, wanted, mesh) = (f.spec(), to.spec(), self.mesh.mesh());
        let folds = |a| from.layout.axis(a).is_partial() && from.layout.axis(a) != wanted.layout.axis(a);
        if (0..mesh.ndim()).any(folds) {
            return Redistribution::over(self.mesh.rank().network(), from, wanted).unwrap().cost().seconds();
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

    /// Returns the least time of all products of rows, or `None` if they are too many.
    fn least(&self) -> Option<(f64, String)> {
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
        let mut least: Option<(f64, String)> = None;
        for order in super::choose_rows::orders(self.ins) {
            for at in &products {
                let of = |(a, &i): (usize, &usize)| (&rows[a][i], ragged[a].as_ref());
                let rows: SmallVec<[_; 4]> = at.iter().enumerate().map(of).collect();
                let product =
                    RowProduct { mesh: self.mesh, op: self.op, metas: self.metas, order: &order, rows };
                if let Ok(Ok(chosen)) = product.lay_out(self.ins, self.outs) {
                    let opens = chosen.ins.iter().zip(self.ins).any(|(to, from)| {
                        (0..mesh.ndim()).any(|a| {
                            to.layout().axis(a).is_partial() && to.layout().axis(a) != from.layout().axis(a)
                        })
                    });
                    if !opens {
                        let time = self.time(&chosen);
                        if least.as_ref().is_none_or(|(best, _)| time < *best) {
                            least = Some((time, notation(&chosen)));
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

/// Compares the choice for one call with the oracle's; returns the ratio of both times.
fn ratio(mesh: &DeviceMesh, op: &dyn Op, ins: &[Rc<TensorMeta>]) -> Option<(f64, String)> {
    let ins: Vec<&Rc<TensorMeta>> = ins.iter().collect();
    let metas: Vec<Meta> = ins.iter().map(|f| f.meta()).collect();
    let outs = infer_results(op, &metas).unwrap();
    let chosen = choose_rows(mesh, op, &ins, &metas, &outs).unwrap();
    let oracle = Oracle { mesh, op, ins: &ins, metas: &metas, outs: &outs };
    let (time, (least, other)) = (oracle.time(&chosen), oracle.least()?);
    let given: Vec<String> = ins.iter().map(|f| f.spec().to_string()).collect();
    let (given, taken) = (given.join(", "), notation(&chosen));
    let said = format!("{op:?} of {given} as {taken}: {time:e} s; {other}: {least:e} s");
    // A call without work or moves takes no time.
    Some((if time <= least + 1e-11 { 1.0 } else { time / least }, said))
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
                let blocks = meta.shape.iter().take(dims).product();
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

/// Every operator's samples, in random layouts on small meshes, over slow links and fast ones, in both modes: at most
/// 1.02 times the least time of all shardings.
#[test]
fn no_product_of_rows_takes_less_time() {
    let fast = Network::uniform(1e-7, 1e12).unwrap();
    let bytes = Network::uniform(0.0, 1e9).unwrap();
    let (mut cases, mut worst) = (0, (1.0, String::new()));
    let mut random = Generator::new(17).host("layouts");
    for mesh in ["a=8", "a=3", "a=2,b=2", "a=2,b=4", "a=3,b=2", "a=2,b=2,c=2"] {
        for (network, reduction) in [
            (Network::default(), Reduction::Exact),
            (fast.clone(), Reduction::Exact),
            (bytes.clone(), Reduction::Fast),
        ] {
            let mesh = dry(mesh, network, Machine::default());
            mesh.set_reduction(reduction);
            let every = if mesh.mesh().ndim() > 2 { 8 } else { 2 };
            let few = |sample: &&Sample| sample.metas().len() <= 5;
            for sample in catalog().iter().filter(few).step_by(every) {
                let specs = sample.metas().into_iter().map(|m| any_layout(mesh.mesh(), &m, &mut random));
                let ins: Vec<_> =
                    specs.map(|s| mesh.meta(s.dtype, &s.shape, &s.layout).expect("it fits")).collect();
                let Some((ratio, said)) = ratio(&mesh, &*sample.op, &ins) else { continue };
                cases += 1;
                if ratio > worst.0 {
                    worst = (ratio, format!("{said} on {}", mesh.mesh()));
                }
            }
        }
    }
    println!("{cases} calls: at most {} of the least time", worst.0);
    assert!(cases > 4_000, "{cases}");
    assert!(worst.0 <= 1.02, "{} times: {}", worst.0, worst.1);
}
