//! The house: imports point one way, files stay small, every operator stands in the catalog, nothing is left undone.
//!
//! Rust lets modules form circles, so the sources are read here, without comments.

use std::fs;
use std::path::{Path, PathBuf};

use isoshard::tensor::cuda;

/// Every module with the modules it may name.
const ARROWS: [(&str, &[&str]); 10] = [
    ("error", &[]),
    ("tensor", &["error"]),
    ("placement", &["error", "tensor"]),
    ("rng", &["error", "tensor", "placement"]),
    ("ops", &["error", "tensor", "placement", "rng"]),
    ("comm", &["error", "tensor"]),
    ("dtensor", &["error", "tensor", "placement", "rng", "ops", "comm"]),
    ("nn", &["error", "tensor", "placement", "rng", "ops", "comm", "dtensor"]),
    ("optim", &["error", "tensor", "placement", "rng", "ops", "comm", "dtensor", "nn"]),
    ("lib", &["error", "tensor", "placement", "rng", "ops", "comm", "dtensor", "nn", "optim"]),
];
/// What lib.rs re-exports of the error module.
const ERRORS: [&str; 11] = [
    "CallId",
    "CommFault",
    "Divergence",
    "Error",
    "Failure",
    "LastCall",
    "MemoryFault",
    "NotFinite",
    "Refusal",
    "Result",
    "Wait",
];
const FILE_LINES: usize = 600;

/// A file under `src/`.
struct Source {
    path: PathBuf,
    /// Without comments and texts; line breaks stay.
    code: String,
    lines: usize,
}

