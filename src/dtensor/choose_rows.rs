//! The choice of sharding rules (rows) for a call: which operands move to which layouts, and the layouts of the
//! results.
//!
//! A row describes one mesh axis. On each axis the row is chosen whose moves take the least modelled time
//! ([`move_cost`]); the rows of all axes together give the layouts. If rows of two axes cannot be combined, one of
//! them is excluded and the choice repeated. In exact mode only rows that keep the bits are candidates, and partial
//! sums get a reduction tree.

use std::rc::Rc;
use std::sync::Arc;

use smallvec::SmallVec;

use super::device_mesh::DeviceMesh;
use super::move_cost;
use super::reduction::Reduction;
use super::tensor_meta::TensorMeta;
use crate::comm::Cost;
use crate::error::Result;
use crate::ops::{AxisPlacement, MeshAxis, Meta, Op, Row};
use crate::placement::{Layout, Placement, ReductionTree, Spec};
use crate::tensor::{Dims, ReduceOp};

/// The layouts to which the operands move, and those of the results.
pub(super) struct ChosenLayouts {
    pub ins: SmallVec<[Rc<TensorMeta>; 3]>,
    pub outs: SmallVec<[Rc<TensorMeta>; 3]>,
    /// Per result: true if it is a sum over dims that this call shards.
    pub made: SmallVec<[bool; 3]>,
}

/// Chooses the rows whose moves take the least modelled time, in the order of axes for which that is least.
pub(super) fn choose_rows(
    mesh: &DeviceMesh,
    op: &dyn Op,
    ins: &[&Rc<TensorMeta>],
    metas: &[Meta],
    outs: &[Meta],
) -> Result<ChosenLayouts> {
    let orders = orders(ins);
    let mut best = choose_rows_in_order(mesh, op, ins, metas, outs, &orders[0]);
    if orders.len() > 1 {
        let cost = |chosen: &Result<ChosenLayouts>| match chosen {
            Ok(c) => ins.iter().zip(&c.ins).map(|(f, to)| move_cost::between_layouts(mesh, f, to)).sum(),
            Err(_) => Cost::INFINITE,
        };
        let mut least: Cost = cost(&best);
        for order in &orders[1..] {
            let other = choose_rows_in_order(mesh, op, ins, metas, outs, order);
            let cost_of_other = cost(&other);
            if cost_of_other < least {
                (best, least) = (other, cost_of_other);
            }
        }
    }
    best
}

/// Chooses the rows if the axes split dims in this order.
fn choose_rows_in_order(
    mesh: &DeviceMesh,
    op: &dyn Op,
    ins: &[&Rc<TensorMeta>],
    metas: &[Meta],
    outs: &[Meta],
    order: &[usize],
) -> Result<ChosenLayouts> {
    // Rows that could not be combined with those of other axes.
    let mut excluded: Vec<Vec<Row>> = vec![Vec::new(); mesh.mesh().ndim()];
    loop {
        let pick = |(a, excluded): (usize, &Vec<Row>)| cheapest(mesh, op, ins, metas, outs, a, excluded);
        let candidate =
            Candidate { mesh, op, metas, order, rows: excluded.iter().enumerate().map(pick).collect() };
        let a = match candidate.lay_out(ins, outs) {
            Ok(Ok(chosen)) => return Ok(chosen),
            Ok(Err(a)) => a,
            // Exclude the innermost ragged row, else the innermost row that is not replicated: replicated rows always fit.
            Err(e) => {
                let ragged = candidate.last(Row::takes_ragged);
                let cut = || candidate.last(|r| !r.is_replicated());
                ragged.or_else(cut).ok_or(e)?
            }
        };
        excluded[a].push(candidate.rows[a].0.clone());
    }
}

/// One row per axis, with the ragged placement that its [`AxisPlacement::Ragged`] means.
struct Candidate<'a> {
    mesh: &'a DeviceMesh,
    op: &'a dyn Op,
    metas: &'a [Meta],
    order: &'a [usize],
    rows: Vec<(Row, Option<Placement>)>,
}

