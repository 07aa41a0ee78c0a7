//! The rows of operators for tensors that are ragged along a mesh axis. They follow from the rows for shards.
//!
//! Along one dim, a ragged shard is a shard of dim 0 whose boundaries may lie between any two indices. So a row that
//! shards dim 0 of operands and results of equal extents gives a ragged row, if it holds for pieces of one index
//! each. Over several dims, a ragged shard is a few boxes. If rows shard dim 0, dim 1 and so on of the same operands
//! and results, a rank computes the result of each box by itself ([`RaggedBoxes`](super::RaggedBoxes)). A row that
//! sums over these dims is used where the boundaries split no leaf of the reduction tree.
//!
//! An operator lists a ragged row itself if its kernel computes flattened shards in one call (pointwise formulas,
//! sums over all dims), or if operands and results flatten different dims (`reshape`).
//!
//! There are no ragged rows
//! - if a result is sharded on a dim other than 0, as in `x wᵀ` with a ragged `w`: no placement cuts dim 1 raggedly;
//! - if operands or results have different extents on the flattened dims, as query and key heads can: equal blocks of
//!   them are not the same indices;
//! - for maxima and minima over some of several flattened dims, which would stay partial.

use crate::error::Result;
use crate::ops::record::contract::{broken_clause, expect_rows};
use crate::ops::{AxisPlacement, MeshAxis, Meta, Metas, Op, RaggedCut, Row};

/// Returns the rows for one mesh axis, after checking that they fit the operands and results.
///
/// # Errors
/// Refuses, in the operator's name, the first row that breaks the contract of [`Op::rows`].
pub(crate) fn checked_rows(op: &dyn Op, ins: &[Meta], outs: &[Meta], axis: MeshAxis) -> Result<Vec<Row>> {
    let sums = op.rows(ins, MeshAxis::new(1));
    expect_rows(op, ins, outs, &sums, &sums)?;
    expect_rows(op, ins, outs, &op.rows(ins, axis), &sums)?;
    Ok(rows_on_axis(op, ins, axis))
}

/// Returns the rows of `op` for one mesh axis: those that it lists, and, if the axis says how operands are ragged,
/// those that follow.
pub(crate) fn rows_on_axis(op: &dyn Op, ins: &[Meta], axis: MeshAxis) -> Vec<Row> {
    let mut rows = op.rows(ins, axis);
    let Some(cut) = axis.ragged() else { return rows };
    rows.retain(|row| !row.takes_ragged() || divides(row, ins, cut));
    for row in derived_rows(op, ins, axis, cut) {
        if !rows.iter().any(|r| (&r.ins, &r.outs) == (&row.ins, &row.outs)) {
            rows.push(row);
        }
    }
    rows
}

/// Returns true if the kernel has to run once per box under `row`: operands are ragged over several dims, and `op`
/// does not list the row itself.
pub(crate) fn runs_by_boxes(op: &dyn Op, ins: &[Meta], axis: MeshAxis, row: &Row) -> bool {
    let several = axis.ragged().is_some_and(|cut| cut.dims > 1);
    several && row.takes_ragged() && !op.rows(ins, axis).contains(row)
}

/// Returns true if each ragged operand of `row` has the flattened dims, and they divide into the blocks.
fn divides(row: &Row, ins: &[Meta], cut: RaggedCut) -> bool {
    let fits = |m: &Meta| {
        m.shape.get(..cut.dims).is_some_and(|dims| dims.iter().product::<usize>().is_multiple_of(cut.blocks))
    };
    row.ins.iter().zip(ins).all(|(s, m)| !s.is_ragged() || fits(m))
}