#[test]
fn imports_point_one_way() {
    let mut wrong = Vec::new();
    for source in sources() {
        let from = source.module();
        let Some((_, allowed)) = ARROWS.iter().find(|(name, _)| *name == from) else {
            wrong.push(format!("{}: module {from} has no row in ARROWS", source.path.display()));
            continue;
        };
        for (line, to) in source.names() {
            let to = if ERRORS.contains(&to.as_str()) { "error" } else { &to };
            if to != from && !allowed.contains(&to) {
                wrong.push(format!("{}:{line}: {from} names {to}", source.path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "arrows that point the wrong way:\n{}", wrong.join("\n"));
}

#[test]
fn files_stay_small() {
    let long = sources().into_iter().filter(|s| s.lines > FILE_LINES);
    let long: Vec<String> = long.map(|s| format!("{}:{}", s.path.display(), s.lines)).collect();
    assert!(long.is_empty(), "more than {FILE_LINES} lines:\n{}", long.join("\n"));
}

#[test]
fn every_operator_stands_in_the_catalog() {
    let all = sources();
    let catalog = all.iter().find(|s| s.path.ends_with("ops/catalog.rs")).expect("there is a catalog");
    let mut missing = Vec::new();
    let mut operators = 0;
    for source in all.iter().filter(|s| s.module() == "ops") {
        // `impl<P: Pointwise> Op for P` and `impl Op for &T` define none.
        let defines = |line: &str| {
            let implemented = ["Op for ", "Pointwise for "].iter().find_map(|t| line.split_once(t));
            line.trim_start().starts_with("impl")
                && implemented.is_some_and(|(_, of)| of.starts_with('$') || identifier(of).len() > 1)
        };
        let product = product_code(&source.code);
        let Some(at) = product.lines().position(defines) else { continue };
        operators += 1;
        let module = source.module_path();
        if !catalog.code.contains(&format!("super::{module}::samples,")) {
            missing.push(format!("{}:{}: no {module}::samples in catalog.rs", source.path.display(), at + 1));
        }
    }
    assert!(operators > 5, "only {operators} operator files found");
    assert!(missing.is_empty(), "operators that no judge sees:\n{}", missing.join("\n"));
}

/// Kernels that belong to no operator's file: what tensors, random fills and collectives do on a device.
const SHARED_KERNELS: [&str; 4] = ["copy", "fill", "fold", "random"];

#[test]
fn every_kernel_is_embedded_named_as_its_operator_and_includes_ours_alone() {
    let read = fs::read_dir(root().join("kernels")).expect("there are kernels");
    let mut names: Vec<String> =
        read.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    let embedded = cuda::headers().iter().chain(cuda::programs());
    let mut found: Vec<String> = embedded.map(|(name, _)| name.to_string()).collect();
    found.sort();
    assert_eq!(found, names, "src/tensor/cuda/sources.rs lists what is in kernels/");
    let operators: Vec<String> = sources().iter().filter_map(Source::operator).collect();
    let mut wrong = Vec::new();
    for name in &names {
        let text = fs::read_to_string(root().join("kernels").join(name)).expect("sources can be read");
        if text.lines().count() > FILE_LINES {
            wrong.push(format!("kernels/{name}: more than {FILE_LINES} lines"));
        }
        if let Some(stem) = name.strip_suffix(".cu")
            && !SHARED_KERNELS.contains(&stem)
            && !operators_of(stem).any(|name| operators.contains(&name))
        {
            wrong.push(format!("kernels/{name}: belongs to no file of src/ops"));
        }
        for line in text.lines().filter(|l| l.trim_start().starts_with("#include")) {
            let header = line.split('"').nth(1).unwrap_or_default();
            if !names.iter().any(|n| n == header && n.ends_with(".cuh")) {
                wrong.push(format!("kernels/{name}: {line}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The operators that kernels of this name may belong to: `cast_f32` holds those of `cast` from one dtype,
/// `attention_fast` another way of `attention`'s.
fn operators_of(stem: &str) -> impl Iterator<Item = String> {
    let part_of = stem.rsplit_once('_').map(|(operator, _)| operator);
    [Some(stem), part_of].into_iter().flatten().map(str::to_string)
}

#[test]
fn nothing_is_left_undone() {
    // Put together here, so that this file may be read as well.
    let code = [["todo", "!"], ["unimplemented", "!"], ["#[", "ignore"]].map(|parts| parts.concat());
    let anywhere = ["TO", "FIX", "XX"].iter().zip(["DO", "ME", "X"]).map(|(a, b)| format!("{a}{b}"));
    let anywhere: Vec<String> = anywhere.collect();
    let mut left = Vec::new();
    for path in
        ["src", "kernels", "tests", "examples", "benches"].iter().flat_map(|dir| files(&root().join(dir)))
    {
        let text = fs::read_to_string(&path).expect("sources can be read");
        for (number, line) in text.lines().enumerate() {
            let word = |w: &String| line.split(|c: char| !c.is_alphanumeric()).any(|part| part == w);
            if code.iter().any(|c| line.contains(c.as_str())) || anywhere.iter().any(word) {
                left.push(format!("{}:{}: {}", path.display(), number + 1, line.trim()));
            }
        }
    }
    assert!(left.is_empty(), "left undone:\n{}", left.join("\n"));
}

/// The reader itself: what it must see and what it must not.
#[test]
fn the_reader_sees_every_form() {
    let text = "use crate::{a::X, b::{c, d}, e};\n// use crate::no\nlet x = crate::f::g(\"crate::no\");\n\
                /* crate::no */ $crate::h!(); let c = '\"'; crate::i::j\n";
    let source = Source { path: "src/x/y.rs".into(), code: strip(text), lines: 4 };
    let names: Vec<(usize, String)> = source.names();
    let want = [(1, "a"), (1, "b"), (1, "e"), (3, "f"), (4, "h"), (4, "i")];
    assert_eq!(names, want.map(|(line, name)| (line, name.to_string())));
    assert_eq!(source.module(), "x");
    let up = Source { path: "src/x/y.rs".into(), code: "super::super::z::w".into(), lines: 1 };
    assert_eq!(up.names(), [(1, "z".to_string())], "two levels up from a file is the crate");
    let within = Source { path: "src/x/y/z.rs".into(), code: "use super::super::w;".into(), lines: 1 };
    assert_eq!(within.names(), []);
    let at = |path: &str| Source { path: path.into(), code: String::new(), lines: 0 };
    let rooms =
        ["softmax/mod.rs", "softmax/grad.rs", "norm/rms_norm.rs", "sum.rs", "softmax/cuda.rs", "a/cpu/b.rs"];
    let rooms = rooms.map(|file| at(&format!("src/ops/{file}")));
    let paths = ["softmax", "softmax::grad", "norm::rms_norm", "sum", "softmax::cuda", "a::cpu::b"];
    assert_eq!(rooms.each_ref().map(Source::module_path), paths);
    let operators = [Some("softmax"), Some("softmax_grad"), Some("rms_norm"), Some("sum"), None, None];
    assert_eq!(rooms.each_ref().map(Source::operator), operators.map(|name| name.map(str::to_string)));
}

impl Source {
    /// The part of the house that the file belongs to.
    fn module(&self) -> String {
        let parts = self.parts();
        parts.first().map_or_else(String::new, |p| p.trim_end_matches(".rs").to_string())
    }

    /// The module's path inside its part of the house: `attention::grad`, and `attention` of `attention/mod.rs`.
    fn module_path(&self) -> String {
        let mut parts = self.parts();
        parts.remove(0);
        let file = parts.pop().expect("a file has a name");
        parts.extend((file != "mod.rs").then(|| file.trim_end_matches(".rs").to_string()));
        parts.join("::")
    }

    /// The operator that a file of `ops` is named after: its own name, or its room's if it is the room's `mod.rs` or
    /// `grad.rs`.
    fn operator(&self) -> Option<String> {
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
    fn parts(&self) -> Vec<String> {
        let parts = self.path.iter().map(|p| p.to_string_lossy().into_owned());
        parts.skip_while(|p| p != "src").skip(1).collect()
    }

    /// Every name right behind `crate::`, and behind as many `super::` as lead to the crate, with its line.
    fn names(&self) -> Vec<(usize, String)> {
        let parts = self.parts();
        // mod.rs stands for its folder; a module `tests` inside a file may go one further up.
        let depth = parts.len() - usize::from(parts.last().is_some_and(|p| p == "mod.rs"));
        let up = "super::".repeat(depth.max(1));
        let mut names = Vec::new();
        for (at, _) in self.code.match_indices("crate::") {
            self.names_at(at + "crate::".len(), &mut names);
        }
        for (at, _) in self.code.match_indices(&up) {
            let inner = product_code(&self.code).len() <= at;
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

fn identifier(text: &str) -> String {
    text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

/// The code before a file's unit tests.
fn product_code(code: &str) -> &str {
    code.split("#[cfg(test)]").next().unwrap_or(code)
}

/// `text` with comments, texts and quoted characters blanked; line breaks stay.
fn strip(text: &str) -> String {
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

fn sources() -> Vec<Source> {
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path).expect("sources can be read");
        let path = path.strip_prefix(root()).expect("below the root").to_path_buf();
        Source { code: strip(&text), lines: text.lines().count(), path }
    };
    files(&root().join("src")).into_iter().map(read).collect()
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All Rust and CUDA files below `dir`, by name.
fn files(dir: &Path) -> Vec<PathBuf> {
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