impl Candidate<'_> {
    /// Returns the metadata that follows from the rows, or the axis whose row cannot be combined with the others.
    fn lay_out(
        &self,
        ins: &[&Rc<TensorMeta>],
        outs: &[Meta],
    ) -> Result<std::result::Result<ChosenLayouts, usize>> {
        // A row was chosen for the splits that the operands had; the moves may have added splits along other axes.
        let first: Vec<Placement> = self.placed(|r| r.ins[0]).collect();
        let combines = |&a: &usize| {
            let row = &self.rows[a].0;
            row.is_replicated()
                || self.op.rows(self.metas, axis_with_splits(self.mesh, a, &first)).contains(row)
        };
        if let Some(a) = (0..self.rows.len()).rev().find(|a| !combines(a)) {
            return Ok(Err(a));
        }
        let exact = self.mesh.reduction() == Reduction::Exact;
        let summed = |k| if exact { self.tree(k) } else { Ok(None) };
        let summed: SmallVec<[Option<ReductionTree>; 3]> =
            (0..outs.len()).map(summed).collect::<Result<_>>()?;
        if summed.iter().flatten().any(|t| self.mesh.most_nodes(t).is_none()) {
            // Some boundary splits a leaf of the reduction tree: redistribute operands instead.
            let makes = self.last(|r| r.outs.iter().any(|s| s.tree_leaf().is_some()));
            return Ok(Err(makes.expect("the trees come from a row")));
        }
        let place = |(i, f): (usize, &&Rc<TensorMeta>)| {
            let mut spec = f.spec().with_layout(self.layout(|r| r.ins[i])?)?;
            // In fast mode, each rank adds up the nodes of an earlier partial sum.
            spec.tree = spec.tree.filter(|_| exact);
            self.mesh.intern(spec)
        };
        let ins: SmallVec<[Rc<TensorMeta>; 3]> = ins.iter().enumerate().map(place).collect::<Result<_>>()?;
        let passes = self.last(|r| r.ins.iter().any(|s| s.is_sum()));
        if let Some(a) = passes
            && summed.iter().any(Option::is_some)
        {
            // The kernel runs once per node of its own sum or once per node of its operands, but not both.
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
                    // Partial sums with different trees cannot pass through one call.
                    None => return Ok(Err(a)),
                },
            };
            laid.push(self.mesh.intern(spec)?);
        }
        Ok(Ok(ChosenLayouts { ins, outs: laid, made }))
    }

    /// Returns the placements of one operand or result, one per axis.
    fn placed(&self, placement_of: impl Fn(&Row) -> AxisPlacement) -> impl Iterator<Item = Placement> {
        self.rows.iter().map(move |(row, ragged)| instantiate(placement_of(row), ragged.as_ref()))
    }

    fn layout(&self, placement_of: impl Fn(&Row) -> AxisPlacement) -> Result<Layout> {
        Layout::new(self.placed(placement_of)).with_order(self.order)
    }

    /// Returns the last axis whose row satisfies `is`.
    fn last(&self, is: impl Fn(&Row) -> bool) -> Option<usize> {
        self.rows.iter().rposition(|(row, _)| is(row))
    }

    /// Returns the reduction tree of result `k`, if some row shards dims that it sums over.
    fn tree(&self, k: usize) -> Result<Option<ReductionTree>> {
        if self.last(|r| r.outs[k].tree_leaf().is_some()).is_none() {
            return Ok(None);
        }
        let dims = tree_rows(self.op, self.metas, k);
        let Some(leaf) = dims.first().and_then(|r| r.outs[k].tree_leaf()) else {
            unreachable!("a row with a tree was chosen")
        };
        let place = |(row, ragged): &(Row, Option<Placement>)| match row.outs[k] {
            AxisPlacement::TreeSum(_) if row.takes_ragged() => {
                ragged.clone().expect("the row was chosen for it")
            }
            AxisPlacement::TreeSum(_) => {
                let j = dims.iter().position(|r| r.ins == row.ins);
                Placement::Shard(j.expect("rows with a tree do not depend on the axis"))
            }
            AxisPlacement::R | AxisPlacement::S(_) | AxisPlacement::P(_) | AxisPlacement::Ragged => {
                Placement::Replicate
            }
        };
        let layout = Layout::new(self.rows.iter().map(place)).with_order(self.order)?;
        Ok(Some(ReductionTree::new(dims.iter().map(|r| extent(r, self.metas)).collect(), leaf, layout)))
    }
}

