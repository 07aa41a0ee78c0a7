//! Tests that read the source tree, which docs/architecture.md calls the house and its modules rooms: imports point
//! one way, no cycle passes through a folder, files stay small, every operator is in the catalog, names and words are plain, and
//! nothing is left undone.
//!
//! Rust allows modules to form cycles, so these tests read the sources themselves, without comments.

mod circles;
pub(crate) mod examples;
mod items;
mod links;
mod names;
mod page;
mod placements;
mod prose;
mod sizes;
pub(crate) mod source;
mod unsafe_code;
mod uses;
mod words;

use std::fs;

use isoshard::tensor::cuda;
use source::{Source, files, identifier, kernel_sources, product_code, root, sources};

/// Each module with the modules that it may name.
const ARROWS: [(&str, &[&str]); 19] = [
    ("base", &[]),
    ("module_path", &["base"]),
    ("error", &["base", "module_path"]),
    ("files", &["error"]),
    ("tensor", &["base", "error", "files"]),
    ("placement", &["error", "tensor"]),
    ("rng", &["base", "error", "tensor", "placement"]),
    ("ops", &["base", "error", "tensor", "placement", "rng"]),
    ("comm", &["base", "module_path", "error", "files", "tensor"]),
    ("dtensor", &["base", "error", "tensor", "placement", "rng", "ops", "comm"]),
    ("data", &["base", "error", "files", "tensor", "placement", "rng", "dtensor"]),
    ("checkpoint", &["base", "error", "files", "tensor", "placement", "comm", "dtensor"]),
    ("nn", &["base", "error", "tensor", "placement", "rng", "ops", "comm", "dtensor", "checkpoint"]),
    ("optim", &["error", "tensor", "placement", "rng", "ops", "comm", "dtensor", "checkpoint", "nn"]),
    ("testing", &["base", "error", "tensor", "placement", "rng", "ops", "comm", "dtensor", "nn"]),
    (
        "hugging_face",
        &["base", "error", "files", "tensor", "placement", "rng", "ops", "comm", "dtensor", "nn"],
    ),
    ("fsdp", &["error", "tensor", "placement", "comm", "dtensor", "nn"]),
    ("prelude", &["error", "tensor", "placement", "rng", "comm", "dtensor", "nn", "optim"]),
    (
        "lib",
        &[
            "error",
            "tensor",
            "placement",
            "rng",
            "ops",
            "comm",
            "dtensor",
            "checkpoint",
            "nn",
            "optim",
            "prelude",
            "testing",
            "hugging_face",
            "fsdp",
        ],
    ),
];
/// The names that lib.rs re-exports from the error module.
const ERRORS: [&str; 13] = [
    "BusyRank",
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
    "SharedError",
    "Wait",
];
/// The most lines of a CUDA file.
const KERNEL_LINES: usize = 600;

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

/// The rooms of the kernels' package in floors, the lowest first: a room names rooms of lower floors only.
const KERNEL_FLOORS: [&[&str]; 7] = [
    &["summation", "isa", "element", "cuda"],
    &["memory"],
    &["threads", "math"],
    &["num"],
    &["loops"],
    &["sums", "gemm"],
    &["rows", "order", "attention", "lib"],
];

