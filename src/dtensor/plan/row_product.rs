//! A sharding of one call: a row per mesh axis, and the layouts that follow from the rows together.
//!
//! Not every product of rows is a sharding. Two axes may cut a dim so that a row no longer holds, a boundary may split a
//! leaf of the reduction tree, and a call may make partial sums or pass them on, but not both.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::error::{Error, Result};
use crate::ops::{
    AxisPlacement, MeshAxis, Meta, Op, RaggedCut, Row, are_cut_alike, checked_rows, runs_by_boxes,
};
use crate::placement::{Layout, Placement, ReductionTree, Spec, SumGroups};
use crate::tensor::{Dims, ReduceOp, Shape, short_list};

/// The layouts to which the operands move, and those of the results.
pub(in crate::dtensor) struct ChosenLayouts {
    pub ins: SmallVec<[Rc<TensorMeta>; 3]>,
    pub outs: SmallVec<[Rc<TensorMeta>; 3]>,
    /// Per result: true if it is a sum over dims that this call shards.
    pub made: SmallVec<[bool; 3]>,
    /// True if the kernel runs once per box of operands that are ragged over several dims.
    pub by_boxes: bool,
}

/// A sharding of one call: a row per mesh axis.
pub(in crate::dtensor) struct RowProduct<'a> {
    pub mesh: &'a DeviceMesh,
    pub op: &'a dyn Op,
    pub metas: &'a [Meta],
    /// The order of axes of all operands and results.
    pub order: &'a [usize],
    /// A row per axis, and the ragged placement that its [`AxisPlacement::Ragged`] means.
    pub rows: SmallVec<[(&'a Row, Option<&'a Placement>); 4]>,
}

/// The rows of one call's operator on mesh axes for which they have been asked.
#[derive(Default)]
pub(in crate::dtensor) struct KnownRows {
    rows: RefCell<Vec<(MeshAxis, Vec<Row>)>>,
    refusal: RefCell<Option<Error>>,
}

impl KnownRows {
    /// Returns the rows on a mesh axis.
    pub fn on(&self, op: &dyn Op, metas: &[Meta], outs: &[Meta], axis: MeshAxis) -> Vec<Row> {
        self.with(op, (metas, outs), axis, |rows| rows.to_vec())
    }

    /// Returns true if `row` is one of the rows on a mesh axis.
    fn has(&self, op: &dyn Op, metas: (&[Meta], &[Meta]), axis: MeshAxis, row: &Row) -> bool {
        self.with(op, metas, axis, |rows| rows.contains(row))
    }

    fn with<T>(
        &self,
        op: &dyn Op,
        (ins, outs): (&[Meta], &[Meta]),
        axis: MeshAxis,
        f: impl FnOnce(&[Row]) -> T,
    ) -> T {
        let mut known = self.rows.borrow_mut();
        let at = known.iter().position(|(other, _)| *other == axis).unwrap_or_else(|| {
            let rows = checked_rows(op, ins, outs, axis);
            let refused = |e| {
                self.refusal.replace(Some(e));
                Vec::new()
            };
            known.push((axis, rows.unwrap_or_else(refused)));
            known.len() - 1
        });
        f(&known[at].1)
    }

    /// Returns the error of an operator whose rows break its contract.
    pub fn refusal(&self) -> Option<Error> {
        self.refusal.borrow().clone()
    }
}

