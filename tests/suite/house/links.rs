//! Links between pages lead to files and headings that exist, comments and pages name files that exist, and the book's table of contents names every page of it.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::prose::{pages, relative};
use super::source::{Part, files, parts, root};

#[test]
fn links_of_pages_lead_somewhere() {
    let (mut wrong, mut seen) = (Vec::new(), 0);
    for page in pages() {
        let text = fs::read_to_string(&page).expect("pages can be read");
        for (line, target) in links(&text) {
            seen += 1;
            if let Some(why) = is_broken(&page, &text, &target) {
                wrong.push(format!("{}:{line}: {target}: {why}", relative(&page)));
            }
        }
    }
    assert!(seen > 10, "only {seen} links are read");
    assert!(wrong.is_empty(), "broken links:\n{}", wrong.join("\n"));
}

#[test]
fn comments_and_pages_name_files_that_exist() {
    let folders = ["src", "kernels", "tests", "benches", "examples"];
    let all: Vec<_> = folders.iter().flat_map(|folder| files(&root().join(folder))).collect();
    let there: Vec<String> = all.iter().map(|path| format!("/{}", relative(path))).collect();
    let (mut wrong, mut seen) = (Vec::new(), 0);
    for path in pages().into_iter().chain(all).filter(|p| !relative(p).starts_with("tests/suite/house")) {
        let text = fs::read_to_string(&path).expect("files can be read");
        let is_page = path.extension().is_some_and(|e| e == "md");
        let said: String = match is_page {
            true => text,
            false => parts(&text)
                .into_iter()
                .filter(|(p, _)| *p == Part::Comment)
                .map(|(_, at)| &text[at])
                .collect(),
        };
        for name in file_names(&said) {
            seen += 1;
            if !there.iter().any(|path| path.ends_with(&format!("/{name}"))) {
                wrong.push(format!("{}: {name}", relative(&path)));
            }
        }
    }
    assert!(seen > 50, "only {seen} names of files are read");
    assert!(wrong.is_empty(), "no such files:\n{}", wrong.join("\n"));
}

/// The names of Rust and CUDA files in a text that have a folder.
fn file_names(text: &str) -> Vec<&str> {
    let words = text.split(|c: char| !c.is_alphanumeric() && !"_-./{}*".contains(c));
    let names = words.map(|word| word.trim_matches(['.', '/']));
    let is_file =
        |name: &str| [".rs", ".cu", ".cuh"].iter().any(|end| name.ends_with(end)) && name.contains('/');
    names.filter(|name| is_file(name) && !name.contains(['{', '*'])).collect()
}

#[test]
fn the_book_names_each_of_its_pages() {
    let book = root().join("docs/book/src");
    let Ok(summary) = fs::read_to_string(book.join("SUMMARY.md")) else {
        assert!(!book.exists(), "docs/book/src has no SUMMARY.md");
        return;
    };
    let named: BTreeSet<String> =
        links(&summary).into_iter().map(|(_, to)| to.trim_start_matches("./").to_string()).collect();
    let is_page = |page: &String| page != "SUMMARY.md";
    let below =
        pages().into_iter().filter_map(|p| p.strip_prefix(&book).ok().map(|p| p.display().to_string()));
    let there: BTreeSet<String> = below.filter(is_page).collect();
    assert_eq!(named, there, "docs/book/src/SUMMARY.md on the left, the folder on the right");
}

/// Documentation tests run a page's programs if a file of `src` includes the page.
#[test]
fn programs_of_pages_are_run() {
    let sources = super::source::sources();
    let included = |page: &str| sources.iter().any(|s| s.text.contains(&format!("{page}\"")));
    let guides = programs();
    let left: Vec<_> = guides.into_iter().filter(|(page, count)| *count > 0 && !included(page)).collect();
    assert!(left.is_empty(), "pages with programs that no file of src includes: {left:?}");
}

