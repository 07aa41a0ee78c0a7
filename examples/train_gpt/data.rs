//! The text, its characters or a tokenizer's tokens as a vocabulary, and batches that depend on seed and step alone.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

#[cfg(feature = "tokenizers")]
use isoshard::data::Tokenizer;
use isoshard::rng::{Draw, Generator, bits64};
use isoshard::tensor::Tensor;
use isoshard::{Error, Result};

use crate::args::TokenizerChoice;

/// The pages of this project's documentation as they were in November 2026, plain ASCII. The file never changes, so the default
/// run always prints the same losses.
const HANDBOOK: &str = include_str!("handbook.txt");

/// The longest text in bytes. It is held in memory whole, with eight bytes per token.
const LONGEST_TEXT: u64 = 256 << 20;

/// A text as tokens.
#[derive(Debug)]
pub struct Corpus {
    vocabulary: Vocabulary,
    tokens: Vec<i64>,
    /// The index of the first token that is kept for validation.
    cut: usize,
}

/// The meaning of tokens.
#[derive(Debug)]
enum Vocabulary {
    /// A character's token is its position in this sorted list.
    Characters(Vec<char>),
    #[cfg(feature = "tokenizers")]
    Tokens(Box<Tokenizer>),
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
    /// Refuses a file that cannot be read, is not UTF-8 or is not a regular file, a text of more than 256 MiB or with a part of `block` tokens or fewer, and a
    /// tokenizer that cannot be read or trained, or that this program was built without.
    pub fn read(path: Option<&Path>, tokenizer: Option<&TokenizerChoice>, block: usize) -> Result<Corpus> {
        let text = match path {
            Some(path) => {
                let mut text = String::new();
                read_all(path, &mut text)?;
                text
            }
            None => HANDBOOK.into(),
        };
        let corpus = match tokenizer {
            Some(choice) => Corpus::tokenized(&text, choice)?,
            None => Corpus::new(&text)?,
        };
        let shortest = corpus.cut.min(corpus.tokens.len() - corpus.cut);
        if shortest <= block {
            return Err(Error::invalid(
                "data",
                format!(
                    "training and validation text need more than {block} {} each (--block)",
                    corpus.units()
                ),
                format!(
                    "{} {}, of which the last {shortest} are for validation",
                    corpus.tokens.len(),
                    corpus.units()
                ),
                "give more text or a smaller block",
            ));
        }
        Ok(corpus)
    }

    fn new(text: &str) -> Result<Corpus> {
        let vocabulary: Vec<char> = text.chars().collect::<BTreeSet<char>>().into_iter().collect();
        let place = |c| vocabulary.binary_search(&c).expect("every character is in the vocabulary") as i64;
        let (len, mut tokens) = (text.chars().count(), Vec::new());
        tokens.try_reserve_exact(len).map_err(|_| {
            let rule = "the system has no memory for eight bytes per character";
            Error::invalid("data", rule, format!("{len} characters"), "train on a part of the text")
        })?;
        tokens.extend(text.chars().map(place));
        Ok(Corpus::of_tokens(Vocabulary::Characters(vocabulary), tokens))
    }

    fn of_tokens(vocabulary: Vocabulary, tokens: Vec<i64>) -> Corpus {
        let cut = tokens.len() - tokens.len() / 10;
        Corpus { vocabulary, tokens, cut }
    }

    #[cfg(feature = "tokenizers")]
    fn tokenized(text: &str, choice: &TokenizerChoice) -> Result<Corpus> {
        let tokenizer = match choice {
            TokenizerChoice::Train(tokens) => Tokenizer::train_on_text(text, *tokens)?,
            TokenizerChoice::Load(path) => Tokenizer::load(path)?,
        };
        let tokens = tokenizer.encode(text)?.into_iter().map(i64::from).collect();
        Ok(Corpus::of_tokens(Vocabulary::Tokens(Box::new(tokenizer)), tokens))
    }

    #[cfg(not(feature = "tokenizers"))]
    fn tokenized(_: &str, choice: &TokenizerChoice) -> Result<Corpus> {
        let given = match choice {
            TokenizerChoice::Train(tokens) => format!("--tokenizer {tokens}"),
            TokenizerChoice::Load(path) => format!("--tokenizer {}", path.display()),
        };
        let (rule, remedy) =
            ("this program was built without the feature tokenizers", "build it with --features tokenizers");
        Err(Error::unsupported("tokenizer", rule, given, remedy))
    }

