//! The settings of batches of token files.

use super::token_file::TokenWidth;
use crate::error::{Error, Result};

/// The most rows of a batch, and the most tokens of a row.
const LARGEST: usize = 1 << 31;
/// The most batches that are read ahead.
const MOST_AHEAD: usize = 1024;

/// The settings of a [`Tokens`](super::Tokens).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokensConfig {
    /// The number of different tokens; a token at or above it is refused.
    pub vocabulary: usize,
    /// The number of tokens in a row.
    pub block: usize,
    /// The number of rows in a batch, over all ranks together.
    pub batch: usize,
    /// The seed of the order of samples, which differs in each epoch; `None` for the order of the files.
    pub shuffle: Option<u64>,
    /// The rule that cuts the files into rows.
    pub packing: Packing,
    /// The width of the files' tokens; `None` for the narrowest that holds the vocabulary, in which case a file that
    /// seems to have wider tokens is refused.
    pub width: Option<TokenWidth>,
    /// The number of batches that a thread reads ahead, at most 1,024; 0 to read each batch when it is asked for.
    pub read_ahead: usize,
    /// `true` if the first batch compares every byte of the files over the ranks, for which each rank reads them whole.
    /// Otherwise it compares 17 samples of 4 KiB, at equal distances from the beginning of each file to its end. With
    /// [`Packing::Documents`] every byte is read when the files are opened, and compared.
    pub compare_all: bool,
}

/// The rule by which token files are cut into rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// Windows of `block + 1` tokens. Each begins with the last token of the window before it, so that every
    /// token is predicted once. A window stays within a file; up to `block` tokens at the end of a file are left out.
    Windows,
    /// [`Windows`](Packing::Windows) of documents that end with the token `end_of_text`. A row says to which document
    /// each token belongs; a document may begin in one row and end in another. The target of `end_of_text` is -100,
    /// since the next document does not follow from this one.
    DocumentWindows {
        /// The last token of each document.
        end_of_text: u32,
    },
    /// Whole documents, several in a row, packed by best-fit decreasing (Ding et al., *Fewer truncations improve
    /// language modeling*, 2024). Only documents of more than `block + 1` tokens are cut. The rest of a row is padding:
    /// its tokens are `end_of_text` and its targets -100. Opening reads the files once.
    Documents {
        /// The last token of each document.
        end_of_text: u32,
    },
}

impl TokensConfig {
    /// Returns settings for shuffled [windows](Packing::Windows) in files of the vocabulary's
    /// [width](TokenWidth::for_vocabulary); a thread reads two batches ahead.
    ///
    /// ```
    /// use isoshard::data::{Packing, TokensConfig};
    /// let config = TokensConfig { shuffle: None, ..TokensConfig::new(50_257, 1024, 12, 1337) };
    /// assert_eq!((config.batch, config.packing, config.width), (12, Packing::Windows, None));
    /// ```
    pub fn new(vocabulary: usize, block: usize, batch: usize, seed: u64) -> TokensConfig {
        let (shuffle, packing) = (Some(seed), Packing::Windows);
        TokensConfig {
            vocabulary,
            block,
            batch,
            shuffle,
            packing,
            width: None,
            read_ahead: 2,
            compare_all: false,
        }
    }

    /// Refuses settings that do not fit one another.
    pub(super) fn check(&self) -> Result<()> {
        let refused = |rule: &str, given: String| Err(Error::invalid("tokens", rule, given, ""));
        let TokensConfig { vocabulary, block, batch, .. } = *self;
        if block == 0 || batch == 0 {
            return refused("a batch has rows and a row has tokens", format!("{batch} rows of {block}"));
        }
        // So rows are numbered up to an epoch's end, and a row's last target has a place.
        if block > LARGEST
            || batch > LARGEST
            || batch.checked_mul(8 * block).is_none_or(|n| n > isize::MAX as usize)
        {
            return refused("a batch has more tokens than memory", format!("{batch} rows of {block}"));
        }
        if self.read_ahead > MOST_AHEAD {
            let rule = format!("at most {MOST_AHEAD} batches are read ahead");
            return refused(&rule, self.read_ahead.to_string());
        }
        match self.packing {
            Packing::Windows => Ok(()),
            Packing::DocumentWindows { end_of_text } | Packing::Documents { end_of_text } => {
                match (end_of_text as usize) < vocabulary {
                    true => Ok(()),
                    false => refused("the end of text is a token", format!("{end_of_text} of {vocabulary}")),
                }
            }
        }
    }
}
