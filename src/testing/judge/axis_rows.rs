//! Rows of operators as layouts of tensors.

use crate::ops::{AxisPlacement, MeshAxis, Meta, Op, RaggedCut, Row, rows_on_axis, runs_by_boxes};
use crate::placement::{Layout, Mesh, Placement, Spec};
use crate::tensor::ReduceOp;

/// A mesh of one axis.
pub(super) fn line(ranks: usize) -> Mesh {
    Mesh::new(&[("a", ranks)], 0).expect("one axis with a name")
}

/// Returns the rows of `op` for an axis, among them the ragged ones for shards over one, two and three dims.
pub(super) fn all_rows(op: &dyn Op, metas: &[Meta], axis: MeshAxis) -> Vec<Row> {
    let mut rows = op.rows(metas, axis);
    rows.retain(|row| !row.takes_ragged());
    for dims in RAGGED_DIMS {
        for (i, blocks) in metas.iter().enumerate().filter_map(|(i, m)| Some((i, flattened(m, dims)?))) {
            let found = rows_on_axis(op, metas, axis.with_ragged(RaggedCut { dims, blocks }));
            let starts_here = |row: &Row| row.ins.iter().position(|s| s.is_ragged()) == Some(i);
            for row in found.into_iter().filter(starts_here) {
                if !rows.contains(&row) {
                    rows.push(row);
                }
            }
        }
    }
    rows
}

/// The numbers of flattened dims with which ragged rows are judged.
pub(super) const RAGGED_DIMS: std::ops::Range<usize> = 1..4;

/// Returns the cut of the ragged operands of `rows`, one row per axis, over `dims` dims, if the rows are listed for it;
/// `None` if not. Blocks are as small as they can be.
pub(super) fn ragged_cut(
    op: &dyn Op,
    mesh: &Mesh,
    rows: &[Row],
    metas: &[Meta],
    dims: usize,
) -> Option<RaggedCut> {
    let first = (0..metas.len()).find(|&i| rows.iter().any(|r| r.ins[i].is_ragged()))?;
    let blocks = flattened(&metas[first], dims)?;
    let is_listed = |(a, row): (usize, &Row)| {
        let axis = MeshAxis::new(mesh.axis_len(a)).with_ragged(RaggedCut { dims, blocks });
        !row.takes_ragged() || rows_on_axis(op, metas, axis).contains(row)
    };
    if !rows.iter().enumerate().all(is_listed) {
        return None;
    }
    // The parts that other axes leave of a dim have to divide into the blocks as well.
    let parts = |d: usize| {
        let axes = rows.iter().enumerate().filter(|(_, r)| r.ins[first].dim() == Some(d));
        axes.map(|(a, _)| mesh.axis_len(a)).product::<usize>()
    };
    let extent = |(d, n): (usize, &usize)| match parts(d) {
        1 => *n,
        parts if n % parts == 0 => n / parts,
        _ => 1,
    };
    let blocks = metas[first].shape[..dims].iter().enumerate().map(extent).product();
    let ragged_axes = rows.iter().filter(|r| r.takes_ragged()).count();
    Some(RaggedCut { dims, blocks: if ragged_axes > 1 { 1 } else { blocks } })
}

/// Returns the number of indices of the first `dims` dims, or `None` if there are not as many.
pub(super) fn flattened(m: &Meta, dims: usize) -> Option<usize> {
    m.shape.get(..dims).map(|dims| dims.iter().product())
}

/// Returns true if the kernel runs once per box under some of the rows.
pub(super) fn by_boxes(
    op: &dyn Op,
    mesh: &Mesh,
    rows: &[Row],
    metas: &[Meta],
    cut: Option<RaggedCut>,
) -> bool {
    let Some(cut) = cut else { return false };
    let axis = |a: usize| MeshAxis::new(mesh.axis_len(a)).with_ragged(cut);
    rows.iter().enumerate().any(|(a, row)| runs_by_boxes(op, metas, axis(a), row))
}

/// Returns `slot` as a placement on an axis of `ranks`, if ragged operands are cut as `cut` says.
pub(super) fn placement(slot: AxisPlacement, cut: Option<RaggedCut>, ranks: usize) -> Option<Placement> {
    let ragged =
        |dims: usize| Some(Placement::RaggedShard { dims, units: uneven(cut?.blocks, ranks).into() });
    match slot {
        AxisPlacement::R => Some(Placement::Replicate),
        AxisPlacement::S(d) => Some(Placement::Shard(d)),
        AxisPlacement::P(op) => Some(Placement::Partial(op)),
        AxisPlacement::TreeSum(_) => Some(Placement::Partial(ReduceOp::Sum)),
        AxisPlacement::Ragged => ragged(cut?.dims),
        AxisPlacement::RaggedOver(dims) => ragged(dims),
    }
}

/// Returns the specs of operands or results under one row per axis; `slots` picks their placements from a row. `None`
/// if no tensor can have such a layout.
pub(super) fn specs(
    mesh: &Mesh,
    (rows, order): (&[Row], &[usize]),
    metas: &[Meta],
    cut: Option<RaggedCut>,
    slots: impl Fn(&Row) -> &[AxisPlacement],
) -> Option<Vec<Spec>> {
    let spec = |(i, m): (usize, &Meta)| {
        let place = |(a, r): (usize, &Row)| placement(slots(r)[i], cut, mesh.axis_len(a));
        let placements: Option<Vec<Placement>> = rows.iter().enumerate().map(place).collect();
        let layout = Layout::new(placements?).with_order(order).ok()?;
        Spec::new(mesh, m.dtype, m.shape.clone(), layout).ok()
    };
    metas.iter().enumerate().map(spec).collect()
}

/// True if some placement of the rows is ragged.
pub(super) fn is_ragged(rows: &[Row]) -> bool {
    rows.iter().any(|r| r.ins.iter().chain(&r.outs).any(|s| s.is_ragged()))
}

/// Returns true if several of `ranks` ranks own blocks of the cut.
pub(super) fn is_spread(cut: RaggedCut, ranks: usize) -> bool {
    uneven(cut.blocks, ranks).iter().filter(|&&n| n > 0).count() > 1
}

/// Distributes `n` blocks very unevenly, other than equal chunks, with empty ranks if there are more than two.
fn uneven(n: usize, ranks: usize) -> Vec<usize> {
    let mut units = vec![0; ranks];
    let first = match ranks {
        1 => 0,
        2 => n / 3,
        _ => (n / 3).max(usize::from(n > 1)),
    };
    units[0] = first;
    units[ranks - 1] = n - first;
    if ranks > 3 {
        units[3] = n / 4;
        units[ranks - 1] -= n / 4;
    }
    units
}
