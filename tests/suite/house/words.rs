//! Rooms do not speak of what is above them.

use std::fs;

use super::source::{product_code, root, sources};

const DISTRIBUTION: [&str; 6] = ["rank", "ranks", "mesh", "meshes", "shard", "shards"];

/// Not in its comments: one process's tensors. In code the rank of a kernel's operand is its number of dims.
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

/// Not in its code; examples in its documentation cut tensors over meshes.
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
