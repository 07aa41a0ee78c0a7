//! Rows of operators as layouts of tensors.

use crate::ops::{AxisPlacement, Meta, Row};
use crate::placement::{Layout, Mesh, Placement, Spec};
use crate::tensor::{ReduceOp, Shape};

/// A mesh of one axis.
pub(super) fn line(ranks: usize) -> Mesh {
    Mesh::new(&[("a", ranks)], 0).expect("one axis with a name")
}

/// Returns `slot` as a placement on an axis of `ranks`; `Ragged` covers `dims` dims with the extents of `first`, the
/// first operand.
pub(super) fn placement(slot: AxisPlacement, first: &Shape, dims: usize, ranks: usize) -> Option<Placement> {
    Some(match slot {
        AxisPlacement::R => Placement::Replicate,
        AxisPlacement::S(d) => Placement::Shard(d),
        AxisPlacement::P(op) => Placement::Partial(op),
        AxisPlacement::TreeSum(_) => Placement::Partial(ReduceOp::Sum),
        AxisPlacement::Ragged => {
            let numel: usize = first.get(..dims)?.iter().product();
            Placement::RaggedShard { dims, units: uneven(numel, ranks).into() }
        }
    })
}

/// Returns the specs of operands or results under one row per axis; `slots` picks their placements from a row. `None`
/// if no tensor can have such a layout.
pub(super) fn specs(
    mesh: &Mesh,
    (rows, order): (&[Row], &[usize]),
    metas: &[Meta],
    (first, dims): (&Shape, usize),
    slots: impl Fn(&Row) -> &[AxisPlacement],
) -> Option<Vec<Spec>> {
    let spec = |(i, m): (usize, &Meta)| {
        let place = |(a, r): (usize, &Row)| placement(slots(r)[i], first, dims, mesh.axis_len(a));
        let placements: Option<Vec<Placement>> = rows.iter().enumerate().map(place).collect();
        let layout = Layout::new(placements?).with_order(order).ok()?;
        Spec::new(mesh, m.dtype, m.shape.clone(), layout).ok()
    };
    metas.iter().enumerate().map(spec).collect()
}

/// True if some placement of the rows is ragged.
pub(super) fn is_ragged(rows: &[Row]) -> bool {
    rows.iter().any(|r| r.ins.iter().chain(&r.outs).any(|s| *s == AxisPlacement::Ragged))
}

/// Distributes `n` blocks very unevenly, with empty ranks if there are more than two.
fn uneven(n: usize, ranks: usize) -> Vec<usize> {
    let mut units = vec![0; ranks];
    units[0] = n / 3;
    units[ranks - 1] = n - n / 3;
    if ranks > 3 {
        units[3] = n / 4;
        units[ranks - 1] -= n / 4;
    }
    units
}