/// A user who comes from PyTorch finds each operator's method on one page.
#[test]
fn the_page_on_pytorch_names_every_method() {
    let page = fs::read_to_string(root().join("docs/book/src/from-pytorch.md")).expect("pages can be read");
    let words: BTreeSet<&str> = page.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
    let methods = super::examples::functions().into_iter().filter_map(|function| {
        let place = function.place.replace('\\', "/");
        let of_operators = place.contains("src/dtensor/methods/") || place.contains("src/ops/pointwise/");
        of_operators.then(|| function.name.strip_prefix("DTensor::").map(String::from)).flatten()
    });
    let (mut seen, mut missing) = (0, Vec::new());
    for method in methods {
        seen += 1;
        if !words.contains(method.as_str()) {
            missing.push(method);
        }
    }
    assert!(seen > 200, "only {seen} methods are read");
    assert!(missing.is_empty(), "methods that docs/book/src/from-pytorch.md does not name: {missing:?}");
}

/// The pages of the book, and README, with the number of their Rust programs.
pub fn programs() -> Vec<(String, usize)> {
    let of_book = |page: &String| page == "README.md" || page.starts_with("docs/book/");
    let count = |page: String| {
        let text = fs::read_to_string(root().join(&page)).expect("pages can be read");
        let fences = text.lines().filter_map(|l| l.trim_start().strip_prefix("```")).step_by(2);
        let count = fences.filter(|info| info.is_empty() || info.starts_with("rust")).count();
        (page, count)
    };
    pages().iter().map(|p| relative(p)).filter(of_book).map(count).collect()
}

/// The targets of `[text](target)`, with their lines; code is left out.
fn links(text: &str) -> Vec<(usize, String)> {
    let (mut found, mut fenced) = (Vec::new(), false);
    for (number, line) in text.lines().enumerate() {
        fenced ^= line.trim_start().starts_with("```");
        if fenced {
            continue;
        }
        // Every second part stands in backticks; a link's text may hold code, its target does not.
        let line: String =
            line.split('`').enumerate().map(|(i, part)| if i % 2 == 0 { part } else { "code" }).collect();
        let targets = line.split("](").skip(1).filter_map(|rest| rest.split([')', ' ']).next());
        found.extend(targets.map(|target| (number + 1, target.to_string())));
    }
    found
}

/// The reason why a link of `page` leads nowhere.
fn is_broken(page: &Path, text: &str, target: &str) -> Option<String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
    let path = match file {
        "" => page.to_path_buf(),
        file => page.parent().expect("a page stands in a folder").join(file),
    };
    if !path.exists() {
        return Some("no such file".into());
    }
    if anchor.is_empty() {
        return None;
    }
    let other;
    let text = match file {
        "" => text,
        _ => {
            other = fs::read_to_string(&path).unwrap_or_default();
            &other
        }
    };
    let there = anchors(text);
    (!there.iter().any(|a| a == anchor)).then(|| format!("no such heading among {there:?}"))
}

/// The anchors of a page's headings, as GitHub and mdBook make them.
fn anchors(text: &str) -> Vec<String> {
    let mut fenced = false;
    let mut found: Vec<String> = Vec::new();
    for line in text.lines() {
        fenced ^= line.trim_start().starts_with("```");
        let heading = line.trim_start_matches('#');
        if fenced || heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        let kept = heading.trim().to_lowercase();
        let kept = kept.chars().filter(|&c| c.is_alphanumeric() || " -_".contains(c));
        let anchor: String = kept.map(|c| if c == ' ' { '-' } else { c }).collect();
        let same = found.iter().filter(|a| **a == anchor).count();
        found.push(if same == 0 { anchor } else { format!("{anchor}-{same}") });
    }
    found
}

#[test]
fn links_and_anchors_are_read() {
    let text = "# A page: of `code`\n[one](a.md#b) and [`two`](#c)\n```\n[no](x)\n```\n`[no](y)`\n\
                ## Twice\n## Twice\n";
    assert_eq!(links(text), [(2, "a.md#b".into()), (2, "#c".into())]);
    assert_eq!(anchors(text), ["a-page-of-code", "twice", "twice-1"]);
    let page = root().join("README.md");
    assert_eq!(is_broken(&page, text, "#twice-1"), None);
    assert!(is_broken(&page, text, "#thrice").is_some() && is_broken(&page, text, "no/such.md").is_some());
    assert_eq!(is_broken(&page, text, "https://example.org/x.md"), None);
    let text = "See `a/b.rs`, [c](../src/c.cuh), x.rs, https://docs.rs and a/{d,e}.rs.";
    assert_eq!(file_names(text), ["a/b.rs", "src/c.cuh"]);
}
