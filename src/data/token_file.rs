//! Token files: bare little-endian tokens of one width.

use std::fs::{self, Metadata};
use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use serde::{Deserialize, Serialize};

use super::file_kind::{other_format, wider_tokens};
use crate::error::{Error, Result};
use crate::tensor::{hash_all, hash_samples, open_regular};

/// The number of samples by which files are compared over the ranks, and the bytes of each: a page, which is read from
/// the disk whole.
const SAMPLES: (usize, usize) = (17, 4096);

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

/// A memory-mapped token file. The file itself is closed, so that many files take no descriptors.
#[derive(Debug)]
pub(super) struct TokenFile {
    path: PathBuf,
    /// The number of the file on its disk, which tells it from another one that gets its name later.
    id: Option<(u64, u64)>,
    map: Mmap,
    width: TokenWidth,
}

impl TokenFile {
    /// Maps a file.
    ///
    /// # Errors
    /// Refuses a file that cannot be read, is empty, has another format, or does not hold a whole number of tokens.
    pub fn open(path: &Path, width: TokenWidth) -> Result<TokenFile> {
        let failed = |e| Error::io("tokens", path, e);
        let file = open_regular(path).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        let bytes = metadata.len();
        let refused = |rule: &str, remedy: &str| {
            let given = format!("{bytes} bytes in {}", path.display());
            Err(Error::invalid("tokens", rule, given, remedy))
        };
        if bytes == 0 {
            return refused("a token file is empty", "write tokens with TokenWriter");
        }
        // SAFETY: the map is only read, as bytes, for which every value is valid. `check_len` finds a file that became
        // shorter; the module's page says that token files must not change while they are open.
        let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
        if let Some(format) = other_format(&map) {
            let given = format!("{} in {}", format.name, path.display());
            let rule = "a token file has tokens alone, and no other format";
            return Err(Error::invalid("tokens", rule, given, format.remedy));
        }
        if bytes % width.bytes() as u64 != 0 {
            let rule = format!("a file of {}-byte tokens has another number of bytes", width.bytes());
            return refused(&rule, "give the width that the file was written with");
        }
        Ok(TokenFile { path: path.into(), id: file_id(&metadata), map, width })
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

    /// Returns a hash of the length and of samples from the beginning to the end, or of all bytes.
    pub fn fingerprint(&self, all: bool) -> u64 {
        if all { hash_all(&self.map) } else { hash_samples(&self.map, SAMPLES.0, SAMPLES.1) }
    }

    /// Refuses a file whose tokens seem to be wider, because most tokens at certain places are 0 or very small.
    pub fn check_width(&self) -> Result<()> {
        let Some((wider, sampled)) = wider_tokens(&self.map, self.width.bytes()) else { return Ok(()) };
        let own = 8 * self.width.bytes();
        let each = if wider == 2 { "each second token" } else { "three of four tokens" };
        let given = format!("0 as {each} in {sampled} bytes of {}", self.path.display());
        let remedy = match (self.width, wider) {
            (TokenWidth::U16, 2) => "give the width: U32, or U16 if it is right".to_string(),
            (width, _) => {
                format!("write them anew with TokenWriter, or give the width {width:?} if it is right")
            }
        };
        let rule = format!("a file of {own}-bit tokens looks like one of {}-bit tokens", wider * own);
        Err(Error::invalid("tokens", rule, given, remedy))
    }

    /// Refuses a file that has become shorter, whose missing part cannot be read.
    pub fn check_len(&self) -> Result<()> {
        let now = match fs::metadata(&self.path) {
            Ok(now) => now,
            // A file without a name keeps its bytes while it is mapped.
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(Error::io("tokens", &self.path, e)),
        };
        if file_id(&now) != self.id || now.len() >= self.map.len() as u64 {
            return Ok(());
        }
        let given = format!("{} of {} bytes in {}", now.len(), self.map.len(), self.path.display());
        Err(Error::invalid("tokens", "a token file became shorter while it was open", given, ""))
    }

    /// Returns the bytes of a range of tokens, which is within the file.
    pub fn bytes_of(&self, range: Range<usize>) -> &[u8] {
        let each = self.width.bytes();
        &self.map[range.start * each..range.end * each]
    }

    /// Returns the tokens of a range, which is within the file.
    pub fn tokens(&self, range: Range<usize>) -> impl Iterator<Item = u32> {
        let width = self.width;
        self.bytes_of(range).chunks_exact(width.bytes()).map(move |token| match width {
            TokenWidth::U16 => u16::from_le_bytes([token[0], token[1]]).into(),
            TokenWidth::U32 => u32::from_le_bytes([token[0], token[1], token[2], token[3]]),
        })
    }

    /// Returns the refusal of the token at `position`.
    pub fn beyond(&self, position: usize, token: u32, vocabulary: usize) -> Error {
        let given = format!("token {token} at {position} of {}", self.path.display());
        let rule = format!("a token is outside the vocabulary of {vocabulary}");
        Error::invalid("tokens", rule, given, "give the vocabulary and the width of the file")
    }
}

/// Returns a file's disk and its number there, if the system numbers files.
#[cfg(unix)]
fn file_id(metadata: &Metadata) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    Some((metadata.dev(), metadata.ino()))
}

#[cfg(not(unix))]
fn file_id(_: &Metadata) -> Option<(u64, u64)> {
    None
}
