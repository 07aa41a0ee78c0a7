//! Plain English in comments and pages: patterns that a search can find.
//!
//! `ISOSHARD_PROSE=src/comm cargo test --test suite house::prose -- --nocapture` prints every find below a path.

use std::fmt;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use super::source::{Part, files, parts, root};

/// A pattern with its remedy.
pub struct Pattern {
    pub name: &'static str,
    pub remedy: &'static str,
    /// Lists of words, which a text has to contain in this order without punctuation in between. `a|b` is one of several
    /// words, `*` any word, and `^` the beginning of a sentence.
    phrases: &'static [&'static str],
}

pub const PATTERNS: [Pattern; 4] = [
    Pattern {
        name: "opening",
        remedy: "begin a doc comment with a noun or a verb",
        // Read where a doc comment begins, not by phrases.
        phrases: &[],
    },
    Pattern {
        name: "where",
        remedy: "write `if` or `when` for a condition",
        phrases: &[
            "^ where",
            "true|false|none|some|null|empty|nothing|only|except|not|also|even|always|but where",
            "unless|checked|needed|refused|skipped|zero|zeros|0|1|-1|infinity|nan where",
            "where there|nobody|nothing|no|none|not|one|some|several|both|neither|either|somebody|who|what|such",
            "where all|every|each|any|others|another|many|few|more|fewer|nobody's",
            "where this|that|these|those|it|they|we has|have|had|does|do|did|can|cannot|could",
            "where this|that|these|those|it|they|we would|must|may",
            "where this|that|these|those is|are|was|were *",
            "where it|they is|are|was|were not|no|known|set|given|needed|one|a|an|the|all|too|empty",
            "where it|they needs|need|takes|take|gives|give|fits|fit|asks|ask|differs|differ",
            "where the|a|an|its|their * is|are|was|were|has|have|does|do|can|cannot *",
            "where the|a|an|its|their * could|would|must|may|need|needs *",
            "where the|a|an * says|say|tells|tell|allows|allow|knows|know|fits|fit|differs|differ",
            "where ranks|rows|cuts|axes|strides|dims|operands|members are|have|do|may|can *",
            "where kernels|pieces|blocks|layouts|tensors are|have|do|may|can *",
            "where cuts|strides|kernels|dims|layouts|tensors allow|fit|differ|wrap",
        ],
    },
    Pattern {
        name: "unnamed",
        remedy: "name the rank, the thread or the value that is meant",
        phrases: &["nobody|whoever|somebody|nobody's|somebody's", "of which", "of whom"],
    },
    Pattern {
        name: "riddle",
        remedy: "put the subject first and name it",
        phrases: &[
            "^ what|who|whose",
            "^ of a|an|the|one|two|several|all|both|operators|operands",
            "what becomes of",
            "on its way is",
        ],
    },
];

/// First words of doc comments that are not a noun or a verb.
const OPENINGS: [&str; 16] = [
    "what", "where", "how", "who", "whom", "whose", "whether", "which", "why", "of", "none", "those", "that",
    "whoever", "whatever", "as",
];

