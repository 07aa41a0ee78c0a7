//! A page of counts, written by every run to `target/tmp/house.md`: patterns of prose, doubled names, examples, programs.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use super::{examples, links, names, prose};

/// The counts of November 22, 2026, before the rewriting began, by this page's own reading.
mod before {
    pub const PATTERNS: [usize; 4] = [578, 441, 244, 377];
    pub const TYPES: usize = 732;
    pub const NAMES: usize = 613;
    pub const DOUBLED: usize = 81;
    /// Groups with their public functions, and those with an example.
    pub const EXAMPLES: [(&str, usize, usize); 11] = [
        ("DTensor", 108, 13),
        ("comm", 118, 2),
        ("comm::spmd", 12, 1),
        ("dtensor", 47, 4),
        ("error", 8, 0),
        ("nn", 68, 0),
        ("ops", 90, 0),
        ("optim", 7, 0),
        ("placement", 70, 5),
        ("rng", 56, 3),
        ("tensor", 225, 1),
    ];
    pub const MODULES: usize = 27;
    pub const MODULES_WITH: usize = 6;
    pub const PROGRAMS: usize = 1;
}

#[test]
fn the_page_of_counts_is_written() {
    let page = page();
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("house.md");
    std::fs::write(&path, &page).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    println!("{page}");
}

fn page() -> String {
    let mut page = String::from("# Counts of words, names and examples\n\n");
    let finds = prose::finds();
    page += "| pattern | before | now | remedy |\n|---|---|---|---|\n";
    for (pattern, before) in prose::PATTERNS.iter().zip(before::PATTERNS) {
        let now = finds.iter().filter(|f| f.pattern == pattern.name).count();
        line(&mut page, format!("| {} | {before} | {now} | {} |", pattern.name, pattern.remedy));
    }

    let types = names::types();
    let doubled = names::doubled(&types);
    page += "\n| types | before | now |\n|---|---|---|\n";
    line(
        &mut page,
        format!("| types | {} | {} |", before::TYPES, types.values().map(Vec::len).sum::<usize>()),
    );
    line(&mut page, format!("| names | {} | {} |", before::NAMES, types.len()));
    line(&mut page, format!("| names used twice or more | {} | {} |", before::DOUBLED, doubled.len()));
    page += "\nNames used twice or more:\n\n";
    for (name, places) in doubled {
        line(&mut page, format!("- `{name}`: {}", places.join(", ")));
    }

    let mut groups: BTreeMap<String, [usize; 2]> = BTreeMap::new();
    for function in examples::functions() {
        let [all, with] = groups.entry(function.group).or_default();
        *all += 1;
        *with += usize::from(function.has_example);
    }
    page +=
        "\n| public functions | before | with an example | now | with an example |\n|---|---|---|---|---|\n";
    for (group, [all, with]) in &groups {
        let before = before::EXAMPLES.iter().find(|(name, ..)| name == group);
        let (_, before, before_with) = before.copied().unwrap_or_default();
        line(&mut page, format!("| `{group}` | {before} | {before_with} | {all} | {with} |"));
    }
    let modules = examples::modules();
    let with = modules.iter().filter(|(_, has)| *has).count();
    let before = (before::MODULES, before::MODULES_WITH);
    line(
        &mut page,
        format!("| pages of modules | {} | {} | {} | {with} |", before.0, before.1, modules.len()),
    );

    let programs = links::programs();
    let sum: usize = programs.iter().map(|(_, count)| count).sum();
    line(&mut page, format!("\nPrograms in README and the book: {} before, {sum} now.\n", before::PROGRAMS));
    for (name, count) in programs {
        line(&mut page, format!("- `{name}`: {count}"));
    }
    page
}

fn line(page: &mut String, line: impl std::fmt::Display) {
    writeln!(page, "{line}").expect("a text takes a line");
}
