//! The judge of values: an operator under combinations of placements, compared with a single rank.
//!
//! Ranks are simulated and exchange nothing, because a row claims that no communication is needed. A combination holds
//! if it holds for several sets of values, in f32 and in f64, on all ranks, bit for bit (or within `values::bound`, for
//! samples that state that their sums are rounded). Rows with partial sums may differ by one rounding of each
//! contribution, the only tolerance here (`row_bound`). If an element of the result is infinite, contributions to its
//! sum may add up to NaN (`inf - inf`); that is not counted as a difference.

use super::axis_rows::{by_boxes, flattened, is_spread, placement, ragged_cuts, specs};
use super::local_evaluation::{eval_apart, have_common_boxes};
use super::verdict::Discrepancy;
use crate::error;
use crate::ops::{AxisPlacement, Meta, RaggedCut, Row, Sample, eval_whole};
use crate::placement::{Layout, Mesh, Placement, Spec};
use crate::tensor::{DType, ReduceOp, Tensor};
use crate::testing::shards::{difference, parts_of};
use crate::testing::values::{bound, epsilon, magnitude, values};

const PARTIALS: [AxisPlacement; 3] =
    [AxisPlacement::P(ReduceOp::Sum), AxisPlacement::P(ReduceOp::Max), AxisPlacement::P(ReduceOp::Min)];

pub(super) fn is_degenerate(sample: &Sample) -> bool {
    let metas = sample.metas();
    let outs = sample.op.infer(&metas).unwrap();
    metas.iter().chain(&outs).any(|m| m.shape.is_empty() || m.shape.iter().any(|&n| n < 2))
}

/// Returns true if `row` gives `truth` by the exemptions that [`Judge::missing`](super::Judge::missing) lists.
pub(super) fn implies(row: &Row, truth: &Row, cut: Option<RaggedCut>) -> bool {
    let extremum = |s: &AxisPlacement| matches!(s, AxisPlacement::P(ReduceOp::Max | ReduceOp::Min));
    let plain = |s: &AxisPlacement| match s {
        AxisPlacement::TreeSum(_) => AxisPlacement::SUM,
        AxisPlacement::RaggedOver(dims) if cut.is_some_and(|cut| cut.dims == *dims) => AxisPlacement::Ragged,
        AxisPlacement::R
        | AxisPlacement::S(_)
        | AxisPlacement::P(_)
        | AxisPlacement::Ragged
        | AxisPlacement::RaggedOver(_) => *s,
    };
    let ins = row.ins.iter().zip(&truth.ins).all(|(r, t)| r == t || (*t == AxisPlacement::R && extremum(r)));
    let outs = row
        .outs
        .iter()
        .zip(&truth.outs)
        .all(|(r, t)| plain(r) == *t || (*r == AxisPlacement::R && extremum(t)));
    ins && outs
}

/// The values with which a combination is judged, and a single rank's results.
pub(super) struct ValueTrial {
    ins: Vec<Tensor>,
    outs: Vec<Tensor>,
    salt: u64,
}

/// Returns the first `n` trials in f32 and f64, or in the one of them that the operator takes.
///
/// # Errors
/// Returns the operator's error if it refuses both, or the values, such as an index that is too large.
pub(super) fn try_trials(sample: &Sample, n: usize) -> error::Result<Vec<ValueTrial>> {
    let op = sample.op.as_ref();
    let infer = |dtype: DType| {
        let metas: Vec<Meta> = values(sample, dtype, 1).iter().map(Meta::of).collect();
        op.infer(&metas)
    };
    let in_f32 = infer(DType::F32);
    let dtypes = match (&in_f32, infer(DType::F64)) {
        (Ok(_), Ok(_)) => [DType::F32, DType::F64],
        (Ok(_), Err(_)) => [DType::F32; 2],
        (Err(_), Ok(_)) => [DType::F64; 2],
        (Err(_), Err(_)) => return Err(in_f32.unwrap_err()),
    };
    let one = |salt: u64| {
        let ins = values(sample, dtypes[(salt as usize + 1) % 2], salt);
        let outs = eval_whole(op, &ins)?.into_vec();
        Ok(ValueTrial { ins, outs, salt })
    };
    (1..=n as u64).map(one).collect()
}

