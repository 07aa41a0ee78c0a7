//! Counts of what the judge compares, and the page that shows them: `target/tmp/judge.md`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Mutex, PoisonError};

/// Counts of one operator.
#[derive(Clone, Copy, Default)]
pub struct JudgedCount {
    /// Samples of the catalog.
    pub samples: usize,
    /// Listed rows, on one axis of 2, 3 and 5 ranks.
    pub rows: usize,
    /// Listed rows at other sizes.
    pub resized: usize,
    /// Pairs of rows on two axes, in both orders.
    pub pairs: usize,
    /// Combinations of placements that were tried to find missing rows.
    pub combinations: usize,
    /// Missing rows that are listed with a reason.
    pub missing: usize,
}

static COUNTS: Mutex<BTreeMap<String, JudgedCount>> = Mutex::new(BTreeMap::new());

/// Adds to an operator's counts.
pub fn count(operator: &str, add: impl FnOnce(&mut JudgedCount)) {
    add(COUNTS.lock().unwrap_or_else(PoisonError::into_inner).entry(operator.to_string()).or_default());
}

/// Writes the page from what the judge's tests of this process counted so far; the last of them writes all.
pub fn write_page() {
    let counts = COUNTS.lock().unwrap_or_else(PoisonError::into_inner);
    let sum = |of: fn(&JudgedCount) -> usize| counts.values().map(of).sum::<usize>();
    let mut page = format!(
        "# Judged\n\nEach combination is compared with a single rank, with three to five sets of values in f32 and f64.\n\n\
        {} operators, {} samples; {} rows on one axis, {} at other sizes, {} pairs on two axes; {} combinations in search \
        of missing rows. A wrong row fails its test. Missing: {}, each with a reason in tests/golden/missing_rows.txt.\n\n\
        | operator | samples | rows | at other sizes | pairs | combinations | missing |\n|---|---|---|---|---|---|---|\n",
        counts.len(),
        sum(|c| c.samples),
        sum(|c| c.rows),
        sum(|c| c.resized),
        sum(|c| c.pairs),
        sum(|c| c.combinations),
        sum(|c| c.missing)
    );
    for (operator, c) in counts.iter() {
        let JudgedCount { samples, rows, resized, pairs, combinations, missing } = c;
        let _ = writeln!(
            page,
            "| {operator} | {samples} | {rows} | {resized} | {pairs} | {combinations} | {missing} |"
        );
    }
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("judge.md");
    std::fs::write(&path, page).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
}
