//! The judge: runs every operator under every combination of placements, on small, odd, uneven shapes, and compares
//! with a single rank.
//!
//! A listed row that does not hold is *wrong*: the test fails and names it. A combination that holds and is not listed
//! is *missing*: it must be in `golden/missing_rows.txt` with a reason. Ranks are simulated and exchange nothing,
//! because a row claims that no communication is needed.
//!
//! A combination holds if it holds for each of three sets of values, in f32 and in f64, on all ranks, bit for bit (or
//! within `common::bound`, for samples that state that their sums are rounded). Rows with partial sums may differ by
//! one rounding of each contribution, the only tolerance here (`row_bound`). If an element of the result is infinite,
//! contributions to its sum may add up to NaN (`inf - inf`); that is not counted as a difference.
//!
//! To keep the golden list short, a combination is not called missing
//! - if an operand or result of the sample has an extent of 0 or 1, or one element, because shards are then the same as
//!   replicas;
//! - if a listed row gives it by putting `R` for an operand's `P(max)` or `P(min)`, as a special case of it, or
//!   `P(max)` or `P(min)` for a result's `R`, which is a case of them;
//! - if the operands have more than 4096 combinations of placements, and it uses two different placements besides `R`;
//! - if it is ragged and holds for one dim only, because `Ragged` is then equivalent to `S0`, to which the engine
//!   moves.
//!
//! Operators of more than three operands have most of the combinations. The test judges a fixed selection of their
//! unlisted combinations, and those in the golden file; `tests/complete.sh` judges all. Every listed row is always
//! judged.

mod resized;
mod summary;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;

use isoshard::ops::{AxisPlacement, MeshAxis, Meta, Row, Sample, eval_whole};
use isoshard::placement::{Layout, Mesh, Placement, Spec};
use isoshard::tensor::{DType, ReduceOp, Tensor};

use crate::common::rows::{is_ragged, line, placement, specs};
use crate::common::samples::{catalog, is_selected};
use crate::common::{self, Stream, bound, difference, eval_apart, mix, parts_of, values};
use summary::{count, end_test};

const PARTIALS: [AxisPlacement; 3] =
    [AxisPlacement::P(ReduceOp::Sum), AxisPlacement::P(ReduceOp::Max), AxisPlacement::P(ReduceOp::Min)];

/// The number of operands above which only a selection of the combinations is judged.
const OPERANDS: usize = 3;
/// The approximate number of combinations in the selection, per mesh.
const SAMPLED: u64 = 1000;