/// Judges one row per axis together, for every ragged placement that fits. Returns true if a kernel ran: combinations
/// that no tensor can have, such as a partial of bools, hold without being judged.
pub(super) fn holds_everywhere(
    sample: &Sample,
    trials: &[ValueTrial],
    mesh: &Mesh,
    rows: &[Row],
    order: &[usize],
) -> Result<bool, Discrepancy> {
    let op = sample.op.as_ref();
    let mut ran = false;
    for trial in trials {
        let metas = |ts: &[Tensor]| ts.iter().map(Meta::of).collect::<Vec<_>>();
        let (in_metas, out_metas) = (metas(&trial.ins), metas(&trial.outs));
        for cuts in ragged_cuts(op, mesh, (rows, order), &in_metas) {
            let by_boxes = by_boxes(op, mesh, rows, &in_metas, &cuts);
            let ins = specs(mesh, (rows, order), &in_metas, &cuts, |r| &r.ins);
            let outs = specs(mesh, (rows, order), &out_metas, &cuts, |r| &r.outs);
            let (Some(ins), Some(outs)) = (ins, outs) else { continue };
            // The dispatcher does not combine rows whose ragged operands differ in their boxes.
            if !by_boxes || have_common_boxes(&ins, &outs) {
                judge(sample, trial, &ins, &outs, by_boxes)?;
                ran = true;
            }
        }
    }
    Ok(ran)
}

fn judge(
    sample: &Sample,
    trial: &ValueTrial,
    ins: &[Spec],
    outs: &[Spec],
    by_boxes: bool,
) -> Result<(), Discrepancy> {
    let parts: Vec<Vec<Tensor>> = ins
        .iter()
        .zip(&trial.ins)
        .enumerate()
        .map(|(i, (s, t))| parts_of(t, s, trial.salt + i as u64))
        .collect();
    let operands: Vec<(&Spec, &[Tensor])> = ins.iter().zip(&parts).map(|(s, p)| (s, p.as_slice())).collect();
    let results = eval_apart(sample.op.as_ref(), &operands, outs, by_boxes)
        .map_err(|what| Discrepancy::new(ins, None, what))?;
    for (k, (spec, whole)) in outs.iter().zip(&trial.outs).enumerate() {
        let parts: Vec<Tensor> = results.iter().map(|r| r[k].clone()).collect();
        if let Some(what) = difference(whole, spec, &parts, row_bound(sample, whole, ins)) {
            return Err(Discrepancy::new(ins, Some((k, spec)), what));
        }
    }
    Ok(())
}

/// `bound`; if a row accepts a partial sum, each contribution and their sums are rounded as well. Contributions are at
/// most the value plus a few small integers, times the factor that the operator applies; 16 times the largest covers
/// them.
fn row_bound(sample: &Sample, whole: &Tensor, ins: &[Spec]) -> f64 {
    let parts: usize = ins.iter().map(|s| if s.layout.has_partial() { s.mesh.rank_len() } else { 0 }).sum();
    let largest = magnitude(whole);
    bound(sample, whole) + (16 * parts) as f64 * epsilon(whole.dtype()) * largest
}

/// Returns the judged combinations that hold on one axis, each with the cut of its ragged operands.
///
/// `tries` is given a combination and the number of all combinations, and returns true if it is to be judged.
pub(super) fn truths(
    sample: &Sample,
    trials: &[ValueTrial],
    mesh: &Mesh,
    mut tries: impl FnMut(&Row, usize) -> bool,
) -> Vec<(Row, Option<RaggedCut>)> {
    let mut cuts = vec![None];
    for dims in [1, 2] {
        for blocks in sample.metas().iter().filter_map(|m| flattened(m, dims)) {
            // If one rank stores everything, many combinations hold by chance.
            let cut = RaggedCut { dims, blocks };
            if is_spread(cut, mesh.axis_len(0)) && !cuts.contains(&Some(cut)) {
                cuts.push(Some(cut));
            }
        }
    }
    let mut with =
        |cut| truths_with(sample, mesh, trials, cut, &mut tries).into_iter().map(move |row| (row, cut));
    cuts.into_iter().flat_map(|cut| with(cut).collect::<Vec<_>>()).collect()
}

/// Returns the combinations whose ragged placements, at least one if there is a cut, are cut so.
fn truths_with(
    sample: &Sample,
    mesh: &Mesh,
    trials: &[ValueTrial],
    cut: Option<RaggedCut>,
    tries: &mut impl FnMut(&Row, usize) -> bool,
) -> Vec<Row> {
    let tables: Vec<PlacementTable> = trials.iter().map(|t| PlacementTable::new(t, mesh, cut)).collect();
    let ins =
        combinations(&tables[0].ins.iter().map(|o| o.iter().map(|(s, ..)| *s).collect()).collect::<Vec<_>>());
    let ins: Vec<Vec<AxisPlacement>> = match ins.len() {
        0..4096 => ins,
        _ => ins.into_iter().filter(|placements| is_plain(placements)).collect(),
    };
    let outs =
        combinations(&tables[0].outs.iter().map(|o| o.iter().map(|(s, _)| *s).collect()).collect::<Vec<_>>());
    let (all, mut truths) = (ins.len() * outs.len(), Vec::new());
    for ins in &ins {
        for outs in &outs {
            // Results alone are not ragged: the dispatcher has no ragged placement to give them.
            let ragged = ins.iter().any(|s| s.is_ragged());
            let row = Row::new(ins.iter().copied(), outs.iter().copied());
            if ragged != cut.is_some() || !tries(&row, all) {
                continue;
            }
            let mut alive: Option<Vec<Row>> = None;
            for (table, trial) in tables.iter().zip(trials) {
                let rows = table.holding(sample, trial, ins, outs);
                let left = match alive {
                    None => rows,
                    Some(before) => before.into_iter().filter(|r| rows.contains(r)).collect(),
                };
                let done = left.is_empty();
                alive = Some(left);
                if done {
                    break;
                }
            }
            truths.extend(alive.unwrap_or_default());
        }
    }
    // The row of replicas only holds for every operator.
    truths.retain(|t| {
        t.ins.iter().any(|s| *s != AxisPlacement::R)
            || t.outs.iter().any(|s| matches!(s, AxisPlacement::S(_)) || s.is_ragged())
    });
    truths
}

