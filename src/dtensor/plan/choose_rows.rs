//! The choice of sharding rules (rows) for a call: which operands move to which layouts, and the layouts of the
//! results.
//!
//! A row describes one mesh axis. The rows of all axes are chosen together, because they interact: the product is taken
//! whose call takes the slowest rank the least time ([`CallCost`]), moves and kernel together. Products are visited
//! from those whose axes cost least one by one, and the search ends when no other product can cost less. After
//! [`PRODUCTS_LEN`] of them, only products that differ from the best one along one axis are visited, until none is
//! better. Tests compare it with all products of all rows. In exact mode only rows that keep the bits are candidates,
//! and partial sums get a reduction tree.
//!
//! Along an axis on which every operand is replicated the results are replicated: the program said so, and a shard
//! would have to be gathered by whatever comes next.
//!
//! An unreduced result costs its reduction if it is unreduced because an operand moved: an operand is not moved to
//! leave more to reduce than another move would take.
//!
//! Missing: the cost of what follows the call otherwise.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::rc::Rc;

use smallvec::SmallVec;

use super::call_cost::{CallCost, CallModel};
use super::row_product::{KnownRows, RowProduct, axis_with_splits, instantiate, more_nodes};
use crate::comm::Cost;
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::error::{Error, Result};
use crate::ops::{MeshAxis, Meta, Op, Row};
use crate::placement::{Layout, Placement};
use crate::tensor::{Dims, sort_by, sort_by_key};

pub(in crate::dtensor) use super::row_product::ChosenLayouts;

/// The number of products of rows after which only neighbours of the best one are compared.
const PRODUCTS_LEN: usize = 256;

/// Chooses the layouts of a call.
pub(in crate::dtensor) fn choose_rows(
    mesh: &DeviceMesh,
    op: &dyn Op,
    ins: &[&Rc<TensorMeta>],
    metas: &[Meta],
    outs: &[Meta],
) -> Result<ChosenLayouts> {
    let mut search = RowSearch::new(mesh, op, ins, metas, outs)?;
    for (nth, order) in orders(ins).iter().enumerate() {
        search.visit(nth, order);
    }
    if let Some(refusal) = search.known.refusal() {
        return Err(refusal);
    }
    match search.best {
        Some((_, chosen)) => Ok(chosen),
        None => Err(search.refusal.expect("replicated rows always fit, or are refused")),
    }
}

/// A sharding of a call and its time.
pub(in crate::dtensor) struct ConsideredSharding {
    /// The rows, such as `dp: S0 R -> S0, tp: R S1 -> S1`.
    pub rows: String,
    pub time: Cost,
    /// The layouts of operands and results.
    pub layouts: Vec<Layout>,
}

/// Returns the shardings that the search visits, the cheapest first: those that fit, each pair of layouts once.
pub(in crate::dtensor) fn considered(
    mesh: &DeviceMesh,
    op: &dyn Op,
    ins: &[&Rc<TensorMeta>],
    metas: &[Meta],
    outs: &[Meta],
) -> Vec<ConsideredSharding> {
    let Ok(mut search) = RowSearch::new(mesh, op, ins, metas, outs) else { return Vec::new() };
    search.visited = Some(Vec::new());
    for (nth, order) in orders(ins).iter().enumerate() {
        search.visit(nth, order);
    }
    let mut all = search.visited.take().unwrap_or_default();
    sort_by(&mut all, |a, b| a.0.cmp(&b.0));
    let mut kept: Vec<ConsideredSharding> = Vec::new();
    for (_, sharding) in all {
        if kept.iter().all(|other| other.layouts != sharding.layouts) {
            kept.push(sharding);
        }
    }
    kept
}

/// A row for one axis, with the cost of moving the operands along this axis alone.
struct AxisChoice {
    row: Row,
    alone: Cost,
    /// The position in the operator's list.
    nth: usize,
}

/// The rows for one axis, the cheapest first.
struct AxisChoices {
    ragged: Option<Placement>,
    rows: Vec<AxisChoice>,
}

/// The key by which products are compared: the cost, then the order of axes, then the rows' places in the operator's list.
type ProductKey = (CallCost, usize, SmallVec<[usize; 4]>);

