//! Source files as text: with and without comments, string literals and tests.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A file under `src/`.
pub struct Source {
    /// Relative to the repository's root.
    pub path: PathBuf,
    pub text: String,
    /// The text without comments and string literals; line breaks stay.
    pub code: String,
    pub lines: usize,
}

impl Source {
    pub fn new(path: impl Into<PathBuf>, text: impl Into<String>) -> Source {
        let text = text.into();
        Source { path: path.into(), code: strip(&text), lines: text.lines().count(), text }
    }

    /// The room that the file belongs to: a folder or file right below `src`.
    pub fn module(&self) -> String {
        let parts = self.parts();
        parts.first().map_or_else(String::new, |p| p.trim_end_matches(".rs").to_string())
    }

    /// The module's path inside its room: `attention::grad`, and `attention` for `attention/mod.rs`.
    pub fn module_path(&self) -> String {
        let mut parts = self.parts();
        parts.remove(0);
        let file = parts.pop().expect("a file has a name");
        parts.extend((file != "mod.rs").then(|| file.trim_end_matches(".rs").to_string()));
        parts.join("::")
    }

    /// The operator that a file of `ops` is named after: the file's name, or its folder's for `mod.rs` and `grad.rs`.
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

    /// Every name that follows `crate::`, or as many `super::` as lead to the crate's root, with its line.
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

/// `code` with each item marked `#[cfg(test)]` blanked; line breaks stay.
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

/// The length of the first item of `code` with its attributes: up to its closing brace or semicolon.
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

/// `text` with comments, string literals and quoted characters blanked; line breaks stay.
pub fn strip(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for (part, range) in parts(text) {
        match part {
            Part::Code => out.push_str(&text[range]),
            Part::Comment | Part::Literal => out.extend(text[range].chars().filter(|&c| c == '\n')),
        }
    }
    out
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    Code,
    /// Up to the end of its line, without the line break.
    Comment,
    /// A string or a character.
    Literal,
}

/// `text` cut into code, comments and literals, in order.
pub fn parts(text: &str) -> Vec<(Part, Range<usize>)> {
    let (mut found, mut code, mut i) = (Vec::new(), 0, 0);
    let char_len = |i: usize| text[i..].chars().next().map_or(1, char::len_utf8);
    while i < text.len() {
        let rest = &text[i..];
        let up_to = |from: usize, close: &str| rest[from..].find(close).map(|k| i + from + k + close.len());
        let (part, end) = if rest.starts_with("//") {
            (Part::Comment, rest.find('\n').map(|k| i + k))
        } else if rest.starts_with("/*") {
            (Part::Comment, up_to(2, "*/"))
        } else if rest.starts_with("r\"") {
            (Part::Literal, up_to(2, "\""))
        } else if rest.starts_with("r#\"") {
            (Part::Literal, up_to(3, "\"#"))
        } else if rest.starts_with('"') {
            let mut k = i + 1;
            while k < text.len() && !text[k..].starts_with('"') {
                k += if text[k..].starts_with('\\') { 1 + char_len(k + 1) } else { char_len(k) };
            }
            (Part::Literal, (k < text.len()).then_some(k + 1))
        } else if rest.starts_with("'\\") {
            (Part::Literal, up_to(3, "'"))
        } else if rest.starts_with('\'') && text[i + 1..].chars().nth(1) == Some('\'') {
            (Part::Literal, Some(i + 2 + char_len(i + 1)))
        } else {
            i += char_len(i);
            continue;
        };
        let end = end.unwrap_or(text.len());
        found.extend([(Part::Code, code..i), (part, i..end)]);
        (code, i) = (end, end);
    }
    found.push((Part::Code, code..text.len()));
    found.retain(|(_, range)| !range.is_empty());
    found
}

pub fn sources() -> Vec<Source> {
    sources_of("src")
}

/// The files of the kernels' package, none in a downloaded package. Their rooms are the folders below its `src`.
pub fn kernel_sources() -> Vec<Source> {
    sources_of("kernels/src")
}

fn sources_of(folder: &str) -> Vec<Source> {
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path).expect("sources can be read");
        Source::new(path.strip_prefix(root()).expect("below the root"), text)
    };
    files(&root().join(folder)).into_iter().map(read).collect()
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