/// Returns true if there is at most one placement other than `R`.
fn is_plain(placements: &[AxisPlacement]) -> bool {
    let mut cut = placements.iter().filter(|s| **s != AxisPlacement::R);
    let first = cut.next();
    cut.all(|s| Some(s) == first)
}

/// The operands' shards under every placement, each computed once.
struct PlacementTable {
    ins: Vec<Vec<(AxisPlacement, Spec, Vec<Tensor>)>>,
    /// One entry per window that a result can have. A result that is compared as replicated may turn out to be partial.
    outs: Vec<Vec<(AxisPlacement, Spec)>>,
}

impl PlacementTable {
    fn new(trial: &ValueTrial, mesh: &Mesh, cut: Option<RaggedCut>) -> PlacementTable {
        let spec = |t: &Tensor, axis_placement: AxisPlacement| {
            let p = placement(axis_placement, cut, mesh.axis_len(0))?;
            Spec::new(mesh, t.dtype(), t.shape().clone(), Layout::new([p])).ok()
        };
        let placements = |t: &Tensor| {
            let mut placements = vec![AxisPlacement::R];
            placements.extend((0..t.shape().len()).map(AxisPlacement::S));
            placements.extend(cut.map(|_| AxisPlacement::Ragged));
            placements
        };
        let operand = |(i, t): (usize, &Tensor)| {
            let all = placements(t).into_iter().chain(PARTIALS);
            let cut = |s: AxisPlacement| {
                spec(t, s).map(|spec| (s, spec.clone(), parts_of(t, &spec, trial.salt + i as u64)))
            };
            all.filter_map(cut).collect()
        };
        let result = |t: &Tensor| placements(t).into_iter().filter_map(|s| Some((s, spec(t, s)?))).collect();
        PlacementTable {
            ins: trial.ins.iter().enumerate().map(operand).collect(),
            outs: trial.outs.iter().map(result).collect(),
        }
    }

    /// Returns the rows with these placements of operands and these windows of results that hold.
    fn holding(
        &self,
        sample: &Sample,
        trial: &ValueTrial,
        ins: &[AxisPlacement],
        outs: &[AxisPlacement],
    ) -> Vec<Row> {
        let operands: Vec<(&Spec, &[Tensor])> = ins
            .iter()
            .zip(&self.ins)
            .map(|(s, all)| {
                all.iter().find(|(t, ..)| s == t).map(|(_, spec, parts)| (spec, parts.as_slice()))
            })
            .map(|found| found.expect("the placements come from the table"))
            .collect();
        let specs: Vec<Spec> = outs
            .iter()
            .zip(&self.outs)
            .map(|(s, all)| {
                all.iter().find(|(t, _)| s == t).expect("the placements come from the table").1.clone()
            })
            .collect();
        let Ok(results) = eval_apart(sample.op.as_ref(), &operands, &specs, false) else { return Vec::new() };
        let mut choices = Vec::new();
        for (k, (spec, whole)) in specs.iter().zip(&trial.outs).enumerate() {
            let parts: Vec<Tensor> = results.iter().map(|r| r[k].clone()).collect();
            let holds = |axis_placement: AxisPlacement| {
                let spec = match axis_placement {
                    AxisPlacement::P(op) => spec.with_layout(Layout::new([Placement::Partial(op)])).ok(),
                    _ => Some(spec.clone()),
                };
                spec.is_some_and(|spec| difference(whole, &spec, &parts, bound(sample, whole)).is_none())
            };
            let mut placements = vec![outs[k]];
            if outs[k] == AxisPlacement::R {
                placements.extend(PARTIALS);
            }
            placements.retain(|&s| holds(s));
            choices.push(placements);
        }
        combinations(&choices).into_iter().map(|outs| Row::new(ins.iter().copied(), outs)).collect()
    }
}

/// Returns all combinations that take one item from each list.
fn combinations(choices: &[Vec<AxisPlacement>]) -> Vec<Vec<AxisPlacement>> {
    choices.iter().fold(vec![vec![]], |done, placements| {
        done.iter()
            .flat_map(|d| placements.iter().map(move |&s| d.iter().copied().chain([s]).collect()))
            .collect()
    })
}
