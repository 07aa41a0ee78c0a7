//! The table of `unsafe` code in CONTRIBUTING.md has a row for each folder that has some, with the counts of the sources.
//! After a
//! change to a folder its row is read again.

use std::collections::BTreeMap;
use std::fs;

use super::source::{kernel_sources, product_code, root, sources};

/// The counts of a folder: blocks, functions, and traits with their implementations.
type Counts = [usize; 3];

#[test]
fn the_table_counts_what_the_sources_have() {
    let mut found: BTreeMap<String, Counts> = BTreeMap::new();
    for source in sources().into_iter().chain(kernel_sources()) {
        let folder = source.path.parent().expect("a file stands in a folder").display().to_string();
        let counts = found.entry(folder).or_default();
        for (all, more) in counts.iter_mut().zip(counts_of(&product_code(&source.code))) {
            *all += more;
        }
    }
    found.retain(|_, counts| counts.iter().any(|&n| n > 0));
    let text = fs::read_to_string(root().join("CONTRIBUTING.md")).expect("the page is there");
    let listed: BTreeMap<String, Counts> = text.lines().filter_map(row).collect();
    let missing: Vec<String> = found
        .iter()
        .filter(|(folder, counts)| listed.get(*folder) != Some(*counts))
        .map(|(folder, [blocks, functions, traits])| {
            format!("{folder}: {blocks} blocks, {functions} functions, {traits} traits and impls")
        })
        .collect();
    let gone: Vec<&String> = listed.keys().filter(|folder| !found.contains_key(*folder)).collect();
    assert!(
        missing.is_empty() && gone.is_empty(),
        "the table of unsafe code in CONTRIBUTING.md lacks:\n{}\nand these are gone: {gone:?}",
        missing.join("\n")
    );
}

/// Reads a row such as ``| `src/tensor` | 17 | 1 | 7 | ... |``.
fn row(line: &str) -> Option<(String, Counts)> {
    let mut cells = line.strip_prefix("| `")?.split('|').map(str::trim);
    let folder = cells.next()?.strip_suffix('`').filter(|folder| folder.contains("src"))?.to_string();
    let mut count = || cells.next()?.parse().ok();
    Some((folder, [count()?, count()?, count()?]))
}

fn counts_of(code: &str) -> Counts {
    let mut counts = [0; 3];
    for (at, word) in code.match_indices("unsafe") {
        let before = code[..at].chars().next_back();
        let after = code[at + word.len()..].trim_start();
        let is_word = !before.is_some_and(|c| c.is_alphanumeric() || c == '_') && !after.starts_with('_');
        let kind = match after {
            _ if !is_word => continue,
            _ if after.starts_with('{') => 0,
            // A function's name follows; in a type the arguments do.
            _ if after.starts_with("fn ") => 1,
            _ if after.starts_with("impl") || after.starts_with("trait") => 2,
            // Declarations of functions of other languages, and types of functions.
            _ => continue,
        };
        counts[kind] += 1;
    }
    counts
}

/// A filter that finds no test would run nothing, and say "ok". Continuous integration does not run the script.
#[test]
fn the_sanitizers_filters_name_modules() {
    let script = fs::read_to_string(root().join("tests/sanitize.sh")).expect("the script is there");
    let contributing = fs::read_to_string(root().join("CONTRIBUTING.md")).expect("the page is there");
    assert!(contributing.contains("tests/sanitize.sh"), "CONTRIBUTING.md says what the script has found");
    let code = script.lines().filter(|line| !line.starts_with('#'));
    let filters: Vec<&str> =
        code.flat_map(str::split_whitespace).filter(|word| word.contains("::")).collect();
    let is_module = |filter: &&str| {
        ["src", "kernels/src"].iter().any(|folder| {
            let path = root().join(folder).join(filter.trim_end_matches("::").replace("::", "/"));
            path.is_dir() || path.with_extension("rs").is_file()
        })
    };
    let gone: Vec<&&str> = filters.iter().filter(|filter| !is_module(filter)).collect();
    assert!(filters.len() > 20 && gone.is_empty(), "tests/sanitize.sh names no modules by {gone:?}");
}

#[test]
fn blocks_functions_and_impls_are_told_apart() {
    let code = "unsafe { f() } unsafe impl<T> A for T {} pub unsafe trait A { unsafe fn f(); }\n\
        type F = unsafe fn(u8); unsafe extern \"C\" { fn g(); } let unsafe_code = 1; #![deny(unsafe_op_in_unsafe_fn)]";
    assert_eq!(counts_of(code), [1, 1, 2]);
    assert_eq!(row("| `src/a/b` | 1 | 2 | 3 | why |"), Some(("src/a/b".into(), [1, 2, 3])));
    assert_eq!(row("| a | b |"), None);
}
