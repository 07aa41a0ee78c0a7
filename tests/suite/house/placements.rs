//! Code that decides by `Placement` or `AxisPlacement` names all variants, so that a new one does not compile until
//! each decision handles it.

use super::source::{product_code, sources};

const KINDS: [&str; 2] = ["Placement::", "AxisPlacement::"];

#[test]
fn decisions_by_placement_name_every_placement() {
    let mut wrong = Vec::new();
    for source in sources() {
        // Enums of the same name elsewhere are different types.
        if !["placement", "ops", "dtensor", "nn", "optim"].contains(&source.module().as_str())
            || source.code.contains("enum AxisPlacement") && !source.path.ends_with("ops/record/row.rs")
        {
            continue;
        }
        let code = product_code(&source.code);
        let line = |at: usize| code[..at].matches('\n').count() + 1;
        wrong.extend(
            silent(&code)
                .into_iter()
                .map(|(at, why)| format!("{}:{}: {why}", source.path.display(), line(at))),
        );
    }
    assert!(wrong.is_empty(), "a new placement would be taken for another here:\n{}", wrong.join("\n"));
}

#[test]
fn every_silent_form_is_seen() {
    for (code, why) in [
        ("matches!(p, Placement::Shard(_))", "matches!"),
        ("if let Placement::Shard(d) = p {}", "let"),
        ("let Some(AxisPlacement::S(d)) = p else { return };", "let"),
        ("p == Placement::Replicate", "comparison"),
        ("*s != AxisPlacement::R", "comparison"),
        ("row.contains(&AxisPlacement::Ragged)", "comparison"),
        ("use Placement::{Shard, Partial};", "import"),
        ("match p { Placement::Shard(d) => f(|_| 1), _ => 2 }", "wildcard"),
        ("match p { Placement::Shard(d) => { g() } other => other.clone() }", "wildcard"),
        (
            "match (a, b) { (_, Placement::Partial(_)) => 0, (Placement::Shard(_), Placement::Shard(_)) => 1 }",
            "wildcard",
        ),
        (
            "match p { AxisPlacement::R | AxisPlacement::S(_) if _x => 1, rest if rest.is() => 2, AxisPlacement::Ragged => 3 }",
            "wildcard",
        ),
    ] {
        let seen: Vec<&str> = silent(code).into_iter().map(|(_, why)| why).collect();
        assert!(seen.len() == 1 && seen[0].contains(why), "{code}: {seen:?}");
    }
    for code in [
        "match p { Placement::Shard(d) | Placement::Ragged { dims: d, .. } => f(d), Placement::Partial(_) => 0 }",
        "match *p { Placement::Shard(d) => match d { 0 => 1, _ => 2 }, Placement::Partial(Op::Sum) => 0 }",
        "match axis(a) { Ok(a) if *l.axis(a) != r.placement => l.set(a, Placement::Replicate), _ => l }",
        "let p = Placement::Shard(0); f(Placement::Replicate);",
    ] {
        assert_eq!(silent(code), [], "{code}");
    }
}

/// Returns the places at which `code` decides by a placement and would ignore a new variant, each with the reason.
fn silent(code: &str) -> Vec<(usize, &'static str)> {
    let mut found = Vec::new();
    let names = |text: &str| KINDS.iter().any(|kind| text.contains(kind));
    for (at, _) in code.match_indices("matches!(") {
        let (open, close) = group(code, at);
        if names(&code[open..close]) {
            found.push((at, "`matches!` is silent about the rest: ask a predicate, or match"));
        }
    }
    for (at, _) in code.match_indices("let ") {
        let pattern = code[at..].split(['=', ';']).next().expect("a part");
        if names(pattern) {
            found.push((at, "`let` with a pattern is silent about the rest: ask a predicate, or match"));
        }
    }
    for kind in KINDS {
        for (at, _) in code.match_indices(kind) {
            let before = code[..at].trim_end();
            if ["==", "!=", "contains(&"].iter().any(|op| before.ends_with(op)) {
                found.push((at, "a comparison is silent about the rest: ask a predicate"));
            }
            if before.ends_with("use") || code[at + kind.len()..].starts_with(['{', '*']) {
                found.push((at, "an import of variants hides from this test: write them out"));
            }
        }
    }
    for (at, _) in code.match_indices("match ") {
        let Some(open) = code[at..].find('{').map(|i| at + i) else { continue };
        let patterns = patterns(&code[open..group(code, open).1]);
        let by_placement = patterns.iter().any(|p| names(p));
        if by_placement && patterns.iter().any(|p| is_wild(p)) {
            found.push((at, "a wildcard is silent about the rest: name them"));
        }
    }
    found
}

/// Returns the places of the first bracket at or after `at` and of its partner.
fn group(code: &str, at: usize) -> (usize, usize) {
    let mut depth = 0;
    let mut open = None;
    for (i, c) in code[at..].char_indices() {
        match c {
            '{' | '(' | '[' => {
                depth += 1;
                open.get_or_insert(at + i);
            }
            '}' | ')' | ']' => depth -= 1,
            _ => {}
        }
        if let Some(open) = open.filter(|_| depth == 0) {
            return (open, at + i);
        }
    }
    (at, code.len())
}

/// Returns the patterns of a match's arms without guards; `block` begins with the opening brace.
fn patterns(block: &str) -> Vec<String> {
    let mut patterns = Vec::new();
    let mut rest = &block[1..];
    while let Some(arrow) = rest.find("=>") {
        let pattern = rest[..arrow].trim().trim_start_matches(',').trim();
        patterns.push(pattern.split(" if ").next().unwrap_or(pattern).to_string());
        rest = rest[arrow + 2..].trim_start();
        // The arm's value ends after its block, or at the next comma outside brackets.
        let mut depth = 0;
        let starts_block = rest.starts_with('{');
        let mut end = rest.len();
        for (i, c) in rest.char_indices() {
            match c {
                '{' | '(' | '[' => depth += 1,
                '}' | ')' | ']' => depth -= 1,
                _ => {}
            }
            if depth == 0 && (c == ',' || starts_block && c == '}') {
                end = i + 1;
                break;
            }
        }
        rest = &rest[end..];
    }
    patterns
}

/// True if a pattern also matches placements that it does not name: it has a `_` or a binding outside
/// `Placement::X(..)`.
fn is_wild(pattern: &str) -> bool {
    let mut left = String::new();
    let mut rest = pattern;
    while let Some(at) = KINDS.iter().filter_map(|kind| rest.find(kind)).min() {
        left.push_str(&rest[..at]);
        let behind = &rest[at..];
        let name =
            behind.find(|c: char| !c.is_alphanumeric() && c != ':' && c != '_').unwrap_or(behind.len());
        let fields = behind[name..].trim_start();
        rest = match fields.starts_with(['(', '{']) {
            true => &fields[(group(fields, 0).1 + 1).min(fields.len())..],
            false => fields,
        };
    }
    left.push_str(rest);
    left.split(|c: char| !c.is_alphanumeric() && c != '_')
        .any(|word| word == "_" || word.starts_with(|c: char| c.is_lowercase()))
}
