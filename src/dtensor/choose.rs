//! Which rows an operator runs by: what moves, and how the results lie.
//!
//! Rows speak about one mesh axis. On each axis the one is taken whose moves take the least time, as the mesh's network is
//! modelled ([`price`]), and the product over axes is laid out; where rows do not stand beside each other, one of them is barred and another taken. In exact mode only rows
//! that hold by bits are taken, and sums in parts get the terms that each rank has added up.

use std::rc::Rc;
use std::sync::Arc;

use smallvec::SmallVec;

use super::device_mesh::DeviceMesh;
use super::price;
use super::reduction::Reduction;
use super::tensor_meta::TensorMeta;
use crate::comm::Cost;
use crate::error::Result;
use crate::ops::{AxisPlacement, MeshAxis, Meta, Op, Row};
use crate::placement::{Layout, Placement, ReductionTree, Spec};
use crate::tensor::{Dims, ReduceOp};

/// How the operands are to lie, and the results will.
pub(super) struct Chosen {
    pub ins: SmallVec<[Rc<TensorMeta>; 3]>,
    pub outs: SmallVec<[Rc<TensorMeta>; 3]>,
    /// The results that are sums over terms which this operator cuts.
    pub made: SmallVec<[bool; 3]>,
}

/// Chooses a row on every mesh axis by the time its moves would take, and puts the axes together, in the order of cuts that
/// takes the least.
pub(super) fn choose(
    mesh: &DeviceMesh,
    op: &dyn Op,
    ins: &[&Rc<TensorMeta>],
    metas: &[Meta],
    outs: &[Meta],
) -> Result<Chosen> {
    let orders = orders(ins);
    let mut best = choose_in(mesh, op, ins, metas, outs, &orders[0]);
    if orders.len() > 1 {
        let cost = |chosen: &Result<Chosen>| match chosen {
            Ok(c) => ins.iter().zip(&c.ins).map(|(f, to)| price::between(mesh, f, to)).sum(),
            Err(_) => Cost::INFINITE,
        };
        let mut least: Cost = cost(&best);
        for order in &orders[1..] {
            let other = choose_in(mesh, op, ins, metas, outs, order);
            let price = cost(&other);
            if price < least {
                (best, least) = (other, price);
            }
        }
    }
    best
}

/// As [`choose`], with the cuts in this order.
fn choose_in(
    mesh: &DeviceMesh,
    op: &dyn Op,
    ins: &[&Rc<TensorMeta>],
    metas: &[Meta],
    outs: &[Meta],
    order: &[usize],
) -> Result<Chosen> {
    // Rows that could not be put together with those of other axes.
    let mut barred: Vec<Vec<Row>> = vec![Vec::new(); mesh.mesh().ndim()];
    loop {
        let pick = |(a, barred): (usize, &Vec<Row>)| cheapest(mesh, op, ins, metas, outs, a, barred);
        let candidate =
            Candidate { mesh, op, metas, order, rows: barred.iter().enumerate().map(pick).collect() };
        let a = match candidate.lay_out(ins, outs) {
            Ok(Ok(chosen)) => return Ok(chosen),
            Ok(Err(a)) => a,
            // Bar the ragged row, or any other that is not replicated, of the innermost axis; replicated rows always fit.
            Err(e) => {
                let ragged = candidate.last(Row::takes_ragged);
                let cut = || candidate.last(|r| !r.is_replicated());
                ragged.or_else(cut).ok_or(e)?
            }
        };
        barred[a].push(candidate.rows[a].0.clone());
    }
}

/// A row an axis, with the ragged placement that its [`AxisPlacement::Ragged`] stands for.
struct Candidate<'a> {
    mesh: &'a DeviceMesh,
    op: &'a dyn Op,
    metas: &'a [Meta],
    order: &'a [usize],
    rows: Vec<(Row, Option<Placement>)>,
}