    /// Returns the number of different tokens.
    pub fn vocabulary_len(&self) -> usize {
        match &self.vocabulary {
            Vocabulary::Characters(characters) => characters.len(),
            #[cfg(feature = "tokenizers")]
            Vocabulary::Tokens(tokenizer) => tokenizer.vocabulary(),
        }
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the word for tokens.
    pub fn units(&self) -> &'static str {
        match &self.vocabulary {
            Vocabulary::Characters(_) => "characters",
            #[cfg(feature = "tokenizers")]
            Vocabulary::Tokens(_) => "tokens",
        }
    }

    /// Returns the text of tokens.
    ///
    /// # Errors
    /// Returns the tokenizer's error.
    pub fn text(&self, tokens: &[i64]) -> Result<String> {
        match &self.vocabulary {
            Vocabulary::Characters(characters) => {
                // A model's vocabulary may be larger than the text's.
                let character = |&token: &i64| characters.get(token as usize).copied();
                Ok(tokens.iter().map(|token| character(token).unwrap_or('\u{fffd}')).collect())
            }
            #[cfg(feature = "tokenizers")]
            Vocabulary::Tokens(tokenizer) => {
                tokenizer.decode(&tokens.iter().map(|&token| token as u32).collect::<Vec<_>>())
            }
        }
    }

    /// Returns the token that a sample begins with: the line feed, or the first token if there is no line feed.
    pub fn first_token(&self) -> i64 {
        match &self.vocabulary {
            Vocabulary::Characters(characters) => characters.binary_search(&'\n').unwrap_or(0) as i64,
            #[cfg(feature = "tokenizers")]
            Vocabulary::Tokens(tokenizer) => {
                let line_feed = tokenizer.encode("\n").ok().and_then(|tokens| tokens.first().copied());
                i64::from(line_feed.unwrap_or(0))
            }
        }
    }

    /// Returns a hash (FNV-1a, 64 bits) of all tokens.
    pub fn digest(&self) -> u64 {
        let bytes = self.tokens.iter().flat_map(|token| token.to_le_bytes());
        bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        })
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
        let starts = (self.tokens.len() - self.block) as u128;
        // The tensors are the rank's: its memory limit counts them.
        let stack = |from: usize| {
            Tensor::build([self.batch, self.block], |out: &mut [i64]| {
                for (row, out) in out.chunks_exact_mut(self.block).enumerate() {
                    let mut word = [0];
                    bits64(self.draw, (number * self.batch + row) as u64, &mut word);
                    let start = ((u128::from(word[0]) * starts) >> 64) as usize + from;
                    out.copy_from_slice(&self.tokens[start..start + self.block]);
                }
            })
        };
        Ok((stack(0), stack(1)))
    }
}

/// Appends a file, or the files of a directory in the order of their names.
fn read_all(path: &Path, text: &mut String) -> Result<()> {
    let failed = |reason: std::io::Error| Error::io("data", path, reason);
    let refuse = |rule: &str, remedy| Err(Error::invalid("data", rule, path.display().to_string(), remedy));
    let found = fs::metadata(path).map_err(failed)?;
    if found.is_dir() {
        let entries = fs::read_dir(path).map_err(failed)?.map(|entry| Ok(entry?.path()));
        let mut paths: Vec<PathBuf> = entries.collect::<std::io::Result<_>>().map_err(failed)?;
        paths.sort();
        return paths.iter().try_for_each(|path| read_all(path, text));
    }
    if !found.is_file() {
        return refuse("it is neither a regular file nor a directory", "write the text to a file first");
    }
    let room = LONGEST_TEXT.saturating_sub(text.len() as u64);
    let too_long = || {
        let rule = format!("the text has more than {LONGEST_TEXT} bytes, which are held in memory whole");
        refuse(&rule, "train on a part of it")
    };
    if found.len() > room {
        return too_long();
    }
    let read = File::open(path).map_err(failed)?.take(room + 1).read_to_string(text).map_err(failed)?;
    // The file may have grown meanwhile.
    if read as u64 > room { too_long() } else { Ok(()) }
}