impl RowProduct<'_> {
    /// Returns the metadata as [`RowProduct::lay_out_with`] does, without known rows.
    #[cfg(test)]
    pub fn lay_out(&self, ins: &[&Rc<TensorMeta>], outs: &[Meta]) -> Result<Option<ChosenLayouts>> {
        self.lay_out_with(&KnownRows::default(), ins, outs)
    }

    /// Returns the metadata that follows from the rows, or `None` if they are no sharding together. `known` has the
    /// operator's rows that other products of the same call have asked for.
    pub fn lay_out_with(
        &self,
        known: &KnownRows,
        ins: &[&Rc<TensorMeta>],
        outs: &[Meta],
    ) -> Result<Option<ChosenLayouts>> {
        // A row was chosen for the splits that the operands had; the moves may have added splits along other axes.
        let first: SmallVec<[Placement; 4]> = short_list(self.placed(&|r| r.ins[0]));
        let combines = |a: usize| {
            let (row, ragged) = self.rows[a];
            let axis = || axis_with_splits(self.mesh, a, &first, ragged);
            row.is_replicated() || known.has(self.op, (self.metas, outs), axis(), row)
        };
        if !(0..self.rows.len()).rev().all(combines) {
            return Ok(None);
        }
        let exact = self.mesh.reduction().is_exact();
        let summed = |k| if exact { self.tree(k) } else { Ok(None) };
        let summed: SmallVec<[Option<ReductionTree>; 3]> =
            (0..outs.len()).map(summed).collect::<Result<_>>()?;
        if summed.iter().flatten().any(|t| self.mesh.most_nodes(t).is_none()) {
            // Some boundary splits a leaf of the reduction tree: redistribute operands instead.
            return Ok(None);
        }
        let place = |(i, f): (usize, &&Rc<TensorMeta>)| {
            let mut spec = f.spec().with_layout(self.layout(&|r| r.ins[i])?)?;
            // In fast mode, each rank adds up the nodes of an earlier partial sum.
            spec.tree = spec.tree.filter(|_| exact);
            self.mesh.intern(spec)
        };
        let ins: SmallVec<[Rc<TensorMeta>; 3]> = ins.iter().enumerate().map(place).collect::<Result<_>>()?;
        let passes = self.any_row(|r| r.ins.iter().any(|s| s.is_sum()));
        let sums = summed.iter().any(Option::is_some);
        if passes && sums {
            // The kernel runs once per node of its own sum or once per node of its operands, but not both.
            return Ok(None);
        }
        let by_boxes = self.runs_by_boxes();
        if by_boxes
            && (passes
                || sums
                || rounded_parts(self.mesh, self.op, self.metas).is_some()
                || !self.are_cut_alike(&ins, outs)?)
        {
            // The kernel runs once per box, once per node or once per part.
            return Ok(None);
        }
        let made = summed.iter().map(Option::is_some).collect();
        let mut laid = SmallVec::new();
        for (k, (meta, tree)) in outs.iter().zip(summed).enumerate() {
            let layout = self.layout(&|r| r.outs[k])?;
            let mut spec = Spec::new(self.mesh.mesh(), meta.dtype, meta.shape.clone(), layout)?;
            let kept = ins.iter().any(|f| f.has_kept_parts());
            spec.tree = if passes || kept {
                match passed_tree(&ins) {
                    PassedTree::Common(tree) => tree.filter(|_| kept || spec.layout.has_partial()),
                    // Partial sums with different trees cannot pass through one call.
                    PassedTree::Different => return Ok(None),
                }
            } else {
                tree.map(Arc::new)
            };
            laid.push(self.mesh.intern(spec)?);
        }
        Ok(Some(ChosenLayouts { ins, outs: laid, made, by_boxes }))
    }

    /// Returns true if a row needs a call of the kernel per box. In exact mode, a sum over dims that are flattened
    /// needs a call per node of its tree instead.
    fn runs_by_boxes(&self) -> bool {
        let exact = self.mesh.reduction().is_exact();
        let by_boxes = |a: usize| {
            let (row, ragged) = self.rows[a];
            let in_nodes = exact && row.outs.iter().any(|s| s.tree_leaf().is_some());
            let axis = MeshAxis::new(self.mesh.mesh().axis_len(a));
            let cut = ragged_cut(ragged).filter(|_| !in_nodes);
            cut.is_some_and(|cut| runs_by_boxes(self.op, self.metas, axis.with_ragged(cut), row))
        };
        (0..self.rows.len()).rev().any(by_boxes)
    }

    /// Returns true if the kernel may run once per box of these operands and the results.
    fn are_cut_alike(&self, ins: &[Rc<TensorMeta>], outs: &[Meta]) -> Result<bool> {
        let layouts: SmallVec<[Layout; 3]> =
            (0..outs.len()).map(|k| self.layout(&|r| r.outs[k])).collect::<Result<_>>()?;
        let ins = ins.iter().map(|f| (f.shape(), f.layout()));
        Ok(are_cut_alike(ins, outs.iter().map(|m| &m.shape).zip(&layouts)))
    }

    /// Returns the placements of one operand or result, one per axis.
    fn placed(&self, placement_of: &dyn Fn(&Row) -> AxisPlacement) -> impl Iterator<Item = Placement> {
        self.rows.iter().map(move |(row, ragged)| instantiate(placement_of(row), *ragged))
    }

    pub fn layout(&self, placement_of: &dyn Fn(&Row) -> AxisPlacement) -> Result<Layout> {
        Layout::new(self.placed(placement_of)).with_order(self.order)
    }

    fn any_row(&self, is: impl Fn(&Row) -> bool) -> bool {
        self.rows.iter().any(|(row, _)| is(row))
    }

    /// Returns the reduction tree of result `k`, if some row shards dims that it sums over.
    fn tree(&self, k: usize) -> Result<Option<ReductionTree>> {
        let groups = rounded_parts(self.mesh, self.op, self.metas);
        if !self.any_row(|r| r.outs[k].tree_leaf().is_some()) {
            // Parts that are kept are kept on all meshes.
            let kept = groups.filter(SumGroups::is_kept);
            let tree = || whole_tree(self.op, self.metas, k, self.rows.len());
            return Ok(kept.and_then(|groups| Some(tree()?.with_groups(groups))));
        }
        let dims = tree_rows(self.op, self.metas, k);
        let Some(leaf) = dims.first().and_then(|r| r.outs[k].tree_leaf()) else {
            unreachable!("a row with a tree was chosen")
        };
        let place = |(row, ragged): &(&Row, Option<&Placement>)| match row.outs[k] {
            AxisPlacement::TreeSum(_) if row.takes_ragged() => {
                (*ragged).cloned().expect("the row was chosen for it")
            }
            AxisPlacement::TreeSum(_) => {
                let j = dims.iter().position(|r| r.ins == row.ins);
                Placement::Shard(j.expect("rows with a tree do not depend on the axis"))
            }
            AxisPlacement::R
            | AxisPlacement::S(_)
            | AxisPlacement::P(_)
            | AxisPlacement::Ragged
            | AxisPlacement::RaggedOver(_) => Placement::Replicate,
        };
        let layout = Layout::new(self.rows.iter().map(place)).with_order(self.order)?;
        let extents: Shape = dims.iter().map(|r| extent(r, self.metas)).collect();
        if layout.ragged_axis().is_some() {
            // Another axis may split a ragged prefix of the summed dims from inside.
            Spec::new(self.mesh.mesh(), self.metas[0].dtype, extents.clone(), layout.clone())?;
        }
        let tree = ReductionTree::new(extents, leaf, layout);
        Ok(Some(match groups {
            Some(groups) => tree.with_groups(groups),
            None => tree,
        }))
    }
}