impl Candidate<'_> {
    /// The facts that follow; or the axis whose row does not stand beside the others.
    fn lay_out(&self, ins: &[&Rc<TensorMeta>], outs: &[Meta]) -> Result<std::result::Result<Chosen, usize>> {
        // A row was chosen for the cuts that the operands had; the moves may have brought others beside it.
        let first: Vec<Placement> = self.placed(|r| r.ins[0]).collect();
        let stands = |&a: &usize| {
            let row = &self.rows[a].0;
            row.is_replicated() || self.op.rows(self.metas, axis_beside(self.mesh, a, &first)).contains(row)
        };
        if let Some(a) = (0..self.rows.len()).rev().find(|a| !stands(a)) {
            return Ok(Err(a));
        }
        let exact = self.mesh.reduction() == Reduction::Exact;
        let summed = |k| if exact { self.tree(k) } else { Ok(None) };
        let summed: SmallVec<[Option<ReductionTree>; 3]> =
            (0..outs.len()).map(summed).collect::<Result<_>>()?;
        if summed.iter().flatten().any(|t| self.mesh.most_nodes(t).is_none()) {
            // Some cut leaves no rank a whole leaf of the summation tree: move operands instead.
            let makes = self.last(|r| r.outs.iter().any(|s| s.tree_leaf().is_some()));
            return Ok(Err(makes.expect("the tree come from a row")));
        }
        let place = |(i, f): (usize, &&Rc<TensorMeta>)| {
            let mut spec = f.spec().with_layout(self.layout(|r| r.ins[i])?)?;
            // In fast mode a sum in parts from before goes on as one part a rank.
            spec.tree = spec.tree.filter(|_| exact);
            self.mesh.intern(spec)
        };
        let ins: SmallVec<[Rc<TensorMeta>; 3]> = ins.iter().enumerate().map(place).collect::<Result<_>>()?;
        let passes = self.last(|r| r.ins.iter().any(|s| s.is_sum()));
        if let Some(a) = passes
            && summed.iter().any(Option::is_some)
        {
            // The kernel runs on nodes of what it sums, or on those that its operands bring, and not on both.
            return Ok(Err(a));
        }
        let made = summed.iter().map(Option::is_some).collect();
        let mut laid = SmallVec::new();
        for (k, (meta, tree)) in outs.iter().zip(summed).enumerate() {
            let layout = self.layout(|r| r.outs[k])?;
            let mut spec = Spec::new(self.mesh.mesh(), meta.dtype, meta.shape.clone(), layout)?;
            spec.tree = match passes {
                None => tree.map(Arc::new),
                Some(a) => match passed_tree(&ins) {
                    Some(tree) => tree.filter(|_| spec.layout.has_partial()),
                    // Sums over different terms cannot pass side by side.
                    None => return Ok(Err(a)),
                },
            };
            laid.push(self.mesh.intern(spec)?);
        }
        Ok(Ok(Chosen { ins, outs: laid, made }))
    }

    fn placed(&self, slot: impl Fn(&Row) -> AxisPlacement) -> impl Iterator<Item = Placement> {
        self.rows.iter().map(move |(row, ragged)| instantiate(slot(row), ragged.as_ref()))
    }

    fn layout(&self, slot: impl Fn(&Row) -> AxisPlacement) -> Result<Layout> {
        Layout::new(self.placed(slot)).with_order(self.order)
    }

    /// The last axis with such a row.
    fn last(&self, is: impl Fn(&Row) -> bool) -> Option<usize> {
        self.rows.iter().rposition(|(row, _)| is(row))
    }

    /// The terms of result `k`, if some row cuts dims that it sums over.
    fn tree(&self, k: usize) -> Result<Option<ReductionTree>> {
        if self.last(|r| r.outs[k].tree_leaf().is_some()).is_none() {
            return Ok(None);
        }
        let dims = tree_rows(self.op, self.metas, k);
        let Some(leaf) = dims.first().and_then(|r| r.outs[k].tree_leaf()) else {
            unreachable!("a row was chosen")
        };
        let place = |(row, ragged): &(Row, Option<Placement>)| match row.outs[k] {
            AxisPlacement::TreeSum(_) if row.takes_ragged() => {
                ragged.clone().expect("the row was chosen for it")
            }
            AxisPlacement::TreeSum(_) => {
                let j = dims.iter().position(|r| r.ins == row.ins);
                Placement::Shard(j.expect("rows with tree do not depend on the axis"))
            }
            AxisPlacement::R | AxisPlacement::S(_) | AxisPlacement::P(_) | AxisPlacement::Ragged => {
                Placement::Replicate
            }
        };
        let layout = Layout::new(self.rows.iter().map(place)).with_order(self.order)?;
        Ok(Some(ReductionTree::new(dims.iter().map(|r| extent(r, self.metas)).collect(), leaf, layout)))
    }
}