/// The search over products of rows.
struct RowSearch<'a> {
    model: CallModel<'a>,
    op: &'a dyn Op,
    axes: Vec<AxisChoices>,
    known: KnownRows,
    best: Option<(ProductKey, ChosenLayouts)>,
    refusal: Option<Error>,
    /// All products that fit, if they are asked for.
    visited: Option<Vec<(ProductKey, ConsideredSharding)>>,
}

impl<'a> RowSearch<'a> {
    fn new(
        mesh: &'a DeviceMesh,
        op: &'a dyn Op,
        ins: &'a [&'a Rc<TensorMeta>],
        metas: &'a [Meta],
        outs: &'a [Meta],
    ) -> Result<RowSearch<'a>> {
        let known = KnownRows::default();
        // Also if all operands are replicated: a broken contract is an error on every mesh.
        known.on(op, metas, outs, MeshAxis::new(1));
        if let Some(refusal) = known.refusal() {
            return Err(refusal);
        }
        let mut model = CallModel::new(mesh, op, ins, metas, outs);
        let axes = (0..mesh.mesh().ndim()).map(|a| choices(&mut model, &known, op, a)).collect();
        Ok(RowSearch { model, op, axes, known, best: None, refusal: None, visited: None })
    }

    /// Visits products of rows if the axes split dims in this order.
    fn visit(&mut self, nth_order: usize, order: &[usize]) {
        let sum = |axes: &[AxisChoices], at: &[usize]| -> Cost {
            axes.iter().zip(at).map(|(axis, &i)| axis.rows[i].alone).sum()
        };
        // The products that differ from a visited one in one step along its last changed axis or a later one: each
        // product is reached once.
        let mut next = BinaryHeap::new();
        let first: SmallVec<[usize; 4]> = SmallVec::from_elem(0, self.axes.len());
        next.push(Reverse((sum(&self.axes, &first), first, 0)));
        let mut visited = 0;
        while let Some(Reverse((_, at, from))) = next.pop() {
            self.compare(nth_order, order, &at);
            visited += 1;
            if let Some(((cost, ..), _)) = &self.best {
                if self.visited.is_none() && cost.is_least(self.model.least_time()) {
                    return;
                }
                if visited >= PRODUCTS_LEN {
                    return self.improve(nth_order, order);
                }
            }
            for a in from..at.len() {
                if at[a] + 1 < self.axes[a].rows.len() {
                    let mut after = at.clone();
                    after[a] += 1;
                    next.push(Reverse((sum(&self.axes, &after), after, a)));
                }
            }
        }
    }

    /// Visits the products that differ from the best one along one axis, as long as one of them is better.
    fn improve(&mut self, nth_order: usize, order: &[usize]) {
        while let Some((key, _)) = &self.best {
            let key = key.clone();
            let place = |(axis, nth): (&AxisChoices, &usize)| axis.rows.iter().position(|r| r.nth == *nth);
            let at: Option<SmallVec<[usize; 4]>> = self.axes.iter().zip(&key.2).map(place).collect();
            let at = at.expect("the best product's rows are among the choices");
            for a in 0..at.len() {
                // Its own rows may be new in this order of axes.
                for i in 0..self.axes[a].rows.len() {
                    let mut other = at.clone();
                    other[a] = i;
                    self.compare(nth_order, order, &other);
                }
            }
            if self.best.as_ref().is_some_and(|(best, _)| *best == key) {
                return;
            }
        }
    }

    /// Takes this product if it is a sharding of the call and better than the best so far.
    fn compare(&mut self, nth_order: usize, order: &[usize], at: &[usize]) {
        let rows = self.axes.iter().zip(at).map(|(axis, &i)| (&axis.rows[i].row, axis.ragged.as_ref()));
        let product = RowProduct {
            mesh: self.model.mesh,
            op: self.op,
            metas: self.model.metas,
            order,
            rows: rows.collect(),
        };
        let listed = || self.axes.iter().zip(at).map(|(axis, &i)| axis.rows[i].nth).collect();
        let limit = self.best.as_ref().filter(|_| self.visited.is_none()).map(|((cost, ..), _)| *cost);
        let Some(cost) = self.model.cost(&product, limit) else { return };
        let worse = |cost: &CallCost, best: &Option<(ProductKey, ChosenLayouts)>| {
            best.as_ref().is_some_and(|(key, _)| (*cost, nth_order, listed()) >= *key)
        };
        if self.visited.is_none() && worse(&cost, &self.best) {
            return;
        }
        match product.lay_out_with(&self.known, self.model.ins, self.model.outs) {
            Ok(Some(chosen)) => {
                let cost = self.model.with_reductions(cost, &chosen);
                if let Some(visited) = &mut self.visited {
                    let axis = |(a, (row, _)): (usize, &(&Row, Option<&Placement>))| {
                        format!("{}: {row:?}", self.model.mesh.mesh().axis_name(a))
                    };
                    let rows: Vec<String> = product.rows.iter().enumerate().map(axis).collect();
                    let layouts = chosen.ins.iter().chain(&chosen.outs).map(|m| m.layout().clone()).collect();
                    let key = (cost, nth_order, listed());
                    visited
                        .push((key, ConsideredSharding { rows: rows.join(", "), time: cost.time, layouts }));
                }
                if !worse(&cost, &self.best) {
                    self.best = Some(((cost, nth_order, listed()), chosen));
                }
            }
            Ok(None) => {}
            Err(e) => self.refusal = Some(e),
        }
    }
}

