//! Writing of token files.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use super::token_file::TokenWidth;
use crate::error::{Error, Result};
use crate::files::{UnfinishedFile, is_taken};

/// A writer of a token file: bare little-endian tokens, without a header.
///
/// The tokens go to a hidden file beside the final one, `.train.bin.<number>.unfinished`, with a lock that a thread
/// touches. [`TokenWriter::finish`] gives the file its name. A writer that is dropped before removes what it wrote, so a
/// token file is whole or absent. The remains of a program that was
/// killed are removed when the file is written again.
///
/// ```
/// use isoshard::data::{TokenWidth, TokenWriter};
/// let path = std::env::temp_dir().join(format!("isoshard-writer-{}.bin", std::process::id()));
/// let mut writer = TokenWriter::create(&path, TokenWidth::U16)?;
/// writer.write(&[1, 2])?;
/// writer.write(&[770])?;
/// assert_eq!(writer.finish()?, 3);
/// assert_eq!(std::fs::read(&path)?, [1, 0, 2, 0, 2, 3]); // 770 is 3 · 256 + 2
/// # std::fs::remove_file(path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TokenWriter {
    path: PathBuf,
    /// `true` if there was a file of this name, which the new one replaces.
    replaces: bool,
    unfinished: UnfinishedFile,
    out: BufWriter<File>,
    width: TokenWidth,
    len: u64,
}

impl TokenWriter {
    /// Starts a token file. A file that has the name now is replaced at the end; until then it stays.
    ///
    /// ```
    /// use isoshard::data::{TokenWidth, TokenWriter};
    /// let missing = TokenWriter::create("no/such/folder/train.bin", TokenWidth::U16);
    /// assert!(missing.unwrap_err().to_string().starts_with("token_writer: cannot access the file"));
    /// ```
    ///
    /// # Errors
    /// Returns an error if the file cannot be created, or the system refuses a thread.
    pub fn create(path: impl AsRef<Path>, width: TokenWidth) -> Result<TokenWriter> {
        let path = path.as_ref().to_path_buf();
        let replaces = is_taken(&path);
        let (unfinished, file) =
            UnfinishedFile::create(&path, true).map_err(|e| Error::io("token_writer", &path, e))?;
        Ok(TokenWriter { path, replaces, unfinished, out: BufWriter::new(file), width, len: 0 })
    }

    /// Appends tokens.
    ///
    /// ```
    /// use isoshard::data::{TokenWidth, TokenWriter};
    /// let path = std::env::temp_dir().join(format!("isoshard-wide-{}.bin", std::process::id()));
    /// let mut writer = TokenWriter::create(&path, TokenWidth::U16)?;
    /// let refused = writer.write(&[65_535, 65_536]).unwrap_err().to_string();
    /// assert!(refused.starts_with("token_writer: a token does not fit into 2 bytes; got 65536"));
    /// assert!(writer.is_empty()); // a refused list is not written in part
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a token that the width cannot hold, before anything of the list is written; returns an error if the file
    /// cannot be written.
    pub fn write(&mut self, tokens: &[u32]) -> Result<()> {
        if let Some(token) = tokens.iter().find(|&&token| token > self.width.largest()) {
            let rule = format!("a token does not fit into {} bytes", self.width.bytes());
            return Err(Error::invalid("token_writer", rule, token.to_string(), "write u32 tokens"));
        }
        let out = &mut self.out;
        let written = tokens.iter().try_for_each(|token| match self.width {
            TokenWidth::U16 => out.write_all(&(*token as u16).to_le_bytes()),
            TokenWidth::U32 => out.write_all(&token.to_le_bytes()),
        });
        written.map_err(|e| Error::io("token_writer", self.unfinished.path(), e))?;
        self.len += tokens.len() as u64;
        Ok(())
    }

    /// Returns the number of tokens written so far.
    ///
    /// ```
    /// use isoshard::data::{TokenWidth, TokenWriter};
    /// let path = std::env::temp_dir().join(format!("isoshard-count-{}.bin", std::process::id()));
    /// let mut writer = TokenWriter::create(&path, TokenWidth::U32)?;
    /// writer.write(&[7, 8])?;
    /// assert_eq!(writer.len(), 2);
    /// drop(writer);
    /// assert!(!path.exists()); // the file was never finished
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns `true` if no token was written.
    ///
    /// ```
    /// use isoshard::data::{TokenWidth, TokenWriter};
    /// let path = std::env::temp_dir().join(format!("isoshard-none-{}.bin", std::process::id()));
    /// assert!(TokenWriter::create(&path, TokenWidth::U32)?.is_empty());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Writes the rest to the disk, gives the file its name, and returns the number of tokens.
    ///
    /// ```
    /// use isoshard::data::{TokenWidth, TokenWriter};
    /// let path = std::env::temp_dir().join(format!("isoshard-finish-{}.bin", std::process::id()));
    /// let mut writer = TokenWriter::create(&path, TokenWidth::U32)?;
    /// writer.write(&[5])?;
    /// assert!(!path.exists());
    /// assert_eq!(writer.finish()?, 1);
    /// assert_eq!(std::fs::read(&path)?, [5, 0, 0, 0]);
    /// # std::fs::remove_file(path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the file cannot be written or renamed; nothing stays then. Refuses a name that another program
    /// has given to a file since [`TokenWriter::create`].
    pub fn finish(self) -> Result<u64> {
        let TokenWriter { path, replaces, unfinished, mut out, len, .. } = self;
        let written = out.flush().and_then(|()| out.get_ref().sync_all());
        drop(out);
        let named = written.and_then(|()| if replaces { unfinished.replace() } else { unfinished.name() });
        match named {
            Ok(()) => Ok(len),
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {
                let rule = "another program has made the file meanwhile";
                let given = path.display().to_string();
                Err(Error::invalid("token_writer", rule, given, "use that one, or choose another name"))
            }
            Err(e) => Err(Error::io("token_writer", &path, e)),
        }
    }
}