#[test]
fn comments_and_pages_are_plain() {
    let finds = finds();
    let below = std::env::var("ISOSHARD_PROSE").ok();
    for find in finds.iter().filter(|f| below.as_ref().is_some_and(|below| f.path.starts_with(below))) {
        println!("{find}");
    }
    let wrong: Vec<String> = finds.iter().map(|f| format!("{f}")).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn each_pattern_is_found_and_plain_words_are_not() {
    for (text, want) in [
        ("/// What a rank holds.", vec!["opening", "riddle"]),
        ("/// Of a row: its length.", vec!["opening", "riddle"]),
        ("/// As [`Tensor::sum`], in place.", vec!["opening"]),
        ("/// The same for columns.", vec!["opening"]),
        ("//! Whether ranks wait.", vec!["opening"]),
        ("/// Returns the rank, or none where there\n/// is none.", vec!["where"]),
        ("/// Returns `None`.\n/// None where one call does.", vec!["where"]),
        ("// Where strides differ, it is copied.", vec!["where"]),
        ("/// Views where strides allow.", vec!["where"]),
        ("// Empty where nobody waits.", vec!["where", "unnamed"]),
        ("/// A list, of which the first is taken.", vec!["unnamed"]),
        ("/// As many as ranks. Bytes go where the buffer lies.", vec![]),
        ("/// Returns `yes` at places where `condition` is true.", vec![]),
        ("/// ```\n/// // Where there is nothing\n/// ```", vec![]),
        ("let x = \"none where there is none\";", vec![]),
        ("/// Checks all of it. That which is said.\n///\n/// That paragraph opens nothing.", vec![]),
    ] {
        let mut found = Vec::new();
        in_comments("src/x.rs", text, &mut found);
        assert_eq!(found.iter().map(|f| f.pattern).collect::<Vec<_>>(), want, "{text}");
    }
    let mut found = Vec::new();
    in_page("docs/x.md", "# What it is\n\nText where there is\nnone.\n```text\nnobody\n```\n", &mut found);
    assert_eq!(found.iter().map(|f| (f.line, f.pattern)).collect::<Vec<_>>(), [(3, "where")]);
}

/// A pattern's occurrence.
pub struct Find {
    pub pattern: &'static str,
    /// Relative to the repository's root.
    pub path: String,
    pub line: usize,
    pub text: String,
}

impl fmt::Display for Find {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}: {}", self.path, self.line, self.pattern, self.text)
    }
}

/// The finds in all sources and pages.
pub fn finds() -> Vec<Find> {
    let mut all = Vec::new();
    for folder in ["src", "kernels", "tests", "examples", "benches"] {
        for path in files(&root().join(folder)) {
            let name = relative(&path);
            // The patterns themselves, and their samples.
            if !name.ends_with("house/prose.rs") {
                let text = fs::read_to_string(&path).expect("sources can be read");
                in_comments(&name, &text, &mut all);
            }
        }
    }
    for path in pages() {
        let text = fs::read_to_string(&path).expect("pages can be read");
        let name = relative(&path);
        // A released version's notes stay as they are.
        let text = match name == "CHANGELOG.md" {
            true => unreleased(&text),
            false => text.as_str(),
        };
        in_page(&name, text, &mut all);
    }
    all
}

/// README, CHANGELOG, CONTRIBUTING, the page of the tests and every page below `docs`.
pub fn pages() -> Vec<std::path::PathBuf> {
    let mut found: Vec<_> = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "tests/README.md"]
        .map(|name| root().join(name))
        .into();
    let mut folders = vec![root().join("docs")];
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path()) {
            match path.is_dir() {
                true => folders.push(path),
                false => found.extend(path.extension().is_some_and(|e| e == "md").then_some(path)),
            }
        }
    }
    found.sort();
    found
}

pub fn relative(path: &Path) -> String {
    path.strip_prefix(root()).expect("below the root").display().to_string()
}

/// The part of a changelog above the second version's heading.
fn unreleased(text: &str) -> &str {
    let second = text.match_indices("\n## ").nth(1);
    second.map_or(text, |(at, _)| &text[..at])
}

/// A run of text without a blank line, as lines with their numbers.
type Paragraph = Vec<(usize, String)>;

fn in_comments(path: &str, text: &str, all: &mut Vec<Find>) {
    let mut paragraph: Paragraph = Vec::new();
    // The mark of the comment before, with its line; and true inside an example.
    let (mut before, mut fenced) = (("", 0), false);
    let mut line = 1;
    let mut end = 0;
    for (part, range) in parts(text) {
        line += text[end..range.start].matches('\n').count();
        end = range.start;
        if part != Part::Comment {
            continue;
        }
        let comment = &text[range];
        let mark = ["///", "//!", "//"].into_iter().find(|mark| comment.starts_with(mark)).unwrap_or("/*");
        let said = comment[mark.len()..].trim();
        let opens = before != (mark, line - 1);
        if opens {
            fenced = false;
        }
        if opens || said.is_empty() {
            search(path, &std::mem::take(&mut paragraph), all);
        }
        if said.starts_with("```") {
            search(path, &std::mem::take(&mut paragraph), all);
            fenced = !fenced;
        } else if !fenced && !said.is_empty() {
            if opens && mark.len() == 3 && !path.starts_with("kernels/cuda/") && is_opening(said) {
                all.push(Find { pattern: "opening", path: path.into(), line, text: said.into() });
            }
            // Rows of a table, items of a list and headings stand for themselves.
            if said.starts_with(['|', '#']) || said.starts_with("- ") {
                search(path, &std::mem::take(&mut paragraph), all);
            }
            paragraph.push((line, said.to_string()));
        }
        before = (mark, line);
    }
    search(path, &paragraph, all);
}

