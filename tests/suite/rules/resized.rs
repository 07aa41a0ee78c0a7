//! The catalog's samples at other sizes: none, one, fewer than ranks, a prime above their number.

use std::collections::BTreeSet;

use isoshard::ops::{AxisPlacement, Input, InputFill, MeshAxis, Meta, Row, Sample};
use isoshard::tensor::Shape;

use super::summary::{count, end_test};
use super::{holds_everywhere, try_trials};
use crate::common;
use crate::common::rows::line;
use crate::common::samples::{catalog, is_whole};

const EXTENTS: [usize; 4] = [0, 1, 2, 7];

#[test]
fn every_row_holds_at_other_sizes() {
    common::quiet_panics();
    let mut wrong = Vec::new();
    let (mut small, mut all) = (BTreeSet::new(), BTreeSet::new());
    for sample in catalog() {
        let name = sample.op.name();
        all.insert(name);
        if has_small_extent(&sample) {
            small.insert(name);
        }
        for resized in others(&sample) {
            let trials = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| try_trials(&resized, 2)));
            let Ok(trials) = trials else {
                wrong.push(format!("{resized:?} panics on a single rank"));
                continue;
            };
            let Some(trials) = trials else { continue };
            if has_small_extent(&resized) {
                small.insert(name);
            }
            for ranks in [2, 3, 5] {
                let mesh = line(ranks);
                // A partial sum that passes is no matter of sizes, and its rounding is that of the operator's terms, which
                // may be larger than its results.
                let rounds = |row: &Row| row.ins.contains(&AxisPlacement::SUM) && !row.by_bits;
                let rows = resized.op.rows(&resized.metas(), MeshAxis::new(ranks));
                for row in rows.into_iter().filter(|row| !rounds(row)) {
                    count(name, |c| c.resized += 1);
                    let rows = std::slice::from_ref(&row);
                    if let Err(what) = holds_everywhere(&resized, &trials, &mesh, rows, &[0]) {
                        wrong.push(format!("{resized:?} on {ranks} ranks: {row:?} is wrong: {what}"));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} wrong rows:\n{}", wrong.len(), wrong.join("\n"));
    let without: Vec<&&str> = all.difference(&small).collect();
    assert!(!is_whole() || without.is_empty(), "no sample has an extent of 0 or 1: {without:?}");
    end_test();
}

fn has_small_extent(sample: &Sample) -> bool {
    sample.ins.iter().any(|i| i.meta.shape.is_empty() || i.meta.shape.iter().any(|&n| n < 2))
}

/// Returns the sample with all dims of one extent changed to another, if the operator takes the shapes.
fn others(sample: &Sample) -> Vec<Sample> {
    let extents: BTreeSet<usize> = sample.ins.iter().flat_map(|i| i.meta.shape.iter().copied()).collect();
    let mut found = Vec::new();
    for from in extents.into_iter().filter(|&n| n > 1) {
        for to in EXTENTS.into_iter().filter(|&n| n != from) {
            let input = |i: &Input| {
                let extents: Vec<usize> =
                    i.meta.shape.iter().map(|&n| if n == from { to } else { n }).collect();
                let fill = match i.fill {
                    InputFill::Index(below) if below == from && to > 0 => InputFill::Index(to),
                    fill => fill,
                };
                Input { meta: Meta::new(i.meta.dtype, Shape::from(extents)), fill }
            };
            let resized = Sample { ins: sample.ins.iter().map(input).collect(), ..sample.clone() };
            // Tokens share no slot, which more tokens than slots would.
            let crowded = sample.op.name() == "permute_tokens" && to > from;
            if !crowded && resized.op.infer(&resized.metas()).is_ok() {
                found.push(resized);
            }
        }
    }
    found
}