#[test]
fn kernels_know_slices_and_no_tensor() {
    let mut wrong = Vec::new();
    let floor = |room: &str| KERNEL_FLOORS.iter().position(|rooms| rooms.contains(&room));
    for source in kernel_sources() {
        let room = source.module();
        let Some(from) = floor(&room) else {
            wrong.push(format!("{}: room {room} has no floor in KERNEL_FLOORS", source.path.display()));
            continue;
        };
        let product = product_code(&source.code);
        for word in product.split(|c: char| !c.is_alphanumeric() && c != '_') {
            if ["Tensor", "Shape", "DTensor", "isoshard"].contains(&word) {
                wrong.push(format!("{}: it names {word}", source.path.display()));
            }
        }
        for (line, to) in Source::new(source.path.clone(), product).names() {
            if to != room && floor(&to).is_some_and(|to| to >= from) {
                wrong.push(format!("{}:{line}: {room} names {to}", source.path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Files whose macros define the operators of another file, which uses them as rows of its table.
const MACROS: [&str; 1] = ["pointwise::formula"];

/// Checks that each file with an operator has samples, that the `mod.rs` of its folder gathers them, and so on up to the
/// catalog.
#[test]
fn every_operator_stands_in_the_catalog() {
    let all: Vec<Source> = sources().into_iter().filter(|s| s.module() == "ops").collect();
    let code_of = |path: &str| all.iter().find(|s| s.path.ends_with(path)).map_or("", |s| s.code.as_str());
    let is_gathered = |module: &str| match module.rsplit_once("::") {
        Some((room, file)) => {
            let room = code_of(&format!("src/ops/{}/mod.rs", room.replace("::", "/")));
            room.contains(&format!("{file}::samples()"))
        }
        None => code_of("src/ops/catalog.rs").contains(&format!("super::{module}::samples,")),
    };
    let mut missing = Vec::new();
    let mut operators = 0;
    for source in &all {
        // `impl<P: Pointwise> Op for P` and `impl Op for &T` define none.
        let defines = |line: &str| {
            let implemented = ["Op for ", "Pointwise for "].iter().find_map(|t| line.split_once(t));
            line.trim_start().starts_with("impl")
                && implemented.is_some_and(|(_, name)| name.starts_with('$') || identifier(name).len() > 1)
        };
        let module = source.module_path();
        let product = product_code(&source.code);
        let has_samples = product.contains("fn samples() -> Vec<Sample>");
        if product.lines().any(defines) && !MACROS.contains(&module.as_str()) {
            operators += 1;
            if !has_samples {
                missing.push(format!("{}: it has an operator and no samples", source.path.display()));
            }
        }
        if has_samples && !is_gathered(&module) {
            missing.push(format!("{}: nothing gathers {module}::samples", source.path.display()));
        }
    }
    assert!(operators > 50, "only {operators} operator files found");
    assert!(missing.is_empty(), "operators that no judge sees:\n{}", missing.join("\n"));
}

/// Kernels that belong to no operator's file: those of tensors, random fills and collectives.
const SHARED_KERNELS: [&str; 4] = ["copy", "fill", "fold", "random"];

#[test]
fn every_kernel_is_embedded_named_as_its_operator_and_includes_ours_alone() {
    // The package of the kernels is another one.
    let Ok(read) = fs::read_dir(root().join("kernels/cuda")) else {
        return println!("SKIPPED (a downloaded package): its kernels are not here");
    };
    let mut names: Vec<String> =
        read.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    // A file that is compiled for one dtype at a time is embedded as its variants; other variants include a header alone.
    let file_of = |(name, text): &(&str, &str)| {
        let is_there = |file: &String| names.iter().any(|n| n == file);
        let stem = name.strip_suffix(".cu").and_then(|stem| stem.rsplit_once('_')).map(|(stem, _)| stem);
        let of_dtype = stem.map(|stem| format!("{stem}.cu")).filter(is_there);
        let included = text.split('"').nth(1).filter(|_| text.lines().count() == 3).map(str::to_string);
        Some(name.to_string()).filter(is_there).or(of_dtype).or(included.filter(is_there))
    };
    let embedded = cuda::headers().iter().chain(cuda::programs());
    let mut found: Vec<String> = embedded
        .map(|source| file_of(source).unwrap_or_else(|| panic!("{}: no such file", source.0)))
        .collect();
    found.sort();
    found.dedup();
    assert_eq!(found, names, "kernels/build.rs lists what is in kernels/cuda/");
    let operators: Vec<String> = sources().iter().filter_map(Source::operator).collect();
    let mut wrong = Vec::new();
    for name in &names {
        let text = fs::read_to_string(root().join("kernels/cuda").join(name)).expect("sources can be read");
        if text.lines().count() > KERNEL_LINES {
            wrong.push(format!("kernels/cuda/{name}: more than {KERNEL_LINES} lines"));
        }
        if let Some(stem) = name.strip_suffix(".cu")
            && !SHARED_KERNELS.contains(&stem)
            && !operators_of(stem).any(|name| operators.contains(&name))
        {
            wrong.push(format!("kernels/cuda/{name}: belongs to no file of src/ops"));
        }
        for line in text.lines().filter(|l| l.trim_start().starts_with("#include")) {
            let header = line.split('"').nth(1).unwrap_or_default();
            if !names.iter().any(|n| n == header && n.ends_with(".cuh")) {
                wrong.push(format!("kernels/cuda/{name}: {line}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The operators that kernels of this name may belong to: `cast_f32` has those of `cast` from one dtype,
/// `attention_grad_fast_f16` those of `attention_grad`'s fast mode, and so on.
fn operators_of(stem: &str) -> impl Iterator<Item = String> {
    std::iter::successors(Some(stem), |stem| stem.rsplit_once('_').map(|(part, _)| part)).map(str::to_string)
}

/// Checks that no two operators share the number of a fault, and that each number in a CUDA source has its text.
#[test]
fn every_fault_has_a_code_of_its_own() {
    let numbers = |text: &str| text.chars().take_while(char::is_ascii_digit).collect::<String>().parse().ok();
    let mut codes: Vec<u32> = Vec::new();
    for source in sources().iter().filter(|s| s.module() == "ops") {
        let made = source.code.split("Fault::").skip(1).filter_map(|rest| rest.split_once('('));
        codes.extend(made.filter_map(|(_, arguments)| numbers(arguments.trim_start())));
    }
    assert!(codes.len() > 20 && !codes.contains(&0), "{codes:?}");
    let wrong: Vec<u32> =
        (0..codes.len()).filter(|&i| codes[..i].contains(&codes[i])).map(|i| codes[i]).collect();
    assert!(wrong.is_empty(), "two faults have the codes {wrong:?}");
    // The package of the kernels is another one.
    let Ok(text) = fs::read_to_string(root().join("kernels/cuda/parameters.cuh")) else {
        return println!("SKIPPED (a downloaded package): its kernels are not here");
    };
    let listed =
        text.split_once("enum").and_then(|(_, rest)| rest.split_once('}')).expect("an enum of codes").0;
    let listed: Vec<u32> = listed.split(" = ").skip(1).filter_map(numbers).collect();
    assert!(listed.len() > 5 && listed.iter().all(|code| codes.contains(code)), "{listed:?}");
}

#[test]
fn nothing_is_left_undone() {
    // Joined at run time, because this test reads this file too.
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

/// Checks the reader itself: the names that it must find and those that it must not.
#[test]
fn the_reader_sees_every_form() {
    let text = "use crate::{a::X, b::{c, d}, e};\n// use crate::no\nlet x = crate::f::g(\"crate::no\");\n\
                /* crate::no */ $crate::h!(); let c = '\"'; crate::i::j\n";
    let source = Source::new("src/x/y.rs", text);
    let names: Vec<(usize, String)> = source.names();
    let want = [(1, "a"), (1, "b"), (1, "e"), (3, "f"), (4, "h"), (4, "i")];
    assert_eq!(names, want.map(|(line, name)| (line, name.to_string())));
    assert_eq!(source.module(), "x");
    let up = Source::new("src/x/y.rs", "super::super::z::w");
    assert_eq!(up.names(), [(1, "z".to_string())], "two levels up from a file is the crate");
    let within = Source::new("src/x/y/z.rs", "use super::super::w;");
    assert_eq!(within.names(), []);
    let at = |path: &str| Source::new(path, "");
    let rooms =
        ["softmax/mod.rs", "softmax/grad.rs", "norm/rms_norm.rs", "sum.rs", "softmax/cuda.rs", "a/cpu/b.rs"];
    let rooms = rooms.map(|file| at(&format!("src/ops/{file}")));
    let paths = ["softmax", "softmax::grad", "norm::rms_norm", "sum", "softmax::cuda", "a::cpu::b"];
    assert_eq!(rooms.each_ref().map(Source::module_path), paths);
    let operators = [Some("softmax"), Some("softmax_grad"), Some("rms_norm"), Some("sum"), None, None];
    assert_eq!(rooms.each_ref().map(Source::operator), operators.map(|name| name.map(str::to_string)));
}
