//! Public functions and modules show a program: a fenced block in their documentation that the documentation tests
//! compile.

use std::collections::{BTreeMap, BTreeSet};

use super::items::{Block, Item, ItemKind, items};
use super::source::{Source, identifier, product_code, sources};
use super::uses::{Module, UseScope, module_of, take_uses};

/// The groups whose public functions all need an example.
const REQUIRED: [&str; 6] = ["DTensor", "nn", "optim", "comm::spmd", "rng", "testing"];

/// A public function, a method of a public type, or a trait's method.
pub struct PublicFunction {
    pub group: String,
    pub place: String,
    pub name: String,
    /// The first sentence of its documentation.
    pub summary: String,
    pub has_example: bool,
}

/// Returns the first sentence of a documentation.
fn summary(docs: &[String]) -> String {
    let paragraph: Vec<&str> = docs.iter().map(|l| l.trim()).take_while(|l| !l.is_empty()).collect();
    let text = paragraph.join(" ");
    let end = text.find(". ").map_or(text.len(), |at| at + 1);
    text[..end].to_string()
}

#[test]
fn functions_that_users_call_have_examples() {
    let all = functions();
    let mut wrong = Vec::new();
    for group in REQUIRED {
        let of: Vec<&PublicFunction> = all.iter().filter(|f| f.group == group).collect();
        assert!(of.len() > 2, "only {} public functions of {group} are read", of.len());
        let without: Vec<_> = of.into_iter().filter(|f| !f.has_example).collect();
        if !without.is_empty() {
            wrong.push(format!("{group}: {} without an example:", without.len()));
            wrong.extend(without.iter().map(|f| format!("  {}: {}", f.place, f.name)));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn pages_of_modules_open_with_a_program() {
    let without: Vec<String> = modules().into_iter().filter(|(_, has)| !has).map(|(name, _)| name).collect();
    assert!(without.is_empty(), "public modules whose `//!` has no program:\n{}", without.join("\n"));
}

#[test]
fn groups_are_those_that_are_named() {
    let all = functions();
    let has = |group: &str, name: &str| all.iter().any(|f| f.group == group && f.name == name);
    let want = [
        ("DTensor", "DTensor::relu"),
        ("DTensor", "DTensor::eq"),
        ("DTensor", "DTensor::redistribute"),
        ("nn", "Params::update"),
        ("optim", "clip_scale"),
        ("comm::spmd", "spmd"),
        ("rng", "normal"),
        ("comm", "Group::all_reduce"),
        ("tensor", "Tensor::from_vec"),
    ];
    let missing: Vec<_> = want.into_iter().filter(|(group, name)| !has(group, name)).collect();
    assert!(missing.is_empty(), "not read as public: {missing:?}");
    assert!(
        !all.iter().any(|f| f.name == "PyTorch" || f.place.contains("transport/threads")),
        "private ones"
    );
    let modules: Vec<String> = modules().into_iter().map(|(name, _)| name).collect();
    for name in [
        "isoshard",
        "isoshard::comm",
        "isoshard::comm::flight",
        "isoshard::tensor::cpu",
        "isoshard::placement::short",
    ] {
        assert!(modules.iter().any(|m| m == name), "{name} is a public module: {modules:?}");
    }
}

/// All public functions that code outside the crate can name.
pub fn functions() -> Vec<PublicFunction> {
    let sources = sources();
    let (exported, modules) = exported(&sources);
    let mut found = Vec::new();
    for source in &sources {
        let (room, module) = (source.module(), module_of(source));
        let items = items(source);
        let reaches = |name: &str| exported.contains(&(room.clone(), name.to_string()));
        for item in items.iter().filter(|i| !i.name.starts_with('$')) {
            let name = match (item.kind, item.within.last()) {
                (ItemKind::Function, None)
                    if item.public && (reaches(&item.name) || modules.contains(&module)) =>
                {
                    item.name.clone()
                }
                (ItemKind::Function, Some(Block::Inherent(of))) if item.public && reaches(of) => {
                    format!("{of}::{}", item.name)
                }
                (ItemKind::Function, Some(Block::Trait { name, public: true })) if reaches(name) => {
                    format!("{name}::{}", item.name)
                }
                (ItemKind::MacroRow, Some(Block::MacroCall(_)))
                    if room == "dtensor" && !item.docs.is_empty() =>
                {
                    format!("DTensor::{}", item.name)
                }
                _ => continue,
            };
            let group = match name.split_once("::") {
                _ if source.path.ends_with("comm/api/spmd.rs") => "comm::spmd",
                Some(("DTensor", _)) => "DTensor",
                _ => &room,
            };
            found.push(PublicFunction {
                group: group.into(),
                place: format!("{}:{}", source.path.display(), item.line),
                name,
                summary: summary(&item.docs),
                has_example: has_program(&item.docs)
                    || matches!(item.within.last(), Some(Block::MacroCall(of)) if template_has_example(&items, of)),
            });
        }
    }
    found.extend(table_rows(&sources));
    found
}

/// The methods that `DTensor` has by rows of the pointwise table.
fn table_rows(sources: &[Source]) -> Vec<PublicFunction> {
    let of = |path: &str| sources.iter().find(|s| s.path.ends_with(path)).expect("the table and its methods");
    let template = template_has_example(&items(of("dtensor/methods/pointwise/table.rs")), "method");
    let mut found = Vec::new();
    let tables = |s: &&Source| s.path.parent().is_some_and(|p| p.ends_with("ops/pointwise/table"));
    for table in sources.iter().filter(tables) {
        let (mut docs, mut inside) = (Vec::new(), false);
        let lines: Vec<&str> = table.text.lines().map(str::trim_start).collect();
        for (number, &line) in lines.iter().enumerate() {
            // Documentation of the file shows what a row is.
            if line.starts_with("//!") {
                continue;
            }
            inside |= line.ends_with("methods {");
            if line.contains("} derivatives {") {
                break;
            }
            if let Some(doc) = line.strip_prefix("///") {
                docs.push(doc.to_string());
                continue;
            }
            let (type_name, rest) = line.split_once(' ').unwrap_or_default();
            let method = identifier(rest);
            if inside
                && !docs.is_empty()
                && identifier(type_name) == type_name
                && rest[method.len()..].starts_with('(')
            {
                // A row ends with a semicolon; its `example` becomes a program in the method's documentation.
                let end = lines[number..]
                    .iter()
                    .position(|l| l.ends_with(';'))
                    .map_or(lines.len(), |n| number + n + 1);
                let row_example = lines[number..end].iter().any(|l| l.starts_with("example "));
                found.push(PublicFunction {
                    group: "DTensor".into(),
                    place: format!("{}:{}", table.path.display(), number + 1),
                    name: format!("DTensor::{method}"),
                    summary: summary(&docs),
                    has_example: template || row_example || has_program(&docs),
                });
            }
            docs.clear();
        }
    }
    assert!(found.len() > 15, "only {} rows of the table are read", found.len());
    found
}

/// True if a macro of a file makes functions, and each of these has an example, whatever the row's own documentation.
fn template_has_example(items: &[Item], name: &str) -> bool {
    let in_macro = |i: &&Item| i.within.iter().any(|b| matches!(b, Block::MacroRules(of) if of == name));
    let mut made =
        items.iter().filter(|i| i.kind == ItemKind::Function && i.public).filter(in_macro).peekable();
    made.peek().is_some() && made.all(|i| has_program(&i.docs))
}

/// The public modules with true for those whose page has a program.
pub fn modules() -> Vec<(String, bool)> {
    let sources = sources();
    let (_, modules) = exported(&sources);
    let of = |s: &&Source| modules.contains(&module_of(s));
    let mut pages: Vec<(String, bool)> = sources
        .iter()
        .filter(of)
        .map(|source| {
            let head = source.text.lines().filter_map(|l| l.strip_prefix("//!").map(str::to_string));
            let names = module_of(source).into_iter().filter(|m| m != "diagnostics" && m != "transport");
            (
                ["isoshard".to_string()].into_iter().chain(names).collect::<Vec<_>>().join("::"),
                has_program(&head.collect::<Vec<_>>()),
            )
        })
        .collect();
    pages.sort();
    pages
}

/// True if documentation has a fenced block that documentation tests compile.
fn has_program(docs: &[String]) -> bool {
    let fences = docs.iter().filter_map(|l| l.trim_start().strip_prefix("```"));
    fences.step_by(2).any(|info| matches!(info.trim(), "" | "rust" | "no_run" | "should_panic"))
}

/// The names that lead out of the crate, each with the room that defines it; and the public modules.
fn exported(sources: &[Source]) -> (BTreeSet<(String, String)>, BTreeSet<Module>) {
    let of: BTreeMap<Module, &Source> = sources.iter().map(|s| (module_of(s), s)).collect();
    let below =
        |module: &Module, name: &str| -> Module { module.iter().cloned().chain([name.into()]).collect() };
    let declared = of.iter().flat_map(|(module, source)| {
        let lines = source.code.lines().filter_map(|l| l.trim_start().strip_prefix("pub mod "));
        lines.map(|name| below(module, &identifier(name))).collect::<Vec<_>>()
    });
    let declared: BTreeSet<Module> = declared.collect();
    let (mut names, mut modules, mut globs) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    // Public modules, and private ones whose names a glob hands on.
    let mut next: Vec<(Module, bool)> = vec![(Vec::new(), true)];
    while let Some((module, is_public)) = next.pop() {
        let seen = if is_public { &mut modules } else { &mut globs };
        let Some(source) = of.get(&module).filter(|_| seen.insert(module.clone())) else { continue };
        next.extend(
            declared
                .iter()
                .filter(|m| m.len() == module.len() + 1 && m.starts_with(&module))
                .map(|m| (m.clone(), true)),
        );
        let own = items(source).into_iter().filter(|i| i.public && i.within.is_empty());
        names.extend(own.map(|i| (source.module(), i.name)));
        let (_, uses) = take_uses(&product_code(&source.code));
        for used in uses.iter().filter(|u| u.scope == UseScope::Public) {
            let mut path = match used.path.first().map(String::as_str) {
                Some("crate") => used.path[1..].to_vec(),
                Some("self") => module.iter().chain(&used.path[1..]).cloned().collect(),
                Some("super") => continue,
                _ => module.iter().chain(&used.path).cloned().collect(),
            };
            if used.name == "*" {
                next.push((path, false));
                continue;
            }
            if declared.contains(&path) {
                next.push((path.clone(), true));
            }
            if let Some(name) = path.pop() {
                names.insert((path.first().cloned().unwrap_or_else(|| source.module()), name));
            }
        }
    }
    (names, modules)
}

/// The guide shows the example that users run.
#[test]
fn the_page_on_models_shows_the_example() {
    let read =
        |name: &str| std::fs::read_to_string(super::source::root().join(name)).expect("it can be read");
    let example = read("examples/10_own_training.rs");
    let program = example.split_once("\n\n").expect("a head, then the program").1;
    assert!(read("docs/models.md").contains(program), "copy examples/10_own_training.rs into docs/models.md");
}