/// Returns the rows of `op` on axis `a` that a call may use, the cheapest first, and replication.
fn choices(model: &mut CallModel<'_>, known: &KnownRows, op: &dyn Op, a: usize) -> AxisChoices {
    let CallModel { mesh, ins, metas, outs, .. } = *model;
    let replicated = Row::replicated(ins.len(), outs.len());
    if ins.iter().all(|f| f.layout().axis(a).is_replicate()) {
        return AxisChoices {
            ragged: None,
            rows: vec![AxisChoice { row: replicated, alone: Cost::default(), nth: 0 }],
        };
    }
    let ragged = ins.iter().map(|f| f.layout().axis(a)).find(|p| p.ragged_units().is_some()).cloned();
    let axis = axis_with_splits(mesh, a, ins[0].layout().placements(), ragged.as_ref());
    let mut rows = known.on(op, metas, outs, axis);
    rows.push(replicated);
    let exact = mesh.reduction().is_exact();
    let fits = |row: &Row| {
        let ragged_in_or_out = row.takes_ragged() || row.outs.iter().any(|s| s.is_ragged());
        (row.by_bits || !exact) && (ragged.is_some() || !ragged_in_or_out)
    };
    let mut kept = Vec::with_capacity(rows.len());
    for (nth, row) in rows.into_iter().enumerate().filter(|(_, row)| fits(row)) {
        let sums = row.outs.iter().enumerate().filter(|(_, s)| exact && s.tree_leaf().is_some());
        let nodes = |(k, _)| match more_nodes(mesh, op, metas, k, a, &row, ragged.as_ref()) {
            Some(more) => mesh.axis_peers(a).cost(0, more.saturating_mul(outs[k].len_bytes()) as u64),
            // The row splits a leaf: it is not possible, even for empty results.
            None => Cost::INFINITE,
        };
        let nodes: Cost = sums.map(nodes).sum();
        let place = |(i, s)| (i, instantiate(s, ragged.as_ref()));
        let moves: Cost =
            row.ins.iter().copied().enumerate().map(place).map(|(i, p)| model.along_axis(i, a, p)).sum();
        let alone = moves + nodes;
        if alone < Cost::INFINITE || row.is_replicated() {
            kept.push(AxisChoice { row, alone, nth });
        }
    }
    sort_by_key(&mut kept, |choice| (choice.alone, choice.nth));
    AxisChoices { ragged, rows: kept }
}

/// Returns the orders of axes that are tried for all operands and results: [`common_order`], then the other orders of
/// operands with a dim that several axes split. For the other operands the order has no meaning.
pub(in crate::dtensor) fn orders(ins: &[&Rc<TensorMeta>]) -> SmallVec<[Dims; 2]> {
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
                    .map(|(s, l)| DTensor::zeros(&mesh, DType::F32, *s, l))
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
