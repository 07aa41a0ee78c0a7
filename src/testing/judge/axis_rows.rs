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

/// The cut of each mesh axis's ragged operands; `None` for an axis whose row takes none.
pub(super) type AxisCuts = Vec<Option<RaggedCut>>;

/// Returns the cuts with which the rows, one per axis, are judged together: for all numbers of flattened dims for which
/// the rows are listed. Blocks are as small as they can be. If ragged axes cut each other's parts, there are up to three
/// cuts for each: small blocks for the outer axis, small blocks for the inner one, and blocks that spread both over
/// ranks.
pub(super) fn ragged_cuts(
    op: &dyn Op,
    mesh: &Mesh,
    (rows, order): (&[Row], &[usize]),
    metas: &[Meta],
) -> Vec<AxisCuts> {
    let uncut: AxisCuts = vec![None; rows.len()];
    let ragged: Vec<usize> = order.iter().copied().filter(|&a| rows[a].takes_ragged()).collect();
    let Some((&outer, inner)) = ragged.split_first() else {
        return if is_ragged(rows) { Vec::new() } else { vec![uncut] };
    };
    let blocks_in =
        |cuts: &AxisCuts, a: usize, dims: usize| largest_cut(mesh, (rows, order), metas, cuts, a, dims);
    let mut found: Vec<AxisCuts> = Vec::new();
    for dims in RAGGED_DIMS {
        let Some(most) = blocks_in(&uncut, outer, dims) else { continue };
        let set = |cuts: &AxisCuts, a: usize, dims: usize, blocks: usize| {
            let mut cuts = cuts.clone();
            cuts[a] = Some(RaggedCut { dims, blocks });
            cuts
        };
        let Some(&inner) = inner.first() else {
            found.push(set(&uncut, outer, dims, most));
            continue;
        };
        for inner_dims in RAGGED_DIMS {
            let both = |blocks: usize| {
                let cuts = set(&uncut, outer, dims, blocks);
                Some(set(&cuts, inner, inner_dims, blocks_in(&cuts, inner, inner_dims)?))
            };
            let all: Vec<AxisCuts> =
                (1..=most).rev().filter(|n| most.is_multiple_of(*n)).filter_map(both).collect();
            let is_spread = |cuts: &&AxisCuts| {
                [outer, inner].iter().all(|&a| cuts[a].is_some_and(|cut| is_spread(cut, mesh.axis_len(a))))
            };
            for cuts in [all.first(), all.iter().find(is_spread), all.last()].into_iter().flatten() {
                if !found.contains(cuts) {
                    found.push(cuts.clone());
                }
            }
        }
    }
    found.retain(|cuts| are_listed(op, mesh, rows, metas, cuts));
    found
}

/// Returns the largest number of blocks over `dims` dims into which every part of axis `a`'s first ragged operand divides
/// that the axes outside leave; `None` if there is no such operand.
fn largest_cut(
    mesh: &Mesh,
    (rows, order): (&[Row], &[usize]),
    metas: &[Meta],
    cuts: &AxisCuts,
    a: usize,
    dims: usize,
) -> Option<usize> {
    let i = rows[a].ins.iter().position(|s| s.is_ragged())?;
    let outside = order.iter().position(|&b| b == a)?;
    let place = |b: usize| match order[..outside].contains(&b) {
        true => placement(rows[b].ins[i], cuts[b], mesh.axis_len(b)),
        false => Some(Placement::Replicate),
    };
    let placements: Option<Vec<Placement>> = (0..rows.len()).map(place).collect();
    let layout = Layout::new(placements?).with_order(order).ok()?;
    flattened(&metas[i], dims)?;
    let spec = Spec::new(mesh, metas[i].dtype, metas[i].shape.clone(), layout).ok()?;
    let part = |rank: usize| {
        let local = spec.local_shape_at(&mesh.coords_of(rank).expect("a rank of the mesh"));
        let is_flat = local.len() < spec.shape.len();
        // Inside flattened dims, only axes that flatten the same dims cut.
        let has_dims = !is_flat || spec.shape.len() + 1 - local.len() == dims;
        has_dims.then(|| local[..if is_flat { 1 } else { dims }].iter().product::<usize>())
    };
    let parts: Option<Vec<usize>> = mesh.ranks().map(part).collect();
    // Empty parts divide into any number of blocks.
    Some(Some(parts?.into_iter().fold(0, gcd)).filter(|&blocks| blocks > 0).unwrap_or(EMPTY_BLOCKS))
}

