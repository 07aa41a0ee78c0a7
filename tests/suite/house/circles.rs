//! No cycles of files: a file names no file that names it, directly or through other files.
//!
//! `use super::X` and `crate::room::X` mean the file that defines `X`, even if several `mod.rs` re-export it. A
//! `mod.rs` counts as a file if it defines something itself. Code that only tests compile does not count.

use std::collections::{BTreeMap, BTreeSet};

use super::source::{Source, identifier, kernel_sources, product_code, sources};
use super::uses::{Module, Use, UseScope, module_of, take_uses, words};

#[test]
fn no_file_stands_in_a_circle() {
    for house in [House::new(sources()), House::new(kernel_sources())] {
        let circle = |circle: &BTreeSet<usize>| {
            format!("a circle of {} files:\n{}", circle.len(), house.arrows_within(circle).join("\n"))
        };
        let wrong: Vec<String> = house.circles().iter().map(circle).collect();
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }
}

/// The folders of a room in floors, the lowest first: a file names files of its own folder and of lower floors only.
const FLOORS: [(&str, &[&[&str]]); 3] = [
    (
        "comm",
        &[
            &["calls", "network", "launch", "deadline"],
            &["diagnostics", "machine"],
            &["coordinator"],
            &["transport"],
            &["api"],
        ],
    ),
    (
        "dtensor",
        &[
            &["mesh"],
            &["redistribute"],
            &["plan"],
            &["tensor"],
            &["call"],
            &["autograd"],
            &["methods", "bridge"],
        ],
    ),
    ("nn", &[&["plan"], &["params"], &["forward"], &["layers"], &["decoder"]]),
];

#[test]
fn no_arrow_between_folders_runs_up() {
    let house = House::new(sources());
    let floor = |i: usize| {
        let module = &house.files[i].module;
        let (room, folder) = (module.first()?, module.get(1)?);
        let (_, floors) = FLOORS.iter().find(|(name, _)| name == room)?;
        let floor = floors.iter().position(|folders| folders.contains(&folder.as_str()));
        let floor = floor.unwrap_or_else(|| panic!("{room}/{folder} has no floor in FLOORS"));
        Some((floor, (room, folder)))
    };
    let inside = house.arrows.iter().filter_map(|(&(i, j), by)| Some((i, j, by, floor(i)?, floor(j)?)));
    let inside = inside.filter(|(.., from, to)| from.1.0 == to.1.0);
    let up = inside.filter(|(.., from, to)| from.1 != to.1 && from.0 <= to.0);
    let up: Vec<String> =
        up.map(|(i, j, by, ..)| format!("{} -> {} by {by}", house.name(i), house.name(j))).collect();
    assert!(up.is_empty(), "arrows that run up:\n{}", up.join("\n"));
}

#[test]
fn names_are_followed_to_the_files_that_define_them() {
    let file = |path: &str, code: &str| Source::new(path, code);
    let house = House::new(vec![
        file("src/lib.rs", "pub mod a; mod e; pub use e::Error;"),
        file("src/e.rs", "pub enum Error {}"),
        file("src/a/mod.rs", "mod x; mod y; mod z; pub use x::{X, inner::Deep}; pub(crate) use y::Y as Why;"),
        file(
            "src/a/x.rs",
            "use super::Why; pub struct X; #[cfg(test)] mod tests { use super::super::z::Z; }",
        ),
        file("src/a/y.rs", "use crate::{Error, a}; fn f() { let x = a::X; }"),
        file(
            "src/a/z.rs",
            "pub struct Z; #[cfg(test)] use super::Why; fn g(e: crate::Error) { super::x::h() }",
        ),
    ]);
    let arrows: Vec<(String, String)> =
        house.arrows.keys().map(|&(i, j)| (house.name(i), house.name(j))).collect();
    let want = [("a/x", "a/y"), ("a/y", "e"), ("a/y", "a/x"), ("a/z", "e"), ("a/z", "a/x")];
    let want: BTreeSet<(String, String)> = want.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect();
    assert_eq!(arrows.into_iter().collect::<BTreeSet<_>>(), want);
    let circles: Vec<Vec<String>> =
        house.circles().iter().map(|c| c.iter().map(|&i| house.name(i)).collect()).collect();
    assert_eq!(circles, [["a/x", "a/y"]]);
}

/// All files of the library, and the files that each of them names.
struct House {
    files: Vec<File>,
    modules: BTreeMap<Module, usize>,
    /// Each pair (file, file that it names), with one such name.
    arrows: BTreeMap<(usize, usize), String>,
}

struct File {
    module: Module,
    /// The code without tests and without `use`.
    code: String,
    uses: Vec<Use>,
    /// False for a `mod.rs` that only re-exports names.
    defines: bool,
}

impl House {
    fn new(sources: Vec<Source>) -> House {
        let only_tests: Vec<Module> = sources.iter().flat_map(test_modules).collect();
        let read = sources.iter().map(File::read);
        let files: Vec<File> = read.filter(|f| !only_tests.iter().any(|t| f.module.starts_with(t))).collect();
        let modules = files.iter().enumerate().map(|(i, f)| (f.module.clone(), i)).collect();
        let mut house = House { files, modules, arrows: BTreeMap::new() };
        for i in 0..house.files.len() {
            for path in house.files[i].paths() {
                if let Some(j) = house.follow(i, &path, 0).filter(|&j| j != i && house.files[j].defines) {
                    house.arrows.entry((i, j)).or_insert_with(|| path.join("::"));
                }
            }
        }
        house.arrows.retain(|(i, _), _| house.files[*i].defines);
        house
    }

