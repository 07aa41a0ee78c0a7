//! The contract between an operator's methods, checked when a call is planned and when a kernel has run.
//!
//! [`Op`] states it. An operator that breaks it gets an error in its name that says which clause, on every rank and mesh
//! alike, a single rank included.

use super::{AxisPlacement, Meta, Op, Row, Tensors, Windows, list};
use crate::error::{Error, Result};

/// Refuses the first of `rows` that does not fit the operands and results. `sums` has the rows of an axis of one rank.
pub(in crate::ops) fn expect_rows(
    op: &dyn Op,
    ins: &[Meta],
    outs: &[Meta],
    rows: &[Row],
    sums: &[Row],
) -> Result<()> {
    for row in rows {
        let broken = broken_clause(row, ins, outs).or_else(|| unlisted_sum(row, ins, sums));
        if let Some((rule, what)) = broken {
            let given = format!("{what}{row:?} for ({}) -> ({})", list(ins), list(outs));
            return Err(Error::invalid(op.name(), rule, given, "mend Op::rows, and judge the operator"));
        }
    }
    Ok(())
}

/// Returns the clause of [`Op::rows`] that a row breaks by itself, and the place in the row.
pub(crate) fn broken_clause(row: &Row, ins: &[Meta], outs: &[Meta]) -> Option<(&'static str, String)> {
    if (row.ins.len(), row.outs.len()) != (ins.len(), outs.len()) {
        return Some(("a row has one placement per operand and one per result", String::new()));
    }
    for (i, (slot, meta)) in row.ins.iter().zip(ins).enumerate() {
        let rule = match slot {
            AxisPlacement::S(d) if *d >= meta.shape.len() => "a row shards a dim that the tensor has",
            AxisPlacement::TreeSum(_) | AxisPlacement::RaggedOver(_) => {
                "only a result of a row is a tree sum, or ragged over a stated number of dims"
            }
            AxisPlacement::R | AxisPlacement::S(_) | AxisPlacement::P(_) | AxisPlacement::Ragged => continue,
        };
        return Some((rule, format!("operand {i} in ")));
    }
    for (k, (slot, meta)) in row.outs.iter().zip(outs).enumerate() {
        let cuts = row.takes_ragged() || row.ins.iter().any(|s| s.dim().is_some());
        let rule = match slot {
            AxisPlacement::S(d) if *d >= meta.shape.len() => "a row shards a dim that the tensor has",
            AxisPlacement::RaggedOver(dims) if *dims == 0 || *dims > meta.shape.len() => {
                "a result is ragged over dims that it has"
            }
            AxisPlacement::TreeSum(_) if !cuts => "a row with a tree sum shards an operand",
            AxisPlacement::Ragged | AxisPlacement::RaggedOver(_) if !row.takes_ragged() => {
                "a result is ragged if an operand is"
            }
            AxisPlacement::R
            | AxisPlacement::S(_)
            | AxisPlacement::P(_)
            | AxisPlacement::TreeSum(_)
            | AxisPlacement::Ragged
            | AxisPlacement::RaggedOver(_) => continue,
        };
        return Some((rule, format!("result {k} in ")));
    }
    None
}

/// Returns the broken clause if a row has a tree sum that is not listed for an axis of one rank: the tree of a result
/// follows from the rows that are.
fn unlisted_sum(row: &Row, ins: &[Meta], sums: &[Row]) -> Option<(&'static str, String)> {
    // A tensor without dims is never ragged, and its sum has no tree.
    let is_ragged = |(s, m): (&AxisPlacement, &Meta)| s.is_ragged() && !m.shape.is_empty();
    if row.takes_ragged() && !row.ins.iter().zip(ins).any(is_ragged) {
        return None;
    }
    let is_listed = |k: usize| {
        let leaf = |r: &&Row| r.outs[k].tree_leaf().is_some() && !r.takes_ragged();
        sums.iter().filter(leaf).any(|r| row.takes_ragged() || r.ins == row.ins)
    };
    let k = (0..row.outs.len()).find(|&k| row.outs[k].tree_leaf().is_some() && !is_listed(k))?;
    let rule = "the rows with a tree sum are the same for every axis, and each summed dim has one";
    Some((rule, format!("result {k} in ")))
}

/// Refuses a kernel's results if they are not one per result of [`Op::infer`].
#[inline]
pub(super) fn expect_count(op: &dyn Op, at: &Windows, outs: &Tensors) -> Result<()> {
    if outs.len() == at.outs.len() { Ok(()) } else { Err(other_count(op, at, outs)) }
}

#[cold]
fn other_count(op: &dyn Op, at: &Windows, outs: &Tensors) -> Error {
    let given: Vec<Meta> = outs.iter().map(Meta::of).collect();
    let given =
        format!("{} result(s), ({}), of {} that infer states", outs.len(), list(&given), at.outs.len());
    Error::invalid(op.name(), "the kernel returns one tensor per result", given, "mend Op::eval or Op::infer")
}

/// Refuses a kernel's results whose shapes are not those of their windows.
pub(crate) fn expect_shapes(op: &dyn Op, at: &Windows, outs: &Tensors) -> Result<()> {
    expect_count(op, at, outs)?;
    let Some(k) = (0..outs.len()).find(|&k| outs[k].shape() != at.outs[k].local()) else { return Ok(()) };
    let rule = format!("the kernel's result {k} has the shape of its window");
    let given = format!("{} for {}", outs[k].notation(), at.outs[k].local());
    Err(Error::invalid(op.name(), rule, given, "mend Op::eval"))
}
