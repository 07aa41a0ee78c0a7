//! The samples of token files in their order, and the part of a batch that one rank stores.

use std::ops::Range;

use super::config::{Packing, TokensConfig};
use super::documents::PackedIndex;
use super::token_file::{TokenFile, TokenWidth};
use crate::error::{Error, Result};
use crate::placement::Region;
use crate::rng::{Draw, Generator, Permutation};
use crate::tensor::Shape;

/// The target of positions that are padding.
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

/// One row of a batch.
#[derive(Clone, Debug, Default)]
struct SampleRow {
    tokens: Vec<i64>,
    targets: Vec<i64>,
    /// Empty unless documents are told apart.
    documents: Vec<i64>,
    positions: Vec<i64>,
}

/// The elements of a batch `[batch, block]` that one rank stores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BatchPart {
    /// Row, columns, and the offset of the first one in local storage.
    runs: Vec<(usize, Range<usize>, usize)>,
    len: usize,
}

/// One rank's elements of a batch.
#[derive(Clone, Debug)]
pub(super) struct LocalBatch {
    pub tokens: Vec<i64>,
    pub targets: Vec<i64>,
    pub documents: Vec<i64>,
    pub positions: Vec<i64>,
}

/// The order of the epoch that was read last.
#[derive(Clone, Debug, Default)]
pub(super) struct EpochOrder(Option<(u64, Permutation)>);

impl BatchPart {
    pub fn new(region: &Region, batch: usize, block: usize) -> BatchPart {
        let mut runs = Vec::new();
        region.runs(&Shape::from([batch, block]), |global, mut local, mut len| {
            let mut at = global as usize;
            while len > 0 {
                let (row, column) = (at / block, at % block);
                let here = len.min(block - column);
                runs.push((row, column..column + here, local));
                (at, local, len) = (at + here, local + here, len - here);
            }
        });
        BatchPart { runs, len: region.numel() }
    }
}

impl TokenSource {
    pub fn open(files: Vec<TokenFile>, width: TokenWidth, config: TokensConfig) -> Result<TokenSource> {
        let TokensConfig { vocabulary, block, packing, .. } = config;
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
                SampleIndex::Packed(PackedIndex::new(&files, end_of_text, vocabulary, block)?)
            }
        };
        let order = order_of(&files, width, &config);
        let seed = config.shuffle.map(|seed| Generator::new(seed).child("data.tokens").seed());
        Ok(TokenSource { files, config, samples, seed, order })
    }

    pub fn config(&self) -> &TokensConfig {
        &self.config
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

    /// Reads one rank's part of the batch whose first row is sample `first`, counted over all epochs.
    ///
    /// # Errors
    /// Refuses a token outside the vocabulary, and a file that became shorter.
    pub fn read(&self, first: u64, part: &BatchPart, order: &mut EpochOrder) -> Result<LocalBatch> {
        self.files.iter().try_for_each(TokenFile::check_len)?;
        let tagged = if self.has_documents() { part.len } else { 0 };
        let mut out = LocalBatch {
            tokens: vec![0; part.len],
            targets: vec![0; part.len],
            documents: vec![0; tagged],
            positions: vec![0; tagged],
        };
        let mut last: Option<(usize, SampleRow)> = None;
        for (row, columns, at) in &part.runs {
            let sample = match last.take() {
                Some((number, sample)) if number == *row => sample,
                _ => self.row(order.sample(self, first + *row as u64)?)?,
            };
            let to = *at..*at + columns.len();
            out.tokens[to.clone()].copy_from_slice(&sample.tokens[columns.clone()]);
            out.targets[to.clone()].copy_from_slice(&sample.targets[columns.clone()]);
            if tagged > 0 {
                out.documents[to.clone()].copy_from_slice(&sample.documents[columns.clone()]);
                out.positions[to].copy_from_slice(&sample.positions[columns.clone()]);
            }
            last = Some((*row, sample));
        }
        Ok(out)
    }

    /// Reads a sample by its number in the files' order.
    fn row(&self, sample: u64) -> Result<SampleRow> {
        match &self.samples {
            SampleIndex::Windows(ends) => {
                let file = ends.partition_point(|&end| end <= sample);
                let earlier = if file == 0 { 0 } else { ends[file - 1] };
                self.window(&self.files[file], (sample - earlier) as usize * self.config.block)
            }
            SampleIndex::Packed(rows) => self.packed(rows, sample as usize),
        }
    }

    fn window(&self, file: &TokenFile, at: usize) -> Result<SampleRow> {
        let block = self.config.block;
        let window = self.checked(file, at, block + 1)?;
        let mut row = SampleRow {
            tokens: window[..block].to_vec(),
            targets: window[1..].to_vec(),
            ..SampleRow::default()
        };
        if let Some(end) = self.end_of_text() {
            let (mut document, mut position) = (0, 0);
            for &token in &row.tokens {
                row.documents.push(document);
                row.positions.push(position);
                (document, position) = match token == i64::from(end) {
                    true => (document + 1, 0),
                    false => (document, position + 1),
                };
            }
        }
        Ok(row)
    }

    fn packed(&self, rows: &PackedIndex, number: usize) -> Result<SampleRow> {
        let mut row = SampleRow::default();
        let pieces = rows.row(number);
        for (document, piece) in pieces.iter().enumerate() {
            let tokens = self.checked(&self.files[piece.file], piece.at, piece.len + 1)?;
            row.tokens.extend(&tokens[..piece.len]);
            row.targets.extend(&tokens[1..]);
            row.documents.extend(std::iter::repeat_n(document as i64, piece.len));
            row.positions.extend(0..piece.len as i64);
        }
        // Padding is a document of its own, so it sees no other and no other sees it.
        let rest = self.config.block - row.tokens.len();
        let end = self.end_of_text().expect("packed documents have an end");
        row.tokens.extend(std::iter::repeat_n(i64::from(end), rest));
        row.targets.extend(std::iter::repeat_n(PADDING, rest));
        row.documents.extend(std::iter::repeat_n(pieces.len() as i64, rest));
        row.positions.extend(0..rest as i64);
        Ok(row)
    }

    /// Reads `len` tokens from `at` and checks them against the vocabulary.
    fn checked(&self, file: &TokenFile, at: usize, len: usize) -> Result<Vec<i64>> {
        let vocabulary = self.config.vocabulary;
        let mut tokens = Vec::with_capacity(len);
        for (k, token) in file.tokens(at..at + len).enumerate() {
            if token as usize >= vocabulary {
                return Err(file.beyond(at + k, token, vocabulary));
            }
            tokens.push(i64::from(token));
        }
        Ok(tokens)
    }
}