#[test]
fn every_row_holds_on_one_axis() {
    common::quiet_panics();
    let mut wrong = Vec::new();
    for sample in catalog() {
        let trials = trials(&sample);
        count(sample.op.name(), |c| c.samples += 1);
        for ranks in [2, 3, 5] {
            let rows = sample.op.rows(&sample.metas(), MeshAxis::new(ranks));
            let mesh = line(ranks);
            for row in rows {
                count(sample.op.name(), |c| c.rows += 1);
                if let Err(what) = holds_everywhere(&sample, &trials, &mesh, std::slice::from_ref(&row), &[0])
                {
                    wrong.push(format!("{sample:?} on {ranks} ranks: {row:?} is wrong: {what}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} wrong rows:\n{}", wrong.len(), wrong.join("\n"));
    end_test();
}

#[test]
fn products_of_rows_hold_on_two_axes() {
    common::quiet_panics();
    let mut wrong = Vec::new();
    let mut stream = Stream(11);
    let mut judged = 0;
    for sample in catalog() {
        let trials = trials(&sample);
        for lens in [[2, 2], [2, 3], [3, 2]] {
            let mesh = Mesh::new(&[("a", lens[0]), ("b", lens[1])], 0).unwrap();
            let metas = sample.metas();
            let whole = Row::new(
                metas.iter().map(|_| AxisPlacement::R),
                sample.op.infer(&metas).unwrap().iter().map(|_| AxisPlacement::R),
            );
            let rows = |a: usize, other: Option<AxisPlacement>| {
                let axis = match other {
                    Some(AxisPlacement::S(dim)) => MeshAxis::new(lens[a]).with_split(dim, lens[1 - a]),
                    _ => MeshAxis::new(lens[a]),
                };
                let mut rows = sample.op.rows(&metas, axis);
                rows.push(whole.clone());
                rows
            };
            for _ in 0..12 {
                let a = stream.pick(&rows(0, None)).clone();
                let b = stream.pick(&rows(1, a.ins.first().copied())).clone();
                if !rows(0, b.ins.first().copied()).contains(&a) {
                    continue;
                }
                let pair = [a, b];
                for order in [[0, 1], [1, 0]] {
                    judged += 1;
                    count(sample.op.name(), |c| c.pairs += 1);
                    if let Err(what) = holds_everywhere(&sample, &trials[..2], &mesh, &pair, &order) {
                        wrong.push(format!(
                            "{sample:?} on {mesh} in order {order:?}: {pair:?} is wrong: {what}"
                        ));
                    }
                }
            }
        }
    }
    wrong.sort();
    wrong.dedup();
    assert!(judged > 0 && wrong.is_empty(), "{} wrong products:\n{}", wrong.len(), wrong.join("\n"));
    end_test();
}

#[test]
fn missing_rows_are_listed_with_a_reason() {
    common::quiet_panics();
    let golden = include_str!("../golden/missing_rows.txt");
    let listed_windows = windows(golden);
    if !is_complete() {
        // Written directly to stderr, because the harness captures the output of tests that pass.
        let _ = writeln!(
            std::io::stderr(),
            "SAMPLED: unlisted rows of operators with more than {OPERANDS} operands; tests/complete.sh judges all"
        );
    }
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for sample in catalog().iter().filter(|s| !is_degenerate(s)) {
        for ranks in [2, 3, 5] {
            let rows = sample.op.rows(&sample.metas(), MeshAxis::new(ranks));
            let truths = truths(sample, ranks, &listed_windows);
            for truth in truths.into_iter().filter(|t| !rows.iter().any(|r| implies(r, t))) {
                let key = format!("{}: {truth:?}", sample.op.name());
                found.entry(key).or_default().insert(format!("{sample:?} on {ranks}"));
            }
        }
    }
    let mut listed = BTreeSet::new();
    let mut diff = Vec::new();
    let of_selected = |l: &&str| is_selected(l.split(':').next().unwrap_or_default());
    for line in golden.lines().filter(|l| !l.is_empty() && !l.starts_with('#')).filter(of_selected) {
        let (key, reason) = line.split_once(" # ").unwrap_or((line, ""));
        if reason.trim().is_empty() {
            diff.push(format!("without a reason: {line}"));
        }
        if !found.contains_key(key.trim()) {
            diff.push(format!("- {line}"));
        }
        listed.insert(key.trim().to_string());
        count(line.split(':').next().unwrap_or_default(), |c| c.missing += 1);
    }
    for (key, samples) in found.iter().filter(|(k, _)| !listed.contains(*k)) {
        let samples: Vec<&String> = samples.iter().collect();
        diff.push(format!("+ {key} # ({} samples, first {})", samples.len(), samples[0]));
    }
    assert!(diff.is_empty(), "golden/missing_rows.txt differs:\n{}", diff.join("\n"));
    end_test();
}

/// Returns true under `tests/complete.sh`.
fn is_complete() -> bool {
    std::env::var_os("ISOSHARD_TEST_COMPLETE").is_some()
}

/// Returns the listed rows in the form in which they are judged: a partial result is first compared as a whole one.
fn windows(golden: &str) -> BTreeSet<String> {
    let of = |line: &str| {
        let (op, row) = line.split_once(" # ")?.0.split_once(": ")?;
        let (ins, outs) = row.trim().split_once(" -> ")?;
        let outs: Vec<&str> = outs
            .split(' ')
            .map(|axis_placement| if axis_placement.starts_with("P(") { "R" } else { axis_placement })
            .collect();
        Some(format!("{op}: {ins} -> {}", outs.join(" ")))
    };
    golden.lines().filter(|l| !l.starts_with('#')).filter_map(of).collect()
}

/// Returns true if this combination of `all` on `ranks` ranks is judged: in a complete run, if there are few operands,
/// if the combination is listed, or if a fixed hash selects it.
fn is_judged(sample: &Sample, row: &Row, ranks: usize, all: usize, listed: &BTreeSet<String>) -> bool {
    if sample.ins.len() <= OPERANDS || is_complete() {
        return true;
    }
    let name = format!("{}: {row:?}", sample.op.name());
    let draw = name.bytes().fold(ranks as u64, |seed, byte| mix(seed ^ u64::from(byte)));
    // A hash that is selected among many combinations is selected among few, so that two ragged placements are judged
    // alike.
    draw / SAMPLED < u64::MAX / all as u64 || listed.contains(&name)
}

fn is_degenerate(sample: &Sample) -> bool {
    let metas = sample.metas();
    let outs = sample.op.infer(&metas).unwrap();
    metas.iter().chain(&outs).any(|m| m.shape.is_empty() || m.shape.iter().any(|&n| n < 2))
}

/// Returns true if `row` gives `truth` by the exemptions at the head of this file.
fn implies(row: &Row, truth: &Row) -> bool {
    let extremum = |s: &AxisPlacement| matches!(s, AxisPlacement::P(ReduceOp::Max | ReduceOp::Min));
    let plain = |s: &AxisPlacement| if let AxisPlacement::TreeSum(_) = s { AxisPlacement::SUM } else { *s };
    let ins = row.ins.iter().zip(&truth.ins).all(|(r, t)| r == t || (*t == AxisPlacement::R && extremum(r)));
    let outs = row
        .outs
        .iter()
        .zip(&truth.outs)
        .all(|(r, t)| plain(r) == *t || (*r == AxisPlacement::R && extremum(t)));
    ins && outs
}

/// The values with which a combination is judged, and a single rank's results.
struct Trial {
    ins: Vec<Tensor>,
    outs: Vec<Tensor>,
    salt: u64,
}

fn trials(sample: &Sample) -> Vec<Trial> {
    try_trials(sample, 5).unwrap_or_else(|| panic!("{sample:?} cannot be evaluated"))
}

/// Returns the first `n` trials, or `None` if the operator refuses the values, such as an index that is too large.
fn try_trials(sample: &Sample, n: usize) -> Option<Vec<Trial>> {
    let one = |(salt, dtype): (u64, DType)| {
        let ins = values(sample, dtype, salt);
        let outs = eval_whole(sample.op.as_ref(), &ins).ok()?.into_vec();
        Some(Trial { ins, outs, salt })
    };
    let all = [(1, DType::F32), (2, DType::F64), (3, DType::F32), (4, DType::F64), (5, DType::F32)];
    all.into_iter().take(n).map(one).collect()
}

/// Judges one row per axis together, for every ragged placement that fits. Combinations that no tensor can have, such
/// as a partial of bools, count as holding.
fn holds_everywhere(
    sample: &Sample,
    trials: &[Trial],
    mesh: &Mesh,
    rows: &[Row],
    order: &[usize],
) -> Result<(), String> {
    for dims in if is_ragged(rows) { 1..4 } else { 0..1 } {
        for trial in trials {
            let metas = |ts: &[Tensor]| ts.iter().map(Meta::of).collect::<Vec<_>>();
            let first = (trial.ins[0].shape(), dims);
            let ins = specs(mesh, (rows, order), &metas(&trial.ins), first, |r| &r.ins);
            let outs = specs(mesh, (rows, order), &metas(&trial.outs), first, |r| &r.outs);
            let (Some(ins), Some(outs)) = (ins, outs) else { continue };
            judge(sample, trial, &ins, &outs)?;
        }
    }
    Ok(())
}

fn judge(sample: &Sample, trial: &Trial, ins: &[Spec], outs: &[Spec]) -> Result<(), String> {
    let parts: Vec<Vec<Tensor>> = ins
        .iter()
        .zip(&trial.ins)
        .enumerate()
        .map(|(i, (s, t))| parts_of(t, s, trial.salt + i as u64))
        .collect();
    let operands: Vec<(&Spec, &[Tensor])> = ins.iter().zip(&parts).map(|(s, p)| (s, p.as_slice())).collect();
    let results = eval_apart(sample.op.as_ref(), &operands, outs)?;
    for (k, (spec, whole)) in outs.iter().zip(&trial.outs).enumerate() {
        let parts: Vec<Tensor> = results.iter().map(|r| r[k].clone()).collect();
        if let Some(what) = difference(whole, spec, &parts, row_bound(sample, whole, ins)) {
            return Err(format!("result {k} {spec}: {what}"));
        }
    }
    Ok(())
}

/// `bound`; if a row accepts a partial sum, each contribution and their sums are rounded as well. Contributions are at
/// most the value plus a few small integers, times the factor that the operator applies; 16 times the largest covers
/// them.
fn row_bound(sample: &Sample, whole: &Tensor, ins: &[Spec]) -> f64 {
    let parts: usize = ins.iter().map(|s| if s.layout.has_partial() { s.mesh.rank_len() } else { 0 }).sum();
    let largest = common::magnitude(whole);
    bound(sample, whole) + (16 * parts) as f64 * common::epsilon(whole.dtype()) * largest
}

/// Returns the judged combinations that hold on one axis.
fn truths(sample: &Sample, ranks: usize, listed: &BTreeSet<String>) -> Vec<Row> {
    let mesh = line(ranks);
    let trials = trials(sample);
    let with = |dims: usize| truths_with(sample, &mesh, &trials, dims, listed);
    let (mut truths, two) = (with(0), with(2));
    if !two.is_empty() {
        let one = with(1);
        truths.extend(two.into_iter().filter(|t| one.contains(t)));
    }
    truths
}

/// Returns the combinations whose ragged placements, at least one if `dims` is not 0, cover `dims` dims.
fn truths_with(
    sample: &Sample,
    mesh: &Mesh,
    trials: &[Trial],
    dims: usize,
    listed: &BTreeSet<String>,
) -> Vec<Row> {
    let tables: Vec<Table> = trials.iter().map(|t| Table::new(t, mesh, dims)).collect();
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
            let ragged = ins.iter().chain(outs).any(|s| *s == AxisPlacement::Ragged);
            let row = Row::new(ins.iter().copied(), outs.iter().copied());
            if ragged != (dims > 0) || !is_judged(sample, &row, mesh.rank_len(), all, listed) {
                continue;
            }
            count(sample.op.name(), |c| c.combinations += 1);
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
            || t.outs.iter().any(|s| matches!(s, AxisPlacement::S(_) | AxisPlacement::Ragged))
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
struct Table {
    ins: Vec<Vec<(AxisPlacement, Spec, Vec<Tensor>)>>,
    /// One entry per window that a result can have. A result that is compared as replicated may turn out to be partial.
    outs: Vec<Vec<(AxisPlacement, Spec)>>,
}

impl Table {
    fn new(trial: &Trial, mesh: &Mesh, dims: usize) -> Table {
        let first = trial.ins[0].shape();
        let spec = |t: &Tensor, axis_placement: AxisPlacement| {
            let p = placement(axis_placement, first, dims, mesh.axis_len(0))?;
            Spec::new(mesh, t.dtype(), t.shape().clone(), Layout::new([p])).ok()
        };
        let placements = |t: &Tensor| {
            let mut placements = vec![AxisPlacement::R];
            placements.extend((0..t.shape().len()).map(AxisPlacement::S));
            placements.extend((dims > 0).then_some(AxisPlacement::Ragged));
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
        Table {
            ins: trial.ins.iter().enumerate().map(operand).collect(),
            outs: trial.outs.iter().map(result).collect(),
        }
    }

    /// Returns the rows with these placements of operands and these windows of results that hold.
    fn holding(
        &self,
        sample: &Sample,
        trial: &Trial,
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
        let Ok(results) = eval_apart(sample.op.as_ref(), &operands, &specs) else { return Vec::new() };
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
