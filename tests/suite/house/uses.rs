//! `use` declarations: the names that a file brings into scope, and those that it hands on.

use super::source::Source;

/// A module's path below the crate: `["dtensor", "plan"]`.
pub type Module = Vec<String>;

/// One name that a `use` brings into scope.
pub struct Use {
    pub path: Vec<String>,
    /// The name in this file, `*` for a glob.
    pub name: String,
    pub scope: UseScope,
}

/// The modules for which a `use` brings its names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UseScope {
    /// This file.
    Private,
    /// Others of the crate: `pub(crate)`, `pub(super)`, `pub(in crate::room)`.
    Crate,
    /// `pub`.
    Public,
}

/// The path of a file's module.
pub fn module_of(source: &Source) -> Module {
    let mut parts: Module = source.parts().iter().map(|p| p.trim_end_matches(".rs").to_string()).collect();
    if parts.last().is_some_and(|p| p == "mod" || p == "lib") {
        parts.pop();
    }
    parts
}

/// Splits code into the code without `use` declarations, and their names.
pub fn take_uses(code: &str) -> (String, Vec<Use>) {
    let (mut left, mut uses, mut done) = (String::new(), Vec::new(), 0);
    for (at, word) in words(code) {
        // `impl Trait + use<'a>` brings nothing.
        if word != "use" || at < done || code[at + 3..].trim_start().starts_with('<') {
            continue;
        }
        let before = code[..at].trim_end();
        let restricted = before.rsplit_once("pub(").filter(|(_, to)| to.find(')') == Some(to.len() - 1));
        let scope = match () {
            () if before.ends_with("pub") => UseScope::Public,
            () if before.ends_with(')') && restricted.is_some() => UseScope::Crate,
            () => UseScope::Private,
        };
        let end = at + code[at..].find(';').expect("a use ends");
        left.push_str(&code[done..at]);
        expand(&code[at + 3..end], &[], scope, &mut uses);
        done = end + 1;
    }
    left.push_str(&code[done..]);
    (left, uses)
}

/// Adds the names of a tree of `use`: `a::{b, c::{self, d as e}}`.
fn expand(tree: &str, above: &[String], scope: UseScope, uses: &mut Vec<Use>) {
    let (path, inner) = match tree.split_once('{') {
        Some((path, inner)) => (path, Some(inner.trim_end().strip_suffix('}').expect("braces match"))),
        None => (tree, None),
    };
    let (path, alias) = path.split_once(" as ").map_or((path, None), |(p, a)| (p, Some(a.trim())));
    let mut full = above.to_vec();
    full.extend(path.split("::").map(str::trim).filter(|s| !s.is_empty()).map(String::from));
    let Some(inner) = inner else {
        if full.len() > 1 && full.last().is_some_and(|s| s == "self") {
            full.pop();
        }
        let name = alias.map(String::from).or(full.last().cloned()).unwrap_or_default();
        if full.last().is_some_and(|s| s == "*") {
            full.pop();
        }
        return uses.push(Use { path: full, name, scope });
    };
    let (mut depth, mut start) = (0, 0);
    for (i, c) in inner.char_indices().chain([(inner.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                if !inner[start..i].trim().is_empty() {
                    expand(&inner[start..i], &full, scope, uses);
                }
                start = i + 1;
            }
            _ => {}
        }
    }
}

/// The identifiers and keywords of a text with their byte offsets.
pub fn words(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let is = |c: char| c.is_alphanumeric() || c == '_';
    let mut end = 0;
    text.char_indices().filter_map(move |(i, c)| {
        if i < end || !is(c) {
            return None;
        }
        let len = text[i..].find(|c| !is(c)).unwrap_or(text.len() - i);
        end = i + len;
        Some((i, &text[i..end]))
    })
}