impl EpochOrder {
    /// Returns the number, in the files' order, of a sample that is counted over all epochs.
    fn sample(&mut self, source: &TokenSource, number: u64) -> Result<u64> {
        let samples = source.len();
        let (epoch, at) = (number / samples, number % samples);
        let Some(seed) = source.seed else { return Ok(at) };
        if self.0.as_ref().is_none_or(|(known, _)| *known != epoch) {
            let draw = Draw { seed, number: epoch };
            self.0 = Some((epoch, Permutation::new(draw, samples)));
        }
        let (_, permutation) = self.0.as_ref().expect("just set");
        permutation.at(at)
    }
}

/// Returns a hash (FNV-1a, 64 bits) of the settings that decide the order, of the files' lengths, and of contents: of
/// both ends of each file, or of all its bytes if its documents are packed, since each of them decides the rows.
fn order_of(files: &[TokenFile], width: TokenWidth, config: &TokensConfig) -> u64 {
    let (kind, end) = match config.packing {
        Packing::Windows => (0, 0),
        Packing::DocumentWindows { end_of_text } => (1, end_of_text),
        Packing::Documents { end_of_text } => (2, end_of_text),
    };
    let shuffle = [config.shuffle.is_some().into(), config.shuffle.unwrap_or(0)];
    let mut words = vec![config.block as u64, width.bytes() as u64, kind, end.into(), shuffle[0], shuffle[1]];
    for file in files {
        let bytes = file.bytes();
        let edge = match config.packing {
            Packing::Windows | Packing::DocumentWindows { .. } => EDGE.min(bytes.len()),
            Packing::Documents { .. } => bytes.len(),
        };
        if edge == bytes.len() {
            words.extend([file.len() as u64, crc32fast::hash(bytes).into()]);
            continue;
        }
        let edges = [&bytes[..edge], &bytes[bytes.len() - edge..]].map(crc32fast::hash);
        words.extend([file.len() as u64, edges[0].into(), edges[1].into()]);
    }
    words.iter().flat_map(|word| word.to_le_bytes()).fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
