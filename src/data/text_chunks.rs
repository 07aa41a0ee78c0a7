//! Text files in pieces that a tokenizer can take one by one.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Bytes that are read at once.
const READ: usize = 1 << 20;

/// The text of a file in pieces. A piece ends before a line feed that follows a letter or a digit, or with the file.
pub(super) struct TextChunks {
    path: PathBuf,
    file: File,
    rest: Vec<u8>,
    /// The number of bytes before `rest`.
    before: u64,
    /// Bytes that are read at once; `None` for the whole file in one piece.
    read: Option<usize>,
    done: bool,
}

impl TextChunks {
    /// Opens a file. With `whole` it is one piece.
    pub fn open(path: &Path, whole: bool) -> Result<TextChunks> {
        let file = File::open(path).map_err(|e| Error::io("tokenizer", path, e))?;
        let read = (!whole).then_some(READ);
        Ok(TextChunks { path: path.into(), file, rest: Vec::new(), before: 0, read, done: false })
    }

    fn next_chunk(&mut self) -> Result<Option<String>> {
        let mut searched = 0;
        loop {
            let most = self.read.map_or(u64::MAX, |read| read as u64);
            let read = (&mut self.file).take(most).read_to_end(&mut self.rest);
            let end = read.map_err(|e| Error::io("tokenizer", &self.path, e))? == 0 || self.read.is_none();
            let text = match std::str::from_utf8(&self.rest) {
                Ok(text) => text,
                // The bytes end within a character.
                Err(e) if e.error_len().is_none() && !end => {
                    std::str::from_utf8(&self.rest[..e.valid_up_to()]).expect("just checked")
                }
                Err(e) => {
                    let at = self.before + e.valid_up_to() as u64;
                    let given = format!("byte {at} of {}", self.path.display());
                    return Err(Error::invalid("tokenizer", "a text is not UTF-8", given, ""));
                }
            };
            let cut = if end { Some(text.len()) } else { last_cut(text, searched) };
            if let Some(cut) = cut {
                self.done = end;
                let chunk = text[..cut].to_string();
                self.rest.drain(..cut);
                self.before += cut as u64;
                return Ok((!chunk.is_empty()).then_some(chunk));
            }
            searched = text.len();
        }
    }
}

/// Returns the last place before a line feed that follows a letter or a digit, at `from` or later.
fn last_cut(text: &str, from: usize) -> Option<usize> {
    let mut end = text.len();
    while let Some(at) = text[..end].rfind('\n').filter(|&at| at >= from) {
        if text[..at].chars().next_back().is_some_and(char::is_alphanumeric) {
            return Some(at);
        }
        end = at;
    }
    None
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
    fn pieces_end_before_a_line_feed_after_a_letter_and_lose_nothing() {
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
                assert!(pair[0].ends_with(char::is_alphanumeric) && pair[1].starts_with('\n'), "{pair:?}");
            }
            most = most.max(all.len());
        }
        assert_eq!(most, 5);
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
