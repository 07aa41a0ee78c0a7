//! The items of a source file: functions and types, each with the block that it stands in and its documentation.

use super::source::{Source, identifier, product_code};

/// A function, or a type that the file defines.
pub struct Item {
    pub kind: ItemKind,
    pub name: String,
    /// Counted from 1.
    pub line: usize,
    /// `pub` without a restriction.
    pub public: bool,
    /// The lines of its doc comment, without slashes.
    pub docs: Vec<String>,
    /// The blocks around it, the outermost first.
    pub within: Vec<Block>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ItemKind {
    Function,
    /// A struct, an enum, a trait or a union.
    Type,
    /// `type Name = ...;` outside traits and their implementations.
    Alias,
    /// A row of a macro call, `/// Documentation.` above `name = ...;`.
    MacroRow,
}

/// A block of braces that holds items.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Block {
    /// `impl Name`.
    Inherent(String),
    /// `impl Trait for Name`.
    TraitImpl,
    /// `pub trait Name`, or a private one.
    Trait {
        name: String,
        public: bool,
    },
    Module,
    /// `name! { ... }`.
    MacroCall(String),
    /// `macro_rules! name { ... }`.
    MacroRules(String),
    /// A function's body, a struct's fields, a match.
    Other,
}

/// The items of a file, without those that only tests compile.
pub fn items(source: &Source) -> Vec<Item> {
    let code = product_code(&source.code);
    let text: Vec<&str> = source.text.lines().collect();
    let (mut found, mut blocks) = (Vec::new(), Vec::new());
    // The text behind the last brace or semicolon, with the line at which it begins and that of its first word.
    let mut header = String::new();
    let (mut begin, mut line) = (1, 1);
    let mut brackets = 0usize;
    for c in code.chars() {
        match c {
            '(' | '[' => brackets += 1,
            ')' | ']' => brackets = brackets.saturating_sub(1),
            _ => {}
        }
        let ends = matches!(c, '{' | '}') || c == ';' && brackets == 0;
        if !ends {
            line += usize::from(c == '\n');
            header.push(c);
            continue;
        }
        if c != '}' {
            found.extend(item(&header, begin, &text, &blocks));
        }
        match c {
            '{' => blocks.push((block(&header), std::mem::take(&mut brackets))),
            '}' => brackets = blocks.pop().map_or(0, |(_, brackets)| brackets),
            _ => {}
        }
        header.clear();
        begin = line;
    }
    found
}

/// The item that a header begins, whose text starts on line `begin`.
fn item(header: &str, begin: usize, text: &[&str], blocks: &[(Block, usize)]) -> Option<Item> {
    let declared = without_attributes(header);
    let skipped = header.len() - declared.len();
    let line = begin + header[..skipped].matches('\n').count();
    let (public, rest) = visibility(declared);
    let mut words = rest.split_whitespace().peekable();
    while words.next_if(|w| ["const", "unsafe", "async", "extern", "default"].contains(w)).is_some() {}
    let keyword = words.next()?;
    let name = words.next().unwrap_or_default();
    // A macro's `$name` keeps its mark.
    let name = match name.strip_prefix('$') {
        Some(name) => format!("${}", identifier(name)),
        None => identifier(name),
    };
    let within: Vec<Block> = blocks.iter().map(|(block, _)| block.clone()).collect();
    let in_macro_call = matches!(within.last(), Some(Block::MacroCall(_)));
    let (kind, name) = match keyword {
        "fn" => (ItemKind::Function, name),
        "struct" | "enum" | "trait" | "union" => (ItemKind::Type, name),
        // Associated types repeat the names of their traits.
        "type" if matches!(within.last(), None | Some(Block::Module)) => (ItemKind::Alias, name),
        row if in_macro_call && declared.contains('=') => (ItemKind::MacroRow, identifier(row)),
        _ => return None,
    };
    let is_type = matches!(kind, ItemKind::Type | ItemKind::Alias);
    if name.is_empty() || is_type && !name.starts_with(char::is_uppercase) {
        return None;
    }
    let docs = text.get(begin - 1..line).unwrap_or_default().iter();
    let docs = docs.filter_map(|l| l.trim_start().strip_prefix("///").map(str::to_string)).collect();
    Some(Item { kind, name, line, public, docs, within })
}