/// Returns the row of `op` on axis `a` whose moves take the least modelled time: the first listed among equals, and
/// replication last.
fn cheapest(
    mesh: &DeviceMesh,
    op: &dyn Op,
    ins: &[&Rc<TensorMeta>],
    metas: &[Meta],
    outs: &[Meta],
    a: usize,
    excluded: &[Row],
) -> (Row, Option<Placement>) {
    let replicated = Row::new(ins.iter().map(|_| AxisPlacement::R), outs.iter().map(|_| AxisPlacement::R));
    if ins.iter().all(|f| f.layout().axis(a).is_replicate()) {
        // Replicated operands give a replicated result: sharding it would only have to be undone.
        return (replicated, None);
    }
    let ragged = ins.iter().map(|f| f.layout().axis(a)).find(|p| p.ragged_units().is_some()).cloned();
    let axis = axis_with_splits(mesh, a, ins[0].layout().placements());
    let mut rows = op.rows(metas, axis);
    rows.push(replicated);
    let exact = mesh.reduction() == Reduction::Exact;
    let made = |row: &Row| -> Cost {
        let sums = row.outs.iter().enumerate().filter(|(_, s)| exact && s.tree_leaf().is_some());
        let each = |(k, _)| match more_nodes(mesh, op, metas, k, a, row, ragged.as_ref()) {
            Some(more) => mesh.axis_peers(a).cost(0, (more * outs[k].len_bytes()) as u64),
            // The row splits a leaf: it is not possible, even for empty results.
            None => Cost::INFINITE,
        };
        sums.map(each).sum()
    };
    let cost = |row: &Row| -> Cost {
        if ragged.is_none() && row.takes_ragged() {
            return Cost::INFINITE;
        }
        let to = |s: &AxisPlacement| instantiate(*s, ragged.as_ref());
        row.ins.iter().zip(ins).map(|(s, f)| move_cost::along_axis(mesh, f, a, &to(s))).sum::<Cost>()
            + made(row)
    };
    let fits =
        |row: &&Row| (row.by_bits || !exact) && (ragged.is_some() || !row.outs.iter().any(|s| s.is_ragged()));
    let mut best: Option<(Cost, &Row)> = None;
    for row in rows.iter().filter(|r| !excluded.contains(r)).filter(fits) {
        let c = cost(row);
        if best.is_none_or(|(b, _)| c < b) {
            best = Some((c, row));
        }
    }
    let row = best.expect("the replicated row is never excluded").1.clone();
    (row, ragged)
}

/// Returns mesh axis `a`, with the splits that the other axes make in the first operand.
fn axis_with_splits(mesh: &DeviceMesh, a: usize, first: &[Placement]) -> MeshAxis {
    let mesh = mesh.mesh();
    (0..mesh.ndim()).filter(|&b| b != a).fold(MeshAxis::new(mesh.axis_len(a)), |axis, b| {
        first[b].split_dims().fold(axis, |axis, d| axis.with_split(d, mesh.axis_len(b)))
    })
}

/// Returns the placement that a row asks for; `ragged` replaces [`AxisPlacement::Ragged`].
fn instantiate(placement_of: AxisPlacement, ragged: Option<&Placement>) -> Placement {
    match placement_of {
        AxisPlacement::R => Placement::Replicate,
        AxisPlacement::S(d) => Placement::Shard(d),
        AxisPlacement::P(op) => Placement::Partial(op),
        AxisPlacement::TreeSum(_) => Placement::Partial(ReduceOp::Sum),
        AxisPlacement::Ragged => ragged.cloned().unwrap_or(Placement::Replicate),
    }
}

/// Returns the rows that shard one summed dim of result `k`: the dims of its reduction tree, outermost first.
pub(super) fn tree_rows(op: &dyn Op, metas: &[Meta], k: usize) -> Vec<Row> {
    let mut rows = op.rows(metas, MeshAxis::new(1));
    rows.retain(|r| r.outs[k].tree_leaf().is_some() && !r.takes_ragged());
    rows
}

/// Returns the extent of the dim that a row shards.
fn extent(row: &Row, metas: &[Meta]) -> usize {
    let cut = row.ins.iter().zip(metas).find_map(|(s, m)| s.dim().map(|d| m.shape[d]));
    cut.expect("a row with a tree shards an operand")
}

/// Returns the number of nodes beyond one that a rank stores of result `k` if `row` shards axis `a` alone, or `None`
/// if that splits a leaf.
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

/// Returns the reduction tree that the operands' partial sums have in common (`Some(None)` for sums without a tree),
/// or `None` if they differ.
fn passed_tree(ins: &[Rc<TensorMeta>]) -> Option<Option<Arc<ReductionTree>>> {
    let mut sums = ins.iter().filter(|f| f.layout().has_partial()).map(|f| &f.spec().tree);
    let Some(first) = sums.next() else { return Some(None) };
    sums.all(|t| t == first).then(|| first.clone())
}

/// Returns the orders of axes that are tried for all operands and results: [`common_order`], then the other orders of
/// operands with a dim that several axes split. For the other operands the order has no meaning.
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

/// Returns the order of axes of the largest operand whose order is not the mesh order.
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