/// The row of `op` on axis `a` whose moves take the least time; the first listed among equals, replication last.
fn cheapest(
    mesh: &DeviceMesh,
    op: &dyn Op,
    ins: &[&Rc<TensorMeta>],
    metas: &[Meta],
    outs: &[Meta],
    a: usize,
    barred: &[Row],
) -> (Row, Option<Placement>) {
    let replicated = Row::new(ins.iter().map(|_| AxisPlacement::R), outs.iter().map(|_| AxisPlacement::R));
    if ins.iter().all(|f| f.layout().axis(a).is_replicate()) {
        // Whatever is whole everywhere stays so: cutting the result would only have to be undone.
        return (replicated, None);
    }
    let ragged = ins.iter().map(|f| f.layout().axis(a)).find(|p| p.ragged_units().is_some()).cloned();
    let axis = axis_beside(mesh, a, ins[0].layout().placements());
    let mut rows = op.rows(metas, axis);
    rows.push(replicated);
    let exact = mesh.reduction() == Reduction::Exact;
    let made = |row: &Row| -> Cost {
        let sums = row.outs.iter().enumerate().filter(|(_, s)| exact && s.tree_leaf().is_some());
        let each = |(k, _)| match more_nodes(mesh, op, metas, k, a, row, ragged.as_ref()) {
            Some(more) => mesh.axis_peers(a).cost(0, (more * outs[k].len_bytes()) as u64),
            // Too many, also of no bytes.
            None => Cost::INFINITE,
        };
        sums.map(each).sum()
    };
    let cost = |row: &Row| -> Cost {
        if ragged.is_none() && row.takes_ragged() {
            return Cost::INFINITE;
        }
        let to = |s: &AxisPlacement| instantiate(*s, ragged.as_ref());
        row.ins.iter().zip(ins).map(|(s, f)| price::along_axis(mesh, f, a, &to(s))).sum::<Cost>() + made(row)
    };
    let fits =
        |row: &&Row| (row.by_bits || !exact) && (ragged.is_some() || !row.outs.iter().any(|s| s.is_ragged()));
    let mut best: Option<(Cost, &Row)> = None;
    for row in rows.iter().filter(|r| !barred.contains(r)).filter(fits) {
        let c = cost(row);
        if best.is_none_or(|(b, _)| c < b) {
            best = Some((c, row));
        }
    }
    let row = best.expect("the replicated row is never barred").1.clone();
    (row, ragged)
}

/// MeshAxis `a`, beside the cuts that the other axes make in the first operand where it lies so.
fn axis_beside(mesh: &DeviceMesh, a: usize, first: &[Placement]) -> MeshAxis {
    let mesh = mesh.mesh();
    (0..mesh.ndim()).filter(|&b| b != a).fold(MeshAxis::new(mesh.axis_len(a)), |axis, b| {
        first[b].split_dims().fold(axis, |axis, d| axis.with_split(d, mesh.axis_len(b)))
    })
}

fn instantiate(slot: AxisPlacement, ragged: Option<&Placement>) -> Placement {
    match slot {
        AxisPlacement::R => Placement::Replicate,
        AxisPlacement::S(d) => Placement::Shard(d),
        AxisPlacement::P(op) => Placement::Partial(op),
        AxisPlacement::TreeSum(_) => Placement::Partial(ReduceOp::Sum),
        AxisPlacement::Ragged => ragged.cloned().unwrap_or(Placement::Replicate),
    }
}

/// The rows that cut one dim which result `k` sums over: the dims of its summation tree, outermost first.
pub(super) fn tree_rows(op: &dyn Op, metas: &[Meta], k: usize) -> Vec<Row> {
    let mut rows = op.rows(metas, MeshAxis::new(1));
    rows.retain(|r| r.outs[k].tree_leaf().is_some() && !r.takes_ragged());
    rows
}

