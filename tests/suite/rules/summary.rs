//! Counts of what the judge compares, and the page that shows them: `docs/judge.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::common::samples::is_whole;

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

/// The tests that count.
const TESTS: usize = 4;
/// The number of them that ended without a wrong or an unlisted row.
static PASSED: AtomicUsize = AtomicUsize::new(0);

/// Ends a test that found nothing wrong. The last one compares `docs/judge.md` with the counts, or writes it if
/// `ISOSHARD_BLESS` is set; if a part of the operators or of the tests runs, the page is not compared.
pub fn end_test() {
    let all = PASSED.fetch_add(1, Ordering::SeqCst) + 1 == TESTS;
    if !all || !is_whole() || super::is_complete() {
        return;
    }
    let page = page();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/judge.md");
    if std::env::var_os("ISOSHARD_BLESS").is_some() {
        std::fs::write(path, &page).expect("the page can be written");
    }
    let kept = std::fs::read_to_string(path).unwrap_or_default();
    let differs = kept.lines().zip(page.lines()).find(|(a, b)| a != b);
    assert!(
        kept == page,
        "docs/judge.md is out of date: ISOSHARD_BLESS=1 cargo test --test suite rules:: writes it; the first line that \
        differs: {differs:?}"
    );
}

fn page() -> String {
    let counts = COUNTS.lock().unwrap_or_else(PoisonError::into_inner);
    let sum = |of: fn(&JudgedCount) -> usize| counts.values().map(of).sum::<usize>();
    let mut page = format!(
        "# What the judge compared\n\n\
        *Written by `tests/suite/rules/summary.rs` after the tests of `rules::` passed: `ISOSHARD_BLESS=1 cargo test --test \
        suite rules::` writes it.*\n\n\
        The judge runs an operator on the shards that a combination of placements gives to 2, 3 and 5 ranks, and compares \
        the results with a single rank's, with three to five sets of values in f32 and f64. A *row* is a combination that \
        the operator lists as right.\n\n\
        | | |\n|---|---|\n\
        | operators | {} |\n\
        | samples (calls with attributes and shapes) | {} |\n\
        | listed rows on one axis | {} |\n\
        | listed rows at extents of 0, 1, 2 and 7 | {} |\n\
        | pairs of rows on two axes, in both orders | {} |\n\
        | combinations that were tried to find rows that are true but not listed | {} |\n\
        | **wrong** | **0** |\n\
        | true, but left out for a reason | {} |\n\n\
        If an operator has more than three operands, the combinations are a selection; `tests/complete.sh` tries all.\n\n\
        ## Rows that are true but left out\n\n\
        `tests/golden/missing_rows.txt` lists them one by one; a row that is in neither list fails a test.\n\n\
        | reason | rows | operators |\n|---|---|---|\n",
        counts.len(),
        sum(|c| c.samples),
        sum(|c| c.rows),
        sum(|c| c.resized),
        sum(|c| c.pairs),
        sum(|c| c.combinations),
        sum(|c| c.missing)
    );
    let mut reasons: BTreeMap<&str, (usize, BTreeSet<&str>)> = BTreeMap::new();
    for line in include_str!("../../golden/missing_rows.txt").lines().filter(|l| !l.starts_with('#')) {
        let Some((key, reason)) = line.split_once(" # ") else { continue };
        let (rows, operators) = reasons.entry(reason).or_default();
        *rows += 1;
        operators.extend(key.split(':').next());
    }
    for (reason, (rows, operators)) in &reasons {
        let names: Vec<&str> = operators.iter().copied().collect();
        let _ = writeln!(page, "| {reason} | {rows} | `{}` |", names.join("`, `"));
    }
    page.push_str(
        "\n## Operators\n\n\
        | operator | samples | rows | at other sizes | pairs | combinations | left out |\n|---|---|---|---|---|---|---|\n",
    );
    for (operator, c) in counts.iter() {
        let JudgedCount { samples, rows, resized, pairs, combinations, missing } = c;
        let _ = writeln!(
            page,
            "| `{operator}` | {samples} | {rows} | {resized} | {pairs} | {combinations} | {missing} |"
        );
    }
    page
}