fn block(header: &str) -> Block {
    let declared = without_attributes(header);
    let (public, rest) = visibility(declared);
    let rest = rest.strip_prefix("unsafe ").unwrap_or(rest);
    if let Some(name) = rest.strip_prefix("trait ") {
        return Block::Trait { name: identifier(name), public };
    }
    if rest.starts_with("mod ") {
        return Block::Module;
    }
    if let Some(name) = rest.strip_prefix("macro_rules!") {
        return Block::MacroRules(identifier(name.trim_start()));
    }
    if let Some(name) = rest.trim_end().strip_suffix('!') {
        return Block::MacroCall(name.to_string());
    }
    let Some(of) = rest.strip_prefix("impl").filter(|of| of.starts_with([' ', '<'])) else {
        return Block::Other;
    };
    // Behind `impl`'s own parameters, which may hold `->`.
    let mut depth = 0usize;
    let mut end = 0;
    for (i, c) in of.char_indices() {
        match c {
            '<' => depth += 1,
            '>' if !of[..i].ends_with('-') => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            end = i + c.len_utf8();
            break;
        }
    }
    let of = of[end..].trim_start();
    match of.contains(" for ") && !of.starts_with("for<") {
        true => Block::TraitImpl,
        false => {
            let path = of.split(['<', ' ', '\n']).next().unwrap_or_default();
            Block::Inherent(path.rsplit("::").next().unwrap_or_default().to_string())
        }
    }
}

/// A header from its first word on, behind attributes.
fn without_attributes(header: &str) -> &str {
    let mut rest = header.trim_start();
    loop {
        // A macro repeats attributes as `$(#[$doc])*`, and items as `$( ... )*`.
        if let Some(repeated) = rest.strip_prefix("$(") {
            rest = repeated.trim_start();
            continue;
        }
        if let Some(end) = rest.strip_prefix(")*") {
            rest = end.trim_start();
            continue;
        }
        if !rest.starts_with("#[") && !rest.starts_with("#![") {
            return rest;
        }
        let mut depth = 0usize;
        let end = rest.char_indices().find(|(_, c)| {
            depth = match c {
                '[' => depth + 1,
                ']' => depth - 1,
                _ => return false,
            };
            depth == 0
        });
        rest = rest[end.map_or(rest.len(), |(i, _)| i + 1)..].trim_start();
    }
}

/// True for a `pub` without a restriction; and the declaration behind its visibility.
fn visibility(declared: &str) -> (bool, &str) {
    match declared.strip_prefix("pub") {
        Some(rest) if rest.starts_with(char::is_whitespace) => (true, rest.trim_start()),
        Some(rest) if rest.starts_with('(') => {
            (false, rest.split_once(')').map_or(rest, |(_, rest)| rest.trim_start()))
        }
        _ => (false, declared),
    }
}

#[test]
fn items_are_read_with_their_blocks_and_documentation() {
    let source = Source::new(
        "src/x/y.rs",
        "\
//! Head.

/// A type.
#[derive(Debug)]
pub struct Thing<T>(T);

pub type Alias = [u8; 4];

impl<F: Fn(u8) -> bool> Thing<F> {
    /// Returns one.
    ///
    /// ```
    /// assert!(true);
    /// ```
    #[must_use]
    pub const fn one(&self) -> usize {
        if true { 1 } else { 2 }
    }
    pub(crate) fn two(&self) {}
}

impl Iterator for Thing<u8> {
    type Item = u8;
    fn next(&mut self) -> Option<u8> { None }
}

pub trait Shape {
    /// Documented.
    fn area(&self) -> f64;
}

macro_rules! methods {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        ///
        /// # Errors
        pub fn $name(&self) {}
    )*};
}

relations! {
    /// `a == b`.
    eq = Eq;
}

#[cfg(test)]
mod tests { struct Hidden; }
",
    );
    let items = items(&source);
    let seen: Vec<(&str, usize, bool, usize)> =
        items.iter().map(|i| (i.name.as_str(), i.line, i.public, i.docs.len())).collect();
    let want = [
        ("Thing", 5, true, 1),
        ("Alias", 7, true, 0),
        ("one", 16, true, 5),
        ("two", 19, false, 0),
        ("next", 24, false, 0),
        ("Shape", 27, true, 0),
        ("area", 29, false, 1),
        ("$name", 37, true, 2),
        ("eq", 43, false, 1),
    ];
    assert_eq!(seen, want);
    assert_eq!(items[2].within, [Block::Inherent("Thing".into())]);
    assert_eq!(items[4].within, [Block::TraitImpl]);
    assert_eq!(items[6].within, [Block::Trait { name: "Shape".into(), public: true }]);
    assert_eq!(items[7].within, [Block::MacroRules("methods".into()), Block::Other]);
    assert_eq!(items[8].within, [Block::MacroCall("relations".into())]);
}