/// The number of blocks into which empty operands are cut.
const EMPTY_BLOCKS: usize = 4;

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Returns true if every row is listed for its axis, with the splits that the other axes make in the first operand.
fn are_listed(op: &dyn Op, mesh: &Mesh, rows: &[Row], metas: &[Meta], cuts: &AxisCuts) -> bool {
    (0..rows.len()).filter(|&a| !rows[a].is_replicated()).all(|a| {
        let mut axis = MeshAxis::new(mesh.axis_len(a));
        if let Some(cut) = cuts[a] {
            axis = axis.with_ragged(cut);
        }
        for b in (0..rows.len()).filter(|&b| b != a) {
            let split = rows[b].ins.first().and_then(|s| placement(*s, cuts[b], mesh.axis_len(b)));
            let Some(split) = split else { continue };
            axis = split.split_dims().fold(axis, |axis, d| match split.ragged_units() {
                Some(_) => axis.with_ragged_split(d),
                None => axis.with_split(d, mesh.axis_len(b)),
            });
        }
        rows_on_axis(op, metas, axis).contains(&rows[a])
    })
}

/// Returns the number of indices of the first `dims` dims, or `None` if there are not as many.
pub(super) fn flattened(m: &Meta, dims: usize) -> Option<usize> {
    m.shape.get(..dims).map(|dims| dims.iter().product())
}

/// Returns true if the kernel runs once per box under some of the rows.
pub(super) fn by_boxes(op: &dyn Op, mesh: &Mesh, rows: &[Row], metas: &[Meta], cuts: &AxisCuts) -> bool {
    rows.iter().zip(cuts).enumerate().any(|(a, (row, cut))| {
        cut.is_some_and(|cut| runs_by_boxes(op, metas, MeshAxis::new(mesh.axis_len(a)).with_ragged(cut), row))
    })
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
    cuts: &AxisCuts,
    slots: impl Fn(&Row) -> &[AxisPlacement],
) -> Option<Vec<Spec>> {
    let spec = |(i, m): (usize, &Meta)| {
        let place = |(a, r): (usize, &Row)| placement(slots(r)[i], cuts[a], mesh.axis_len(a));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Exp;
    use crate::tensor::DType;

    /// Returns the cuts of a matrix under two rows that a tensor can have, as dims and blocks of the axes `a` and `b`.
    fn cuts(rows: [AxisPlacement; 2], order: [usize; 2], shape: [usize; 2]) -> Vec<[(usize, usize); 2]> {
        let mesh = Mesh::new(&[("a", 2), ("b", 2)], 0).unwrap();
        let rows = rows.map(|slot| Row::same(slot, 1));
        let metas = [Meta::new(DType::F32, shape)];
        let mut found = ragged_cuts(&Exp, &mesh, (&rows, &order), &metas);
        found.retain(|cuts| specs(&mesh, (&rows, &order), &metas, cuts, |r| &r.ins).is_some());
        let numbers = |cut: Option<RaggedCut>| cut.map_or((0, 0), |cut| (cut.dims, cut.blocks));
        found.iter().map(|cuts| [numbers(cuts[0]), numbers(cuts[1])]).collect()
    }

    #[test]
    fn ragged_axes_cut_the_parts_of_others_into_several_blocks() {
        use AxisPlacement::{R, Ragged};
        assert_eq!(cuts([Ragged, R], [0, 1], [9, 5]), [[(1, 9), (0, 0)], [(2, 45), (0, 0)]]);
        // Nine rows are cut into 3 and 6, and 45 elements into 15 and 30.
        let mut nested = vec![
            [(1, 9), (1, 3)],
            [(1, 1), (1, 9)],
            [(1, 9), (2, 15)],
            [(1, 1), (2, 45)],
            [(2, 45), (2, 15)],
            [(2, 1), (2, 45)],
        ];
        assert_eq!(cuts([Ragged, Ragged], [0, 1], [9, 5]), nested);
        nested.iter_mut().for_each(|axes| axes.reverse());
        assert_eq!(cuts([Ragged, Ragged], [1, 0], [9, 5]), nested);
        // Twenty elements are cut into 6 and 14, which divide into 2 blocks only; 5 blocks of them leave 4.
        let nested = [
            [(1, 5), (1, 1)],
            [(1, 1), (1, 5)],
            [(1, 5), (2, 4)],
            [(1, 1), (2, 20)],
            [(2, 20), (2, 2)],
            [(2, 5), (2, 4)],
            [(2, 1), (2, 20)],
        ];
        assert_eq!(cuts([Ragged, Ragged], [0, 1], [5, 4]), nested);
    }

    #[test]
    fn ragged_axes_cut_parts_of_sharded_dims_and_are_cut_by_them() {
        use AxisPlacement::{Ragged, S};
        // A shard of dim 0 leaves 4 and 4 rows, or 5 and 4.
        assert_eq!(cuts([S(0), Ragged], [0, 1], [8, 5]), [[(0, 0), (1, 4)], [(0, 0), (2, 20)]]);
        assert_eq!(cuts([S(0), Ragged], [0, 1], [9, 5]), [[(0, 0), (1, 1)], [(0, 0), (2, 5)]]);
        // Within ragged rows it cuts whatever it finds; within flattened dims no shard is possible.
        assert_eq!(cuts([S(0), Ragged], [1, 0], [9, 5]), [[(0, 0), (1, 9)]]);
        assert_eq!(cuts([S(1), Ragged], [0, 1], [9, 6]), [[(0, 0), (1, 9)], [(0, 0), (2, 27)]]);
    }
}
