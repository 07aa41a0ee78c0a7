//! The samples of token files in their order, and the part of a batch that one rank stores.

use std::collections::BTreeSet;
use std::ops::Range;

use super::config::{Packing, TokensConfig};
use super::documents::PackedIndex;
use super::local_batch::{BatchShard, BatchToken, LocalBatch};
use super::token_file::{TokenFile, TokenWidth};
use crate::error::{Error, Result};
use crate::rng::{Draw, Generator, Permutation};
use crate::tensor::hash_words;

/// The target of positions that are padding, and of those after which no token of their document follows.
pub(super) const PADDING: i64 = -100;
/// Bytes at either end of a file that tell one file from another, where opening does not read the whole file.
const EDGE: usize = 4096;

/// Open token files, cut into samples. Threads share it.
#[derive(Debug)]
pub(super) struct TokenSource {
    files: Vec<TokenFile>,
    config: TokensConfig,
    samples: SampleIndex,
    /// The seed of the draws that order each epoch.
    seed: Option<u64>,
    /// A hash of all that decides the order.
    pub order: u64,
}

/// The place of each sample in the files.
#[derive(Debug)]
enum SampleIndex {
    /// The number of samples up to the end of each file.
    Windows(Vec<u64>),
    Packed(PackedIndex),
}

/// The order of the epoch that was read last.
#[derive(Clone, Debug, Default)]
pub(super) struct EpochOrder(Option<(u64, Permutation)>);

/// The files that were found to be as long as before, since a batch was begun.
#[derive(Default)]
struct CheckedFiles(BTreeSet<usize>);

impl TokenSource {
    pub fn open(files: Vec<TokenFile>, width: TokenWidth, config: TokensConfig) -> Result<TokenSource> {
        let TokensConfig { vocabulary, block, packing, .. } = config;
        let mut checksums = Vec::new();
        let samples = match packing {
            Packing::Windows | Packing::DocumentWindows { .. } => {
                let mut sum = 0;
                let mut ends = Vec::with_capacity(files.len());
                for file in &files {
                    if file.len() <= block {
                        let rule = format!("a file is shorter than a window of {block} + 1 tokens");
                        let given = format!("{} tokens in {}", file.len(), file.path().display());
                        return Err(Error::invalid("tokens", rule, given, "give a smaller block"));
                    }
                    sum += ((file.len() - 1) / block) as u64;
                    ends.push(sum);
                }
                SampleIndex::Windows(ends)
            }
            Packing::Documents { end_of_text } => {
                let index = PackedIndex::new(&files, end_of_text, vocabulary, block, &mut checksums)?;
                SampleIndex::Packed(index)
            }
        };
        let order = order_of(&files, width, &config, &checksums);
        let seed = config.shuffle.map(|seed| Generator::new(seed).child("data.tokens").seed());
        Ok(TokenSource { files, config, samples, seed, order })
    }

    pub fn config(&self) -> &TokensConfig {
        &self.config
    }

    pub fn files(&self) -> &[TokenFile] {
        &self.files
    }

    /// Returns the number of samples in an epoch.
    pub fn len(&self) -> u64 {
        match &self.samples {
            SampleIndex::Windows(ends) => *ends.last().expect("there is a file"),
            SampleIndex::Packed(rows) => rows.len() as u64,
        }
    }

    /// Returns true if documents are told apart.
    pub fn has_documents(&self) -> bool {
        self.end_of_text().is_some()
    }

    fn end_of_text(&self) -> Option<u32> {
        match self.config.packing {
            Packing::Windows => None,
            Packing::DocumentWindows { end_of_text } | Packing::Documents { end_of_text } => {
                Some(end_of_text)
            }
        }
    }

    /// Reads one rank's part of the batch whose first row is sample `first`, counted over all epochs, into `out`.
    ///
    /// # Errors
    /// Refuses a token outside the vocabulary, and a file that became shorter.
    pub fn read(
        &self,
        first: u64,
        part: &BatchShard,
        order: &mut EpochOrder,
        out: &mut LocalBatch,
    ) -> Result<()> {
        let mut checked = CheckedFiles::default();
        let mut lists = out.lists()?;
        part.each_row(&mut |row, columns, offset| {
            let sample = order.sample(self, first + row as u64)?;
            self.row(sample, &mut checked, &mut |column, element| {
                if columns.contains(&column) {
                    lists.put(offset + column - columns.start, element);
                }
            })
        })
    }

    /// Reads a sample by its number in the files' order.
    fn row(
        &self,
        sample: u64,
        checked: &mut CheckedFiles,
        each: &mut dyn FnMut(usize, BatchToken),
    ) -> Result<()> {
        match &self.samples {
            SampleIndex::Windows(ends) => {
                let file = ends.partition_point(|&end| end <= sample);
                let earlier = if file == 0 { 0 } else { ends[file - 1] };
                let file = checked.file(&self.files, file)?;
                self.window(file, (sample - earlier) as usize * self.config.block, each)
            }
            SampleIndex::Packed(rows) => self.packed(rows, sample as usize, checked, each),
        }
    }