    fn name(&self, i: usize) -> String {
        self.files[i].module.join("/")
    }

    /// Returns the file that defines the last name of `path` as read in file `from`; `None` for names of other crates.
    fn follow(&self, from: usize, path: &[String], depth: usize) -> Option<usize> {
        let mut at = self.files[from].module.clone();
        let mut rest = path;
        match path.first()?.as_str() {
            "crate" => (at, rest) = (Vec::new(), &path[1..]),
            "self" => rest = &path[1..],
            "super" => {
                while rest.first().is_some_and(|s| s == "super") {
                    at.pop()?;
                    rest = &rest[1..];
                }
            }
            _ => {
                let first = &path[0];
                let own = self.files[from].uses.iter().find(|u| u.name == *first && u.path[..] != path[..]);
                at.push(first.clone());
                if self.modules.contains_key(&at) {
                    rest = &path[1..];
                } else {
                    let full: Vec<String> = own?.path.iter().chain(&path[1..]).cloned().collect();
                    return if depth < 20 { self.follow(from, &full, depth + 1) } else { None };
                }
            }
        }
        let mut file = *self.modules.get(&at)?;
        for (k, name) in rest.iter().enumerate() {
            at.push(name.clone());
            if let Some(&inner) = self.modules.get(&at) {
                file = inner;
                continue;
            }
            let handed = |u: &&Use| u.name == *name && depth < 20;
            if let Some(u) = self.files[file].uses.iter().find(handed) {
                let full: Vec<String> = u.path.iter().chain(&rest[k + 1..]).cloned().collect();
                return self.follow(file, &full, depth + 1).or(Some(file));
            }
            return Some(file);
        }
        Some(file)
    }

    /// Returns the sets of two or more files that all lead to one another, in order.
    fn circles(&self) -> Vec<BTreeSet<usize>> {
        let n = self.files.len();
        let reach: Vec<BTreeSet<usize>> = (0..n)
            .map(|i| {
                let (mut seen, mut next) = (BTreeSet::new(), vec![i]);
                while let Some(i) = next.pop() {
                    next.extend(
                        self.arrows
                            .range((i, 0)..(i + 1, 0))
                            .map(|(&(_, j), _)| j)
                            .filter(|&j| seen.insert(j)),
                    );
                }
                seen
            })
            .collect();
        let circle = |i: usize| reach[i].iter().copied().filter(|&j| reach[j].contains(&i)).collect();
        let mut circles: Vec<BTreeSet<usize>> =
            (0..n).map(circle).filter(|c: &BTreeSet<usize>| c.len() > 1).collect();
        circles.sort();
        circles.dedup();
        circles
    }

    fn arrows_within(&self, circle: &BTreeSet<usize>) -> Vec<String> {
        let inside = self.arrows.iter().filter(|((i, j), _)| circle.contains(i) && circle.contains(j));
        inside.map(|((i, j), by)| format!("  {} -> {} by {by}", self.name(*i), self.name(*j))).collect()
    }
}

impl File {
    fn read(source: &Source) -> File {
        let product = product_code(&source.code);
        let (code, uses) = take_uses(&product);
        let is_mod = source.path.ends_with("mod.rs") || source.path.ends_with("lib.rs");
        let items = [
            "fn ",
            "struct ",
            "enum ",
            "trait ",
            "impl ",
            "impl<",
            "const ",
            "static ",
            "type ",
            "macro_rules!",
        ];
        let defines =
            !is_mod || words(&code).any(|(at, _)| items.iter().any(|item| code[at..].starts_with(item)));
        File { module: module_of(source), code, uses, defines }
    }

    /// Returns every path that the file names: those of its `use`s, unless it only re-exports them, and those in its
    /// code.
    fn paths(&self) -> Vec<Vec<String>> {
        let mentioned: BTreeSet<&str> = words(&self.code).map(|(_, word)| word).collect();
        let used = |u: &&Use| u.scope == UseScope::Private || mentioned.contains(u.name.as_str());
        let mut paths: Vec<Vec<String>> = self.uses.iter().filter(used).map(|u| u.path.clone()).collect();
        let mut end = 0;
        for (at, word) in words(&self.code) {
            if at < end || self.code[..at].ends_with("::") {
                continue;
            }
            let mut path = vec![word.to_string()];
            end = at + word.len();
            while let Some(next) =
                self.code[end..].strip_prefix("::").map(identifier).filter(|n| !n.is_empty())
            {
                end += 2 + next.len();
                path.push(next);
            }
            if path.len() > 1 {
                paths.push(path);
            }
        }
        paths
    }
}

/// Returns the modules that a file declares for tests only.
fn test_modules(source: &Source) -> Vec<Module> {
    let marked =
        source.code.split("#[cfg(test)]").skip(1).chain(source.code.split("#[cfg(all(test,").skip(1));
    let declared = marked.filter_map(|rest| {
        let item = rest.split_once("mod ")?;
        let only_attributes =
            item.0.chars().all(|c| "()]".contains(c) || !c.is_alphanumeric()) || item.0.contains(")]");
        let name = identifier(item.1);
        (only_attributes && item.1[name.len()..].starts_with(';')).then_some(name)
    });
    declared.map(|name| module_of(source).into_iter().chain([name]).collect()).collect()
}