/// The extent of the dim that a row cuts.
fn extent(row: &Row, metas: &[Meta]) -> usize {
    let cut = row.ins.iter().zip(metas).find_map(|(s, m)| s.dim().map(|d| m.shape[d]));
    cut.expect("a row with tree cuts an operand")
}

/// How many nodes more than one a rank holds of result `k` where axis `a` alone is cut by `row`; none where that cuts a leaf.
fn more_nodes(
    mesh: &DeviceMesh,
    op: &dyn Op,
    metas: &[Meta],
    k: usize,
    a: usize,
    row: &Row,
    ragged: Option<&Placement>,
) -> Option<usize> {
    let whole = Row::new(row.ins.iter().map(|_| AxisPlacement::R), row.outs.iter().map(|_| AxisPlacement::R));
    let order: Dims = (0..mesh.mesh().ndim()).collect();
    let on = |b: usize| if a == b { (row.clone(), ragged.cloned()) } else { (whole.clone(), None) };
    let alone = Candidate { mesh, op, metas, order: &order, rows: order.iter().map(|&b| on(b)).collect() };
    match alone.tree(k) {
        Ok(Some(tree)) => mesh.most_nodes(&tree).map(|n| n.saturating_sub(1)),
        _ => None,
    }
}

/// The terms that the operands' sums in parts have in common, if they have; sums without terms have `None` in common.
fn passed_tree(ins: &[Rc<TensorMeta>]) -> Option<Option<Arc<ReductionTree>>> {
    let mut sums = ins.iter().filter(|f| f.layout().has_partial()).map(|f| &f.spec().tree);
    let Some(first) = sums.next() else { return Some(None) };
    sums.all(|t| t == first).then(|| first.clone())
}

/// The orders of axes that may be used for all operands and results: [`common_order`], then those in which an operand's cuts
/// lie otherwise. Where no dim of an operand is cut twice its order says nothing.
fn orders(ins: &[&Rc<TensorMeta>]) -> SmallVec<[Dims; 2]> {
    let mut orders: SmallVec<[Dims; 2]> = [common_order(ins)].into_iter().collect();
    for layout in ins.iter().map(|f| f.layout()) {
        let nested = (0..layout.ndim()).any(|a| (0..a).any(|b| layout.axis(a).meets(layout.axis(b))));
        if nested && orders.iter().all(|order| order[..] != *layout.order()) {
            orders.push(layout.order().iter().copied().collect());
        }
    }
    orders
}

/// The order of axes to use for all operands and results: that of the largest operand which has one of its own.
fn common_order(ins: &[&Rc<TensorMeta>]) -> Dims {
    let natural = |l: &Layout| l.order().iter().copied().eq(0..l.order().len());
    let largest = ins.iter().filter(|f| !natural(f.layout())).max_by_key(|f| f.shape().numel());
    let any = largest.or(ins.first());
    any.map(|f| f.layout().order().iter().copied().collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::spmd;
    use crate::dtensor::DTensor;
    use crate::tensor::DType;

    #[test]
    fn the_order_is_that_of_the_largest_operand_that_has_one() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 2), ("b", 2)])?;
            let order = |layouts: &[(&[usize], &str)]| -> Result<Vec<usize>> {
                let xs: Vec<DTensor> = layouts
                    .iter()
                    .map(|(s, l)| DTensor::zeros(&mesh, DType::F32, *s, l.parse()?))
                    .collect::<Result<_>>()?;
                Ok(common_order(&xs.iter().map(|x| &x.meta).collect::<Vec<_>>()).to_vec())
            };
            assert_eq!(order(&[(&[4], "(S0, S0)")])?, [0, 1]);
            assert_eq!(order(&[(&[9], "(S0, S0)"), (&[4], "(S0^1, S0^0)")])?, [1, 0]);
            assert_eq!(order(&[(&[4], "(S0^1, S0^0)"), (&[9], "(R, S0)")])?, [1, 0]);
            assert_eq!(order(&[(&[4], "(R, R)"), (&[9], "(S0, S0)")])?, [0, 1]);
            Ok(())
        };
        spmd(4, run).unwrap_or_else(|e| panic!("{e}"));
    }
}