/// Returns mesh axis `a`, with the splits that the other axes make in the first operand, and the ragged placement that
/// rows may use.
pub(in crate::dtensor) fn axis_with_splits(
    mesh: &DeviceMesh,
    a: usize,
    first: &[Placement],
    ragged: Option<&Placement>,
) -> MeshAxis {
    let mesh = mesh.mesh();
    let axis = MeshAxis::new(mesh.axis_len(a));
    let axis = ragged_cut(ragged).map_or(axis, |cut| axis.with_ragged(cut));
    (0..mesh.ndim()).filter(|&b| b != a).fold(axis, |axis, b| {
        first[b].split_dims().fold(axis, |axis, d| match first[b].ragged_units() {
            Some(_) => axis.with_ragged_split(d),
            None => axis.with_split(d, mesh.axis_len(b)),
        })
    })
}

/// Returns the numbers of dims and blocks of a ragged placement.
fn ragged_cut(ragged: Option<&Placement>) -> Option<RaggedCut> {
    let placement = ragged?;
    let blocks = placement.ragged_units()?.total();
    Some(RaggedCut { dims: placement.split_dims().end, blocks })
}

/// Returns the placement that a row asks for; `ragged` replaces [`AxisPlacement::Ragged`].
pub(in crate::dtensor) fn instantiate(placement_of: AxisPlacement, ragged: Option<&Placement>) -> Placement {
    match placement_of {
        AxisPlacement::R => Placement::Replicate,
        AxisPlacement::S(d) => Placement::Shard(d),
        AxisPlacement::P(op) => Placement::Partial(op),
        AxisPlacement::TreeSum(_) => Placement::Partial(ReduceOp::Sum),
        AxisPlacement::Ragged => ragged.cloned().unwrap_or(Placement::Replicate),
        AxisPlacement::RaggedOver(dims) => match ragged {
            Some(Placement::RaggedShard { units, .. }) => {
                Placement::RaggedShard { dims, units: units.clone() }
            }
            Some(Placement::Replicate | Placement::Shard(_) | Placement::Partial(_)) | None => {
                Placement::Replicate
            }
        },
    }
}

