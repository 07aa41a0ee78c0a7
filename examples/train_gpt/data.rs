//! The text, its characters as a vocabulary, and batches that depend on seed and step alone.

use std::fs;
use std::path::{Path, PathBuf};

use isoshard::rng::{Draw, Generator, bits64};
use isoshard::tensor::Tensor;
use isoshard::{Error, Result};

/// The pages of this project's documentation as they were in November 2026, plain ASCII. The file never changes, so the default
/// run always prints the same losses.
const HANDBOOK: &str = include_str!("handbook.txt");

/// A text as tokens: a character's token is its position in the sorted vocabulary.
#[derive(Debug)]
pub struct Corpus {
    vocabulary: Vec<char>,
    tokens: Vec<i64>,
    /// The index of the first token that is kept for validation.
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
    /// Reads a file, all files of a directory, or without a path the handbook.
    ///
    /// # Errors
    /// Refuses a file that cannot be read or is not UTF-8, and a text with a part of `block` characters or fewer.
    pub fn read(path: Option<&Path>, block: usize) -> Result<Corpus> {
        let text = match path {
            Some(path) => read_all(path)?,
            None => HANDBOOK.into(),
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
                "give more text or a smaller block",
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

    /// Returns the number of different characters.
    pub fn vocabulary_len(&self) -> usize {
        self.vocabulary.len()
    }

    /// Returns the number of characters.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns a token's character.
    pub fn character(&self, token: usize) -> char {
        self.vocabulary[token]
    }

    /// Returns the token that a sample begins with: the line feed, or the first token if the text has no line feed.
    pub fn first_token(&self) -> i64 {
        self.vocabulary.binary_search(&'\n').unwrap_or(0) as i64
    }

    /// Returns the batches, of `batch` sequences of `block` tokens each, that `seed` draws from a part.
    pub fn batches(&self, part: Part, seed: u64, block: usize, batch: usize) -> Batches<'_> {
        let (tokens, name) = match part {
            Part::Training => (&self.tokens[..self.cut], "data"),
            Part::Validation => (&self.tokens[self.cut..], "validation"),
        };
        Batches { tokens, draw: Generator::new(seed).child(name).next_draw(), block, batch }
    }
}

impl Batches<'_> {
    /// Returns batch `number`: tokens, and the token that follows each of them, both i64 `[batch, block]`.
    ///
    /// A row's start is drawn by the row's number among all rows of all batches, so that two batches of 6 equal one of
    /// 12.
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

/// Reads a file, or the files of a directory in the order of their names.
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
