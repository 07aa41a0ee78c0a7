//! The sources as text: what is under `src/`, without comments and texts, and without tests.

use std::fs;
use std::path::{Path, PathBuf};

/// A file under `src/`.
pub struct Source {
    pub path: PathBuf,
    /// Without comments and texts; line breaks stay.
    pub code: String,
    pub lines: usize,
}

impl Source {
    /// The part of the house that the file belongs to.
    pub fn module(&self) -> String {
        let parts = self.parts();
        parts.first().map_or_else(String::new, |p| p.trim_end_matches(".rs").to_string())
    }

    /// The module's path inside its part of the house: `attention::grad`, and `attention` of `attention/mod.rs`.
    pub fn module_path(&self) -> String {
        let mut parts = self.parts();
        parts.remove(0);
        let file = parts.pop().expect("a file has a name");
        parts.extend((file != "mod.rs").then(|| file.trim_end_matches(".rs").to_string()));
        parts.join("::")
    }

    /// The operator that a file of `ops` is named after: its own name, or its room's if it is the room's `mod.rs` or
    /// `grad.rs`.
    pub fn operator(&self) -> Option<String> {
        let path = (self.module() == "ops").then(|| self.module_path())?;
        let names: Vec<&str> = path.split("::").collect();
        match names[..] {
            [.., "cpu" | "cuda"] | [_, "cpu" | "cuda", _] => None,
            [room, "grad"] => Some(format!("{room}_grad")),
            [.., name] => Some(name.to_string()),
            [] => None,
        }
    }

    /// The path below `src`.
    pub fn parts(&self) -> Vec<String> {
        let parts = self.path.iter().map(|p| p.to_string_lossy().into_owned());
        parts.skip_while(|p| p != "src").skip(1).collect()
    }

    /// Every name right behind `crate::`, and behind as many `super::` as lead to the crate, with its line.
    pub fn names(&self) -> Vec<(usize, String)> {
        let parts = self.parts();
        // mod.rs stands for its folder; a module `tests` inside a file may go one further up.
        let depth = parts.len() - usize::from(parts.last().is_some_and(|p| p == "mod.rs"));
        let up = "super::".repeat(depth.max(1));
        let code_len = self.code.find("#[cfg(test)]").unwrap_or(self.code.len());
        let mut names = Vec::new();
        for (at, _) in self.code.match_indices("crate::") {
            self.names_at(at + "crate::".len(), &mut names);
        }
        for (at, _) in self.code.match_indices(&up) {
            let inner = code_len <= at;
            let after = at + up.len();
            if !inner && !self.code[..at].ends_with("super::") {
                self.names_at(after, &mut names);
            }
        }
        names
    }

    fn names_at(&self, at: usize, names: &mut Vec<(usize, String)>) {
        let line = self.code[..at].matches('\n').count() + 1;
        let rest = &self.code[at..];
        let Some(group) = rest.strip_prefix('{') else {
            names.push((line, identifier(rest)));
            return;
        };
        let mut depth = 0;
        let mut start = 0;
        for (i, c) in group.char_indices() {
            let ends = depth == 0 && (c == ',' || c == '}');
            if ends && !group[start..i].trim().is_empty() {
                names.push((line, identifier(group[start..i].trim())));
            }
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => return,
                '}' => depth -= 1,
                ',' if depth == 0 => start = i + 1,
                _ => {}
            }
        }
    }
}

pub fn identifier(text: &str) -> String {
    text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

/// The code, without comments, that is compiled when no test is: each item marked `#[cfg(test)]` is blanked, line breaks stay.
pub fn product_code(code: &str) -> String {
    let mut product = String::with_capacity(code.len());
    let mut rest = code;
    while let Some(at) = ["#[cfg(test)]", "#[cfg(all(test,"].iter().filter_map(|mark| rest.find(mark)).min() {
        let (before, item) = rest.split_at(at);
        product.push_str(before);
        let end = item_end(item);
        product.extend(item[..end].chars().filter(|&c| c == '\n'));
        rest = &item[end..];
    }
    product + rest
}

/// The length of the item at the head of `code`, its attributes included: up to its closing brace, or a semicolon.
fn item_end(code: &str) -> usize {
    let mut depth = 0;
    for (i, c) in code.char_indices() {
        match c {
            '{' | '(' | '[' => depth += 1,
            '}' | ')' | ']' => depth -= 1,
            _ => {}
        }
        if depth == 0 && (c == '}' || c == ';') {
            // A macro call in parentheses, `thread_local!(...);`, ends with its semicolon.
            return i + 1;
        }
    }
    code.len()
}

/// `text` with comments, texts and quoted characters blanked; line breaks stay.
pub fn strip(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let starts = |i: usize, what: &str| what.chars().enumerate().all(|(k, c)| chars.get(i + k) == Some(&c));
    let (mut out, mut i) = (String::with_capacity(text.len()), 0);
    while i < chars.len() {
        let end = if starts(i, "//") {
            (i..chars.len()).find(|&k| chars[k] == '\n').unwrap_or(chars.len())
        } else if starts(i, "/*") {
            (i + 2..chars.len()).find(|&k| starts(k, "*/")).map_or(chars.len(), |k| k + 2)
        } else if starts(i, "r\"") || starts(i, "r#\"") {
            let close = if starts(i, "r\"") { "\"" } else { "\"#" };
            (i + 3..chars.len()).find(|&k| starts(k, close)).map_or(chars.len(), |k| k + close.len())
        } else if chars[i] == '"' {
            let mut k = i + 1;
            while k < chars.len() && chars[k] != '"' {
                k += if chars[k] == '\\' { 2 } else { 1 };
            }
            k + 1
        } else if starts(i, "'\\") {
            (i + 3..chars.len()).find(|&k| chars[k] == '\'').map_or(chars.len(), |k| k + 1)
        } else if chars[i] == '\'' && chars.get(i + 2) == Some(&'\'') {
            i + 3
        } else {
            out.push(chars[i]);
            i += 1;
            continue;
        };
        let skipped = &chars[i..end.min(chars.len())];
        out.extend(skipped.iter().filter(|c| **c == '\n'));
        i = end;
    }
    out
}

pub fn sources() -> Vec<Source> {
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path).expect("sources can be read");
        let path = path.strip_prefix(root()).expect("below the root").to_path_buf();
        Source { code: strip(&text), lines: text.lines().count(), path }
    };
    files(&root().join("src")).into_iter().map(read).collect()
}

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All Rust and CUDA files below `dir`, by name.
pub fn files(dir: &Path) -> Vec<PathBuf> {
    let mut entries: Vec<PathBuf> =
        fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path()).collect();
    entries.sort();
    let below = |p: PathBuf| if p.is_dir() { files(&p) } else { vec![p] };
    entries
        .into_iter()
        .flat_map(below)
        .filter(|p| p.extension().is_some_and(|e| e == "rs" || e == "cu" || e == "cuh"))
        .collect()
}