/// Returns the ragged rows that follow from rows that shard the flattened dims.
fn derived_rows(op: &dyn Op, ins: &[Meta], axis: MeshAxis, cut: RaggedCut) -> Vec<Row> {
    let Ok(outs) = op.infer(ins) else { return Vec::new() };
    let rows_of_dim = |d: usize| {
        let extents = ins.iter().chain(&outs).filter_map(|m| m.shape.get(d).copied());
        let mut rows = op.rows(ins, axis.cut_at_each_index(d, extents.max().unwrap_or(1)));
        rows.retain(|row| broken_clause(row, ins, &outs).is_none());
        rows
    };
    let rows: Vec<Vec<Row>> = (0..cut.dims).map(rows_of_dim).collect();
    let several = cut.dims > 1;
    let one = |row: &Row| {
        let is_cut = |s: &AxisPlacement| s.dim() == Some(0);
        if !row.ins.iter().any(is_cut) || !placed_alike(row, several) || !extents_agree(row, ins, &outs, cut)
        {
            return None;
        }
        // The rows that cut the other flattened dims of the same operands and results.
        let others = (1..cut.dims).map(|d| rows[d].iter().find(|r| shards_instead(r, row, d)));
        let all: Vec<&Row> = std::iter::once(Some(row)).chain(others).collect::<Option<_>>()?;
        sums_in_order(op, ins, &outs, &all).then(|| {
            let ragged = |s: &AxisPlacement| if is_cut(s) { AxisPlacement::Ragged } else { *s };
            let mut found = Row::new(row.ins.iter().map(ragged), row.outs.iter().map(ragged));
            found.by_bits = all.iter().all(|r| r.by_bits);
            found
        })
    };
    rows[0].iter().filter_map(one).filter(|row| divides(row, ins, cut)).collect()
}

/// Returns true if every shard of a row is of dim 0, and nothing is ragged. If `several` dims are flattened, no operand
/// and no result other than a sum over these dims may be partial or, as a result, replicated: the boxes of a rank have
/// one such result each.
fn placed_alike(row: &Row, several: bool) -> bool {
    let right = |s: &AxisPlacement, result: bool| match s {
        AxisPlacement::S(d) => *d == 0,
        AxisPlacement::R => !(several && result),
        AxisPlacement::P(_) => !several,
        AxisPlacement::TreeSum(_) => result,
        AxisPlacement::Ragged | AxisPlacement::RaggedOver(_) => false,
    };
    row.ins.iter().all(|s| right(s, false)) && row.outs.iter().all(|s| right(s, true))
}

/// Returns true if the sharded operands and results of a row have equal extents on the flattened dims.
fn extents_agree(row: &Row, ins: &[Meta], outs: &Metas, cut: RaggedCut) -> bool {
    let all = row.ins.iter().zip(ins).chain(row.outs.iter().zip(outs));
    let mut extents = all.filter(|(s, _)| s.dim().is_some()).map(|(_, m)| m.shape.get(..cut.dims));
    let Some(Some(first)) = extents.next() else { return false };
    extents.all(|e| e == Some(first))
}

/// Returns true if `row` shards dim `d` of the operands and results whose dim 0 `first` shards, and places the other
/// ones as `first` does.
fn shards_instead(row: &Row, first: &Row, d: usize) -> bool {
    let pairs = row.ins.iter().zip(&first.ins).chain(row.outs.iter().zip(&first.outs));
    row.ins.len() == first.ins.len()
        && pairs.into_iter().all(|(s, f)| if f.dim().is_some() { s.dim() == Some(d) } else { s == f })
}

/// Returns true if the rows, which shard the flattened dims in order, shard the outermost dims of every reduction tree
/// that they have.
fn sums_in_order(op: &dyn Op, ins: &[Meta], outs: &[Meta], rows: &[&Row]) -> bool {
    let sums = |k: &usize| rows[0].outs[*k].tree_leaf().is_some();
    (0..rows[0].outs.len()).filter(sums).all(|k| {
        let mut tree = op.rows(ins, MeshAxis::new(1));
        tree.retain(|r| {
            broken_clause(r, ins, outs).is_none() && r.outs[k].tree_leaf().is_some() && !r.takes_ragged()
        });
        tree.len() >= rows.len() && tree.iter().zip(rows).all(|(level, row)| level.ins == row.ins)
    })
}
