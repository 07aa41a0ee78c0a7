//! The judge of the library's operators: every row of every sample in the catalog holds, and every row that is true and
//! not listed is in `golden/missing_rows.txt` with a reason. `isoshard::testing::judge` says what is compared.
//!
//! Operators of more than three operands have most of the combinations. The test judges a fixed selection of their
//! unlisted combinations, and those in the golden file; `tests/complete.sh` judges all. Every listed row is always
//! judged.

mod summary;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;

use isoshard::ops::Sample;
use isoshard::testing::{Judge, Verdict, WrongRow};

use crate::common::samples::{catalog, is_selected, is_whole};
use summary::{count, end_test};

/// The number of operands above which only a selection of the combinations is judged.
const OPERANDS: usize = 3;

#[test]
fn every_row_holds_on_one_axis() {
    every_sample(Judge::one_axis, |sample, verdict| {
        count(sample.op.name(), |c| {
            c.samples += 1;
            c.rows += verdict.rows;
        })
    });
}

#[test]
fn products_of_rows_hold_on_two_axes() {
    every_sample(Judge::two_axes, |sample, verdict| count(sample.op.name(), |c| c.pairs += verdict.pairs));
}

#[test]
fn every_row_holds_at_other_sizes() {
    let small = RefCell::new(BTreeSet::new());
    every_sample(Judge::other_sizes, |sample, verdict| {
        if verdict.small > 0 || has_small_extent(sample) {
            small.borrow_mut().insert(sample.op.name());
        }
        count(sample.op.name(), |c| c.resized += verdict.resized);
    });
    let all: BTreeSet<_> = catalog().iter().map(|s| s.op.name()).collect();
    let without: Vec<_> = all.difference(&small.borrow()).copied().collect();
    assert!(!is_whole() || without.is_empty(), "no sample has an extent of 0 or 1: {without:?}");
}

/// Asks the judge about every sample of the catalog.
fn every_sample(ask: impl Fn(&Judge) -> Verdict, see: impl Fn(&Sample, &Verdict)) {
    let mut wrong: Vec<WrongRow> = Vec::new();
    for sample in catalog() {
        let verdict = ask(&Judge::new(&sample));
        see(&sample, &verdict);
        wrong.extend(verdict.wrong);
    }
    let texts: Vec<String> = wrong.iter().map(WrongRow::to_string).collect();
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), texts.join("\n"));
    end_test();
}

fn has_small_extent(sample: &Sample) -> bool {
    sample.ins.iter().any(|i| i.meta.shape.is_empty() || i.meta.shape.iter().any(|&n| n < 2))
}

#[test]
fn missing_rows_are_listed_with_a_reason() {
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
    for sample in catalog() {
        let name = sample.op.name();
        let always = listed_windows.get(name).cloned().unwrap_or_default();
        let verdict = Judge::new(&sample).complete(is_complete()).always(always).missing();
        count(name, |c| c.combinations += verdict.combinations);
        for (row, call) in verdict.missing {
            found.entry(format!("{name}: {row:?}")).or_default().insert(call);
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
fn windows(golden: &str) -> BTreeMap<&str, BTreeSet<String>> {
    fn of(line: &str) -> Option<(&str, String)> {
        let (op, row) = line.split_once(" # ")?.0.split_once(": ")?;
        let (ins, outs) = row.trim().split_once(" -> ")?;
        let outs: Vec<&str> = outs
            .split(' ')
            .map(|axis_placement| if axis_placement.starts_with("P(") { "R" } else { axis_placement })
            .collect();
        Some((op, format!("{ins} -> {}", outs.join(" "))))
    }
    let mut windows: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for (op, row) in golden.lines().filter(|l| !l.starts_with('#')).filter_map(of) {
        windows.entry(op).or_default().insert(row);
    }
    windows
}
