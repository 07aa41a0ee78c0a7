//! Token files: bare little-endian tokens of one width.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::tensor::open_regular;

/// Bytes at the beginning of a file that show the width of its tokens.
const PROBE: usize = 1 << 16;
/// The number of 32-bit tokens from which on they are told from 16-bit ones.
const PROBE_LEAST: usize = 256;

/// The width of each token in a token file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TokenWidth {
    /// 16 bits, for vocabularies of up to 65,536 tokens.
    U16,
    /// 32 bits.
    U32,
}

impl TokenWidth {
    /// Returns the narrowest width that holds every token of a vocabulary.
    ///
    /// ```
    /// use isoshard::data::TokenWidth;
    /// assert_eq!(TokenWidth::for_vocabulary(50_257), TokenWidth::U16); // GPT-2
    /// assert_eq!(TokenWidth::for_vocabulary(128_256), TokenWidth::U32); // Llama 3
    /// ```
    pub fn for_vocabulary(vocabulary: usize) -> TokenWidth {
        if vocabulary <= 1 << 16 { TokenWidth::U16 } else { TokenWidth::U32 }
    }

    /// Returns the bytes of a token.
    ///
    /// ```
    /// assert_eq!(isoshard::data::TokenWidth::U16.bytes(), 2);
    /// ```
    pub fn bytes(self) -> usize {
        match self {
            TokenWidth::U16 => 2,
            TokenWidth::U32 => 4,
        }
    }

    /// Returns the largest token of this width.
    ///
    /// ```
    /// assert_eq!(isoshard::data::TokenWidth::U16.largest(), 65_535);
    /// ```
    pub fn largest(self) -> u32 {
        match self {
            TokenWidth::U16 => u16::MAX.into(),
            TokenWidth::U32 => u32::MAX,
        }
    }
}

/// A memory-mapped token file.
#[derive(Debug)]
pub(super) struct TokenFile {
    path: PathBuf,
    file: File,
    map: Mmap,
    width: TokenWidth,
}

impl TokenFile {
    /// Maps a file.
    ///
    /// # Errors
    /// Refuses a file that cannot be read, is empty, or does not hold a whole number of tokens.
    pub fn open(path: &Path, width: TokenWidth) -> Result<TokenFile> {
        let failed = |e| Error::io("tokens", path, e);
        let file = open_regular(path).map_err(failed)?;
        let bytes = file.metadata().map_err(failed)?.len();
        let refused = |rule: &str, remedy: &str| {
            let given = format!("{bytes} bytes in {}", path.display());
            Err(Error::invalid("tokens", rule, given, remedy))
        };
        if bytes == 0 {
            return refused("a token file is empty", "write tokens with TokenWriter");
        }
        if bytes % width.bytes() as u64 != 0 {
            let rule = format!("a file of {}-byte tokens has another number of bytes", width.bytes());
            return refused(&rule, "give the width that the file was written with");
        }
        // SAFETY: the map is only read, as bytes, for which every value is valid. `check_len` finds a file that became
        // shorter; the module's page says that token files must not change while they are open.
        let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
        Ok(TokenFile { path: path.into(), file, map, width })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.map.len() / self.width.bytes()
    }

    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Refuses a file of 16-bit tokens whose beginning looks like 32-bit tokens below 65,536: each second token is 0.
    pub fn check_width(&self) -> Result<()> {
        let probe = &self.map[..self.map.len().min(PROBE)];
        let pairs = probe.chunks_exact(4).map(|pair| (pair[..2] != [0, 0], pair[2..] != [0, 0]));
        let (low, high) = pairs.fold((false, false), |seen, pair| (seen.0 || pair.0, seen.1 || pair.1));
        let long = self.map.len().is_multiple_of(4) && probe.len() >= 4 * PROBE_LEAST;
        if self.width == TokenWidth::U32 || !long || !low || high {
            return Ok(());
        }
        let given =
            format!("0 as each second token in the first {} bytes of {}", probe.len(), self.path.display());
        let remedy = "give the width: U32, or U16 if it is right";
        Err(Error::invalid(
            "tokens",
            "a file of 16-bit tokens looks like one of 32-bit tokens",
            given,
            remedy,
        ))
    }

    /// Refuses a file that has become shorter, whose missing part cannot be read.
    pub fn check_len(&self) -> Result<()> {
        let now = self.file.metadata().map_err(|e| Error::io("tokens", &self.path, e))?.len();
        if now >= self.map.len() as u64 {
            return Ok(());
        }
        let given = format!("{now} of {} bytes in {}", self.map.len(), self.path.display());
        Err(Error::invalid("tokens", "a token file became shorter while it was open", given, ""))
    }

    /// Returns the tokens of a range, which is within the file.
    pub fn tokens(&self, range: Range<usize>) -> impl Iterator<Item = u32> {
        let each = self.width.bytes();
        let bytes = self.map[range.start * each..range.end * each].chunks_exact(each);
        let width = self.width;
        bytes.map(move |token| match width {
            TokenWidth::U16 => u16::from_le_bytes([token[0], token[1]]).into(),
            TokenWidth::U32 => u32::from_le_bytes([token[0], token[1], token[2], token[3]]),
        })
    }

    /// Returns the refusal of the token at `at`.
    pub fn beyond(&self, at: usize, token: u32, vocabulary: usize) -> Error {
        let given = format!("token {token} at {at} of {}", self.path.display());
        let rule = format!("a token is outside the vocabulary of {vocabulary}");
        Error::invalid("tokens", rule, given, "give the vocabulary and the width of the file")
    }
}