/// Returns the rows that shard one summed dim of result `k`: the dims of its reduction tree, outermost first.
pub(in crate::dtensor) fn tree_rows(op: &dyn Op, metas: &[Meta], k: usize) -> Vec<Row> {
    let mut rows = op.rows(metas, MeshAxis::new(1));
    rows.retain(|r| r.outs[k].tree_leaf().is_some() && !r.takes_ragged());
    rows
}

/// Returns the parts in which the program takes the sums of `op`, if they are rounded or kept.
pub(in crate::dtensor) fn rounded_parts(mesh: &DeviceMesh, op: &dyn Op, metas: &[Meta]) -> Option<SumGroups> {
    let groups = mesh.reduction().groups()?;
    let rounds = op.takes_groups() && metas.iter().any(|m| groups.rounds(m.dtype));
    match groups.is_kept() {
        _ if rounds => Some(groups),
        true => Some(groups.unrounded()),
        false => None,
    }
}

/// Returns the tree of result `k` if no axis shards its summed dims, or `None` if it is no sum.
pub(in crate::dtensor) fn whole_tree(
    op: &dyn Op,
    metas: &[Meta],
    k: usize,
    axes: usize,
) -> Option<ReductionTree> {
    let dims = tree_rows(op, metas, k);
    let leaf = dims.first()?.outs[k].tree_leaf()?;
    let extents = dims.iter().map(|r| extent(r, metas)).collect();
    Some(ReductionTree::new(extents, leaf, Layout::replicated(axes)))
}

/// Returns the extent of the dim that a row shards.
fn extent(row: &Row, metas: &[Meta]) -> usize {
    let cut = row.ins.iter().zip(metas).find_map(|(s, m)| s.dim().map(|d| m.shape[d]));
    cut.expect("a row with a tree shards an operand")
}

/// Returns the number of nodes beyond one that a rank stores of result `k` if `row` shards axis `a` alone, or `None`
/// if that splits a leaf.
pub(in crate::dtensor) fn more_nodes(
    mesh: &DeviceMesh,
    op: &dyn Op,
    metas: &[Meta],
    k: usize,
    a: usize,
    row: &Row,
    ragged: Option<&Placement>,
) -> Option<usize> {
    let replicated = Row::replicated(row.ins.len(), row.outs.len());
    let order: Dims = (0..mesh.mesh().ndim()).collect();
    let on = |b: usize| if a == b { (row, ragged) } else { (&replicated, None) };
    let alone = RowProduct { mesh, op, metas, order: &order, rows: order.iter().map(|&b| on(b)).collect() };
    match alone.tree(k) {
        Ok(Some(tree)) => mesh.most_nodes(&tree).map(|n| n.saturating_sub(1)),
        _ => None,
    }
}

/// The reduction trees of the operands' partial sums.
enum PassedTree {
    /// The one that all have; `None` for sums without a tree.
    Common(Option<Arc<ReductionTree>>),
    Different,
}

fn passed_tree(ins: &[Rc<TensorMeta>]) -> PassedTree {
    let sums = ins.iter().filter(|f| f.layout().has_partial() || f.has_kept_parts());
    let mut trees = sums.map(|f| &f.spec().tree);
    let Some(first) = trees.next() else { return PassedTree::Common(None) };
    if trees.all(|tree| tree == first) { PassedTree::Common(first.clone()) } else { PassedTree::Different }
}
