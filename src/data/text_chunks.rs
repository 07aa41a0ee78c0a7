//! Text files in pieces that a tokenizer can take one by one.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::text_cuts::last_cut;
use crate::error::{Error, Result};
use crate::tensor::open_regular;

/// Bytes that are read at once.
const READ: usize = 1 << 20;

/// The text of a file in pieces that end where [`last_cut`] allows it, or with the file. A text without such a place is
/// one piece.
pub(super) struct TextChunks {
    path: PathBuf,
    file: File,
    /// The text that was read and not yet returned.
    text: String,
    /// The bytes after `text`: the beginning of a character whose end was not yet read.
    bytes: Vec<u8>,
    /// The number of bytes before `text`.
    before: u64,
    /// Bytes that are read at once; `None` for the whole file in one piece.
    read: Option<usize>,
    done: bool,
}

impl TextChunks {
    /// Opens a file. With `whole` it is one piece.
    pub fn open(path: &Path, whole: bool) -> Result<TextChunks> {
        let file = open_regular(path).map_err(|e| Error::io("tokenizer", path, e))?;
        let read = (!whole).then_some(READ);
        let (text, bytes) = (String::new(), Vec::new());
        Ok(TextChunks { path: path.into(), file, text, bytes, before: 0, read, done: false })
    }

    fn next_chunk(&mut self) -> Result<Option<String>> {
        // Earlier text was searched when it was read.
        let mut searched = 0;
        loop {
            let end = self.read_more()?;
            let cut = if end { Some(self.text.len()) } else { last_cut(&self.text, searched) };
            if let Some(cut) = cut {
                self.done = end;
                let rest = self.text.split_off(cut);
                let chunk = std::mem::replace(&mut self.text, rest);
                self.before += cut as u64;
                return Ok((!chunk.is_empty()).then_some(chunk));
            }
            searched = self.text.len();
        }
    }

    /// Reads bytes and adds those that are whole characters to the text. Returns true at the end of the file.
    fn read_more(&mut self) -> Result<bool> {
        let most = self.read.map_or(u64::MAX, |read| read as u64);
        let read = (&mut self.file).take(most).read_to_end(&mut self.bytes);
        let end = read.map_err(|e| Error::io("tokenizer", &self.path, e))? == 0 || self.read.is_none();
        let valid = match str::from_utf8(&self.bytes) {
            Ok(_) => self.bytes.len(),
            // The bytes end within a character.
            Err(e) if e.error_len().is_none() && !end => e.valid_up_to(),
            Err(e) => {
                let position = self.before + (self.text.len() + e.valid_up_to()) as u64;
                let given = format!("byte {position} of {}", self.path.display());
                return Err(Error::invalid("tokenizer", "a text is not UTF-8", given, ""));
            }
        };
        let more = str::from_utf8(&self.bytes[..valid]).expect("just checked");
        self.text.try_reserve(more.len()).map_err(|e| Error::io("tokenizer", &self.path, e.into()))?;
        self.text.push_str(more);
        self.bytes.drain(..valid);
        Ok(end)
    }
}

impl Iterator for TextChunks {
    type Item = Result<String>;

    fn next(&mut self) -> Option<Result<String>> {
        if self.done {
            return None;
        }
        let chunk = self.next_chunk();
        // No piece follows an error.
        self.done |= chunk.is_err();
        chunk.transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_end_at_cuts_and_lose_nothing() {
        let path = std::env::temp_dir().join(format!("isoshard-chunks-{}", std::process::id()));
        let text = "first\n\nsecond.\n  thïrd\nfou\u{1f980}rth 4\nno\n\n\u{1f980}\nlast";
        std::fs::write(&path, text).unwrap();
        let pieces = |read: Option<usize>| -> Vec<String> {
            let mut chunks = TextChunks::open(&path, false).unwrap();
            chunks.read = read;
            chunks.collect::<Result<_>>().unwrap()
        };
        assert_eq!(pieces(None), [text]);
        let mut most = 0;
        for read in 1..text.len() + 2 {
            let all = pieces(Some(read));
            assert_eq!(all.concat(), text);
            for pair in all.windows(2) {
                let end = pair[0].len();
                assert_eq!(last_cut(&pair.concat(), end).map(|cut| cut >= end), Some(true), "{pair:?}");
            }
            most = most.max(all.len());
        }
        assert_eq!(most, 7);
        // Lines that end in punctuation, without a space, do not gather.
        let text = "\u{4f60}\u{597d}\u{3002}\n".repeat(100);
        std::fs::write(&path, &text).unwrap();
        for read in [10, 16, 33] {
            let all = pieces(Some(read));
            assert!(all.concat() == text && all.iter().all(|piece| piece.len() <= read + 10), "{read}");
        }
        std::fs::write(&path, b"good\nba\xffd").unwrap();
        let failed = TextChunks::open(&path, false).unwrap().find_map(Result::err).unwrap().to_string();
        assert!(failed.starts_with("tokenizer: a text is not UTF-8; got byte 7 of "), "{failed}");
        std::fs::write(&path, b"end \xc3").unwrap();
        assert!(TextChunks::open(&path, false).unwrap().any(|chunk| chunk.is_err()));
        std::fs::write(&path, b"").unwrap();
        assert_eq!(TextChunks::open(&path, false).unwrap().count(), 0);
        std::fs::remove_file(path).unwrap();
    }
}
