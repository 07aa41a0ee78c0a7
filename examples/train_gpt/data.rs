//! Text, its characters as a vocabulary, and batches that depend on seed and step alone.

use std::fs;
use std::path::{Path, PathBuf};

use isoshard::rng::{Draw, Generator, bits64};
use isoshard::tensor::Tensor;
use isoshard::{Error, Result};

/// This repository's own text.
const OWN_TEXT: &[&str] = &[
    include_str!("../../src/error.rs"),
    include_str!("../../src/tensor/dense.rs"),
    include_str!("../../src/tensor/shape.rs"),
    include_str!("../../src/tensor/views.rs"),
    include_str!("../../src/placement/mesh.rs"),
    include_str!("../../src/placement/layout.rs"),
    include_str!("../../src/placement/spec.rs"),
    include_str!("../../src/placement/region.rs"),
    include_str!("../../src/comm/api/group.rs"),
    include_str!("../../src/comm/api/spmd.rs"),
    include_str!("../../src/ops/record.rs"),
    include_str!("../../src/dtensor/device_mesh.rs"),
    include_str!("../../src/dtensor/methods.rs"),
    include_str!("../../src/dtensor/plan.rs"),
    include_str!("../../src/dtensor/tape.rs"),
    include_str!("../../src/dtensor/tensor.rs"),
    include_str!("../../src/nn/forward.rs"),
    include_str!("../../src/nn/gpt.rs"),
    include_str!("../../src/nn/params.rs"),
    include_str!("../../src/nn/plan.rs"),
];

/// A text as tokens: each character's place in the sorted vocabulary.
#[derive(Debug)]
pub struct Corpus {
    vocabulary: Vec<char>,
    tokens: Vec<i64>,
    /// The tokens from here on are for validation.
    cut: usize,
}

/// The two parts of a corpus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The first nine tenths.
    Training,
    /// The last tenth.
    Validation,
}

/// One part's batches.
#[derive(Debug)]
pub struct Batches<'a> {
    tokens: &'a [i64],
    draw: Draw,
    block: usize,
    batch: usize,
}

impl Corpus {
    /// A file's text, that of all files in a directory, or this repository's own.
    ///
    /// # Errors
    /// Refuses what cannot be read, is not UTF-8, or has parts shorter than `block` characters and one more.
    pub fn read(path: Option<&Path>, block: usize) -> Result<Corpus> {
        let text = match path {
            Some(path) => read_all(path)?,
            None => OWN_TEXT.concat(),
        };
        let corpus = Corpus::new(&text);
        let shortest = corpus.cut.min(corpus.tokens.len() - corpus.cut);
        if shortest <= block {
            return Err(Error::invalid(
                "data",
                format!("training and validation text need more than {block} characters each (--block)"),
                format!(
                    "{} characters, of which the last {shortest} are for validation",
                    corpus.tokens.len()
                ),
                "bring more text or take a smaller block",
            ));
        }
        Ok(corpus)
    }

    fn new(text: &str) -> Corpus {
        let mut vocabulary: Vec<char> = text.chars().collect();
        vocabulary.sort_unstable();
        vocabulary.dedup();
        let place = |c| vocabulary.binary_search(&c).expect("every character is in the vocabulary") as i64;
        let tokens: Vec<i64> = text.chars().map(place).collect();
        let cut = tokens.len() - tokens.len() / 10;
        Corpus { vocabulary, tokens, cut }
    }

    /// The number of different characters.
    pub fn vocabulary_len(&self) -> usize {
        self.vocabulary.len()
    }

    /// A token's character.
    pub fn character(&self, token: usize) -> char {
        self.vocabulary[token]
    }

    /// The token to begin a sample with: the line feed, or the first where there is none.
    pub fn first_token(&self) -> i64 {
        self.vocabulary.binary_search(&'\n').unwrap_or(0) as i64
    }

    /// The batches of `batch` sequences of `block` tokens that `seed` makes of a part.
    pub fn batches(&self, part: Part, seed: u64, block: usize, batch: usize) -> Batches<'_> {
        let (tokens, name) = match part {
            Part::Training => (&self.tokens[..self.cut], "data"),
            Part::Validation => (&self.tokens[self.cut..], "validation"),
        };
        Batches { tokens, draw: Generator::new(seed).child(name).next_draw(), block, batch }
    }
}

impl Batches<'_> {
    /// Batch `number`: tokens and the tokens that follow each, both i64 `[batch, block]`.
    ///
    /// A row starts at a place drawn by its number among all rows of all batches, so that two batches of 6 are one of 12.
    pub fn at(&self, number: usize) -> Result<(Tensor, Tensor)> {
        let mut words = vec![0; self.batch];
        bits64(self.draw, (number * self.batch) as u64, &mut words);
        let starts = (self.tokens.len() - self.block) as u128;
        let starts = words.iter().map(|&word| ((u128::from(word) * starts) >> 64) as usize);
        let rows: Vec<&[i64]> = starts.map(|s| &self.tokens[s..s + self.block + 1]).collect();
        let stack = |from: usize| {
            let cut: Vec<&[i64]> = rows.iter().map(|row| &row[from..from + self.block]).collect();
            Tensor::from_vec(cut.concat(), [self.batch, self.block])
        };
        Ok((stack(0)?, stack(1)?))
    }
}

/// The text of a file, or of a directory's files in the order of their names.
fn read_all(path: &Path) -> Result<String> {
    let failed = |reason: std::io::Error| Error::io("data", path, reason);
    if !path.is_dir() {
        return fs::read_to_string(path).map_err(failed);
    }
    let entries = fs::read_dir(path).map_err(failed)?.map(|entry| Ok(entry?.path()));
    let mut paths: Vec<PathBuf> = entries.collect::<std::io::Result<_>>().map_err(failed)?;
    paths.sort();
    paths.iter().map(|p| read_all(p)).collect()
}
