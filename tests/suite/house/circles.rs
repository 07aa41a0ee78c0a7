//! No cycle of imports passes through a folder: if files below a folder name a neighbour of it, a file or another folder,
//! the neighbour leads back to it neither directly nor through others. Files of one folder may name each other.
//!
//! `use super::X` and `crate::room::X` mean the file that defines `X`, even if several `mod.rs` re-export it. A
//! `mod.rs` counts as a file if it defines something itself. Code that only tests compile does not count.

use std::collections::{BTreeMap, BTreeSet};

use super::source::{Source, identifier, kernel_sources, product_code, sources};
use super::uses::{Module, Use, UseScope, module_of, take_uses, words};

/// The folders that have such cycles among their children, with the number of imports in them. The numbers may only fall.
const CIRCLES: [(&str, usize); 2] = [("src/ops", 69), ("src/ops/attention", 6)];

#[test]
fn no_circle_passes_through_a_folder() {
    let mut found = BTreeMap::<String, Vec<String>>::new();
    for circle in [House::new(sources()), House::new(kernel_sources())].iter().flat_map(House::circles) {
        found.entry(circle.folder).or_default().extend(circle.arrows);
    }
    let mut wrong = Vec::new();
    for (folder, arrows) in &found {
        let most = CIRCLES.iter().find(|(name, _)| name == folder).map_or(0, |(_, most)| *most);
        if arrows.len() > most {
            let (len, arrows) = (arrows.len(), arrows.join("\n"));
            wrong.push(format!("{folder}: {len} imports in circles, at most {most}:\n{arrows}"));
        }
    }
    for (folder, most) in CIRCLES {
        let len = found.get(folder).map_or(0, Vec::len);
        if len < most {
            wrong.push(format!("{folder}: {len} imports in circles: lower its number in CIRCLES"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The folders of a room in floors, the lowest first: a file names files of its own folder and of lower floors only.
const FLOORS: [(&str, &[&[&str]]); 7] = [
    (
        "tensor",
        &[
            &["byte_hash", "device", "dtype", "fold_order", "meta", "no_room", "regular_file"],
            &["lists"],
            &["shape", "cuda_device"],
            &["storage"],
            &["result_places"],
            &["dense"],
            &["elements", "mapped", "reduce_op"],
            &["cpu", "cuda"],
            &["devices"],
        ],
    ),
    (
        "rng",
        &[
            &["counter"],
            &["distributions"],
            &["orthogonal", "permutation", "stream"],
            &["cuda"],
            &["regions"],
            &["init"],
        ],
    ),
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
    ("checkpoint", &[&["format", "state_tree"], &["saving", "loading"], &["series"]]),
    // A room of the kernels' package.
    (
        "gemm",
        &[
            &["contraction", "matrix"],
            &["tiles"],
            &["epilogue"],
            &["block_loops"],
            &["thin"],
            &["threads"],
            &["product"],
            &["batched"],
        ],
    ),
];

#[test]
fn no_arrow_between_folders_runs_up() {
    for house in [House::new(sources()), House::new(kernel_sources())] {
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
    assert!(house.circles().is_empty(), "a/x and a/y are files of one folder");
}

#[test]
fn circles_are_found_through_folders_and_allowed_within_one() {
    let house = |files: &[(&str, &str)]| {
        House::new(files.iter().map(|(path, code)| Source::new(*path, *code)).collect())
    };
    let circles = |files: &[(&str, &str)]| -> Vec<String> {
        let told =
            |c: Circle| format!("{}: {}", c.folder, c.nodes.into_iter().collect::<Vec<String>>().join(" "));
        house(files).circles().into_iter().map(told).collect()
    };
    let within = [
        ("src/lib.rs", "mod a;"),
        ("src/a/mod.rs", "mod x; mod y;"),
        ("src/a/x.rs", "use super::y::Y; pub struct X;"),
        ("src/a/y.rs", "use super::x::X; pub struct Y;"),
    ];
    assert_eq!(circles(&within), [""; 0]);
    // No file leads to itself here, but each folder does.
    let between = [
        ("src/lib.rs", "mod a;"),
        ("src/a/mod.rs", "mod b; mod c; mod d; pub use b::one::One;"),
        ("src/a/b/mod.rs", "pub mod one; pub mod two;"),
        ("src/a/b/one.rs", "pub struct One;"),
        ("src/a/b/two.rs", "use crate::a::c::three::Three; pub struct Two;"),
        ("src/a/c/mod.rs", "pub mod three; pub mod four;"),
        ("src/a/c/three.rs", "pub struct Three;"),
        ("src/a/c/four.rs", "use crate::a::One; pub struct Four;"),
        ("src/a/d.rs", "use super::b::two::Two; #[cfg(test)] use super::c::four::Four;"),
    ];
    assert_eq!(circles(&between), ["src/a: b/ c/"]);
    // A folder and a file beside it.
    let beside = [
        ("src/lib.rs", "mod b; mod d;"),
        ("src/b/mod.rs", "pub mod one; pub mod two;"),
        ("src/b/one.rs", "pub struct One;"),
        ("src/b/two.rs", "fn two() { crate::d::d() }"),
        ("src/d.rs", "pub fn d() -> crate::b::one::One { b() }"),
    ];
    assert_eq!(circles(&beside), ["src: b/ d"]);
    let arrows = house(&beside).circles().pop().map(|c| c.arrows);
    assert_eq!(
        arrows.unwrap_or_default(),
        ["  b/two -> d by crate::d::d", "  d -> b/one by crate::b::one::One"]
    );
}

/// All files of the library, and the files that each of them names.
struct House {
    files: Vec<File>,
    modules: BTreeMap<Module, usize>,
    /// Each pair (file, file that it names), with one such name.
    arrows: BTreeMap<(usize, usize), String>,
}

/// Children of a folder that all lead to one another, at least one of them a folder.
struct Circle {
    folder: String,
    /// Names of files, and of folders with a `/` at their end.
    nodes: BTreeSet<String>,
    /// The imports between the nodes.
    arrows: Vec<String>,
}

struct File {
    /// The folders from the repository's root, then the file.
    path: Vec<String>,
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
            return match self.files[file].defines_item(name) {
                true => Some(file),
                false => self.follow_glob(file, &rest[k..], depth).or(Some(file)),
            };
        }
        Some(file)
    }

    /// Returns the file that defines the last name of `path` if a `use m::*` of `file` brings it there.
    fn follow_glob(&self, file: usize, path: &[String], depth: usize) -> Option<usize> {
        let globs = self.files[file].uses.iter().filter(|u| u.name == "*" && depth < 20);
        let followed = globs.filter_map(|u| {
            let full: Vec<String> = u.path.iter().chain(path).cloned().collect();
            self.follow(file, &full, depth + 1)
        });
        followed.into_iter().find(|&j| self.files[j].defines_item(&path[0]))
    }

    /// Returns the circles that pass through a folder, by the folder in which they lie.
    fn circles(&self) -> Vec<Circle> {
        let above = |f: &File| (1..f.path.len()).map(|n| f.path[..n].to_vec()).collect::<Vec<_>>();
        let folders: BTreeSet<Vec<String>> = self.files.iter().flat_map(above).collect();
        folders.iter().flat_map(|folder| self.circles_in(folder)).collect()
    }

    /// Returns the circles among the children of a folder: its files, and its folders with all that is below them.
    fn circles_in(&self, folder: &[String]) -> Vec<Circle> {
        let child = |i: usize| self.files[i].child_of(folder);
        let between = |&(i, j): &(usize, usize)| Some((child(i)?, child(j)?)).filter(|(a, b)| a != b);
        let mut next = BTreeMap::<String, BTreeSet<String>>::new();
        for (from, to) in self.arrows.keys().filter_map(between) {
            next.entry(from).or_default().insert(to);
        }
        let reach = |from: &String| {
            let (mut seen, mut left) = (BTreeSet::new(), vec![from]);
            while let Some(node) = left.pop() {
                left.extend(next.get(node).into_iter().flatten().filter(|to| seen.insert((*to).clone())));
            }
            seen
        };
        let reached: BTreeMap<&String, BTreeSet<String>> = next.keys().map(|n| (n, reach(n))).collect();
        let leads_to = |from: &String, to: &String| reached.get(from).is_some_and(|r| r.contains(to));
        let circle = |n: &&String| reached[*n].iter().filter(|m| leads_to(m, n)).cloned().collect();
        let sets: BTreeSet<BTreeSet<String>> = reached.keys().map(circle).collect();
        let through_folder = sets.into_iter().filter(|c| c.len() > 1 && c.iter().any(|n| n.ends_with('/')));
        let told = |nodes: BTreeSet<String>| {
            let inside = |ends: &(usize, usize)| {
                between(ends).is_some_and(|(a, b)| nodes.contains(&a) && nodes.contains(&b))
            };
            let arrows = self.arrows.iter().filter(|(ends, _)| inside(ends));
            let arrows =
                arrows.map(|(&(i, j), by)| format!("  {} -> {} by {by}", self.name(i), self.name(j)));
            Circle { folder: folder.join("/"), arrows: arrows.collect(), nodes }
        };
        through_folder.map(told).collect()
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
        let path = source.path.iter().map(|p| p.to_string_lossy().into_owned()).collect();
        File { path, module: module_of(source), code, uses, defines }
    }

    /// Returns the child of `folder` that the file is, or is in: `x`, or `x/`.
    fn child_of(&self, folder: &[String]) -> Option<String> {
        match self.path.strip_prefix(folder)? {
            [file] => Some(file.trim_end_matches(".rs").to_string()),
            [child, ..] => Some(format!("{child}/")),
            [] => None,
        }
    }

    /// Returns true if the file has an item of that name.
    fn defines_item(&self, name: &str) -> bool {
        let items = ["fn", "struct", "enum", "trait", "type", "const", "static", "macro_rules!"];
        words(&self.code).any(|(at, word)| {
            word == name && items.iter().any(|item| self.code[..at].trim_end().ends_with(item))
        })
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
