//! Words that do not belong in a place: those of rooms above, and sentences that are no longer true.

use std::fs;

use super::prose::{pages, relative};
use super::source::{files, product_code, root, sources};

const DISTRIBUTION: [&str; 6] = ["rank", "ranks", "mesh", "meshes", "shard", "shards"];

/// `tensor` holds one process's tensors, so its comments name no ranks. Its code may: a kernel's rank is a number of dims.
#[test]
fn tensor_does_not_speak_of_ranks() {
    let comments = |path: &std::path::Path| {
        let text = fs::read_to_string(root().join(path)).expect("sources can be read");
        text.lines()
            .map(|l| l.split_once("//").map_or("", |(_, comment)| comment))
            .collect::<Vec<_>>()
            .join("\n")
    };
    refuse("tensor", &DISTRIBUTION, |source| comments(&source.path));
}

/// Examples in the documentation of `rng` may split tensors over meshes; its code may not.
#[test]
fn rng_does_not_know_meshes() {
    refuse("rng", &["mesh", "meshes"], |source| product_code(&source.code));
}

fn refuse(room: &str, words: &[&str], text: impl Fn(&super::source::Source) -> String) {
    let mut wrong = Vec::new();
    for source in sources().iter().filter(|s| s.module() == room) {
        for (number, line) in text(source).lines().enumerate() {
            let mut found = line.split(|c: char| !c.is_alphanumeric()).map(str::to_lowercase);
            if let Some(word) = found.find(|w| words.contains(&w.as_str())) {
                wrong.push(format!("{}:{}: {word}", source.path.display(), number + 1));
            }
        }
    }
    assert!(wrong.is_empty(), "words of the rooms above {room}:\n{}", wrong.join("\n"));
}

/// Sentences that were true once, with the text that tells what is true now.
const STALE: [(&str, &str); 6] = [
    ("MPI** is not built", "feature `mpi`"),
    ("MPI is not built", "feature `mpi`"),
    ("without data: not built", "`train_gpt --engine dry`"),
    ("second derivatives, which are refused", "`DTensor::grad`"),
    ("needs a Rust toolchain only", "`.ci/run` installs more"),
    ("`comm` is redrawn next", "it has been"),
];

#[test]
fn nothing_stale_is_said() {
    let code =
        ["src", "kernels", "examples", "benches"].iter().flat_map(|folder| files(&root().join(folder)));
    let pages = pages().into_iter().filter(|p| !p.ends_with("CHANGELOG.md"));
    let mut wrong = Vec::new();
    for path in code.chain(pages) {
        let text = fs::read_to_string(&path).expect("sources can be read");
        for (number, line) in text.lines().enumerate() {
            for (stale, now) in STALE.iter().filter(|(stale, _)| line.contains(stale)) {
                wrong.push(format!("{}:{}: {stale}: {now}", relative(&path), number + 1));
            }
        }
    }
    assert!(wrong.is_empty(), "no longer true:\n{}", wrong.join("\n"));
}