fn in_page(path: &str, text: &str, all: &mut Vec<Find>) {
    let (mut paragraph, mut fenced) = (Paragraph::new(), false);
    for (number, line) in text.lines().enumerate() {
        let said = line.trim();
        let fence = said.starts_with("```");
        let alone = said.starts_with(['|', '#']) || said.starts_with("- ");
        if fence || alone || said.is_empty() {
            search(path, &std::mem::take(&mut paragraph), all);
        }
        fenced ^= fence;
        // Headings may ask.
        if !fence && !fenced && !said.is_empty() && !said.starts_with('#') {
            paragraph.push((number + 1, said.to_string()));
        }
    }
    search(path, &paragraph, all);
}

/// True if a doc comment should not begin like this.
fn is_opening(said: &str) -> bool {
    let words = tokens(said);
    let first = words.first().map_or("", |w| w.as_str());
    let second = words.get(1).map_or("", |w| w.as_str());
    // "As" is an opening in "As [`Tensor::is_unique`]" only; "The same" leaves out of what.
    match first {
        "as" => second == "[",
        "the" => second == "same",
        _ => OPENINGS.contains(&first),
    }
}

/// Adds what the phrases find in a paragraph.
fn search(path: &str, paragraph: &Paragraph, all: &mut Vec<Find>) {
    let mut words: Vec<(usize, String)> = vec![(paragraph.first().map_or(0, |l| l.0), "^".into())];
    for (line, said) in paragraph {
        for token in tokens(said) {
            let ends = token == ".";
            words.push((*line, token));
            if ends {
                words.push((*line, "^".into()));
            }
        }
    }
    for (pattern, phrases) in PATTERNS.iter().zip(&*PHRASES) {
        let mut last = 0;
        for at in 0..words.len() {
            let found = phrases.iter().any(|phrase| matches(phrase, &words[at..]));
            let line = words[at].0.max(words.get(at + 1).filter(|_| words[at].1 == "^").map_or(0, |w| w.0));
            // A line counts once.
            if found && line != last {
                let said = &paragraph.iter().find(|l| l.0 == line).expect("a line of the paragraph").1;
                all.push(Find { pattern: pattern.name, path: path.into(), line, text: said.clone() });
                last = line;
            }
        }
    }
}

/// A phrase as a list of slots, each with the words that fit it.
type Phrase = Vec<Vec<&'static str>>;

/// The phrases of [`PATTERNS`], one list per pattern.
static PHRASES: LazyLock<[Vec<Phrase>; 4]> = LazyLock::new(|| {
    let slots = |phrase: &&'static str| phrase.split(' ').map(|slot| slot.split('|').collect()).collect();
    PATTERNS.map(|pattern| pattern.phrases.iter().map(slots).collect())
});

fn matches(phrase: &Phrase, words: &[(usize, String)]) -> bool {
    let is_word = |w: &str| w.starts_with(|c: char| c.is_alphanumeric() || c == '`');
    let fits = |slot: &[&str], word: &str| slot == ["*"] && is_word(word) || slot.contains(&word);
    phrase.len() <= words.len() && phrase.iter().zip(words).all(|(slot, (_, word))| fits(slot, word))
}

/// Words in lower case, code in backticks as one token, and every other character.
fn tokens(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let is = |c: char| c.is_alphanumeric() || "_'-’".contains(c);
        let len = match c {
            '`' => rest[1..].find('`').map_or(rest.len(), |k| k + 2),
            c if is(c) => rest.find(|c| !is(c)).unwrap_or(rest.len()),
            c => c.len_utf8(),
        };
        if !c.is_whitespace() && !"*\"“”".contains(c) {
            found.push(rest[..len].to_lowercase());
        }
        rest = &rest[len..];
    }
    found
}