    fn window(&self, file: &TokenFile, start: usize, each: &mut dyn FnMut(usize, BatchToken)) -> Result<()> {
        let mut tokens = self.checked(file, start..start + self.config.block + 1);
        let mut token = tokens.next().expect("a window has a token")?;
        let end = self.end_of_text().map(i64::from);
        let (mut document, mut position) = (0, 0);
        for (column, next) in tokens.enumerate() {
            let next = next?;
            let ends = end == Some(token);
            // The next document's first token does not follow from this one.
            let target = if ends { PADDING } else { next };
            each(column, BatchToken { token, target, document, position });
            token = next;
            (document, position) = if ends { (document + 1, 0) } else { (document, position + 1) };
        }
        Ok(())
    }

    fn packed(
        &self,
        rows: &PackedIndex,
        number: usize,
        checked: &mut CheckedFiles,
        each: &mut dyn FnMut(usize, BatchToken),
    ) -> Result<()> {
        let (block, end) = (self.config.block, self.end_of_text().expect("packed documents have an end"));
        let end = i64::from(end);
        let (mut column, mut document) = (0, 0);
        for (file, start) in rows.row(number) {
            let file = checked.file(&self.files, file)?;
            // A piece ends with the end of text, with the file, or when it is as long as a row.
            let mut tokens = self.checked(file, start..file.len().min(start + block + 1));
            let mut token = tokens.next().expect("a piece has a token")?;
            for (position, target) in tokens.enumerate() {
                let target = target?;
                if column == block {
                    let given = file.path().display().to_string();
                    return Err(Error::invalid(
                        "tokens",
                        "a token file changed while it was open",
                        given,
                        "",
                    ));
                }
                each(column, BatchToken { token, target, document, position: position as i64 });
                column += 1;
                token = target;
                if token == end {
                    break;
                }
            }
            document += 1;
        }
        // Padding is a document of its own, so it sees no other and no other sees it.
        for position in 0..block - column {
            let element = BatchToken { token: end, target: PADDING, document, position: position as i64 };
            each(column + position, element);
        }
        Ok(())
    }

    /// Returns the tokens of a range, each checked against the vocabulary.
    fn checked<'a>(
        &self,
        file: &'a TokenFile,
        range: Range<usize>,
    ) -> impl Iterator<Item = Result<i64>> + use<'a> {
        let vocabulary = self.config.vocabulary;
        range.clone().zip(file.tokens(range)).map(move |(position, token)| {
            match (token as usize) < vocabulary {
                true => Ok(i64::from(token)),
                false => Err(file.beyond(position, token, vocabulary)),
            }
        })
    }
}

impl CheckedFiles {
    /// Returns a file, after it was found to be as long as before.
    fn file<'a>(&mut self, files: &'a [TokenFile], number: usize) -> Result<&'a TokenFile> {
        let file = &files[number];
        if self.0.insert(number) {
            file.check_len()?;
        }
        Ok(file)
    }
}

impl EpochOrder {
    /// Returns the number, in the files' order, of a sample that is counted over all epochs.
    fn sample(&mut self, source: &TokenSource, number: u64) -> Result<u64> {
        let samples = source.len();
        let (epoch, sample) = (number / samples, number % samples);
        let Some(seed) = source.seed else { return Ok(sample) };
        if self.0.as_ref().is_none_or(|(known, _)| *known != epoch) {
            let draw = Draw { seed, number: epoch };
            self.0 = Some((epoch, Permutation::new(draw, samples)));
        }
        let (_, permutation) = self.0.as_ref().expect("just set");
        permutation.at(sample)
    }
}

/// Returns a hash (FNV-1a, 64 bits) of the settings that decide the order, of the files' lengths, and of contents: of
/// both ends of each file, or of all its bytes if its documents are packed, since each of them decides the rows;
/// `checksums` has these.
fn order_of(files: &[TokenFile], width: TokenWidth, config: &TokensConfig, checksums: &[u32]) -> u64 {
    let (kind, end) = match config.packing {
        Packing::Windows => (0, 0),
        Packing::DocumentWindows { end_of_text } => (1, end_of_text),
        Packing::Documents { end_of_text } => (2, end_of_text),
    };
    let shuffle = [config.shuffle.is_some().into(), config.shuffle.unwrap_or(0)];
    let mut words = vec![config.block as u64, width.bytes() as u64, kind, end.into(), shuffle[0], shuffle[1]];
    for (number, file) in files.iter().enumerate() {
        let bytes = file.bytes();
        words.push(file.len() as u64);
        match checksums.get(number) {
            Some(&whole) => words.push(whole.into()),
            None if bytes.len() <= EDGE => words.push(crc32fast::hash(bytes).into()),
            None => {
                let edges = [&bytes[..EDGE], &bytes[bytes.len() - EDGE..]].map(crc32fast::hash);
                words.extend(edges.map(u64::from));
            }
        }
    }
    hash_words(words)
}
