//! `docs/scale.md`, which several tests write: each has a part, from its heading on.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

const PAGE: &str = "docs/scale.md";
/// The headings with which the parts after the first begin.
const HEADINGS: [&str; 2] = ["\n## Under `fully_shard`\n", "\n## Communication behind computation\n"];

static WRITING: Mutex<()> = Mutex::new(());

/// Returns true if tests are to write their parts.
pub fn blesses() -> bool {
    std::env::var_os("ISOSHARD_BLESS").is_some()
}

/// Compares a part of the page with `text`, or writes it.
pub fn check(part: usize, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(PAGE);
    let _guard = WRITING.lock().unwrap_or_else(PoisonError::into_inner);
    let page = std::fs::read_to_string(&path).expect("docs/scale.md is there");
    // A part that is missing is empty.
    let second = page.find(HEADINGS[1]).unwrap_or(page.len());
    let first = page.find(HEADINGS[0]).unwrap_or(second);
    let ends = [0, first, second, page.len()];
    let mut parts: Vec<&str> = ends.windows(2).map(|ends| &page[ends[0]..ends[1]]).collect();
    if blesses() {
        parts[part] = text;
        std::fs::write(&path, parts.concat()).expect("the page can be written");
        return;
    }
    if parts[part].is_empty() {
        return println!("{PAGE} lacks this part: write it with ISOSHARD_BLESS=1\n{text}");
    }
    let differs = parts[part].lines().zip(text.lines()).find(|(a, b)| a != b);
    assert!(parts[part] == text, "run with ISOSHARD_BLESS=1; the first line that differs: {differs:?}");
}
