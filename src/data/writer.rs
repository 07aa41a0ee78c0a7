//! Writing of token files.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use super::token_file::TokenWidth;
use crate::error::{Error, Result};

/// A writer of a token file: bare little-endian tokens, without a header.
///
/// The tokens go to a file beside the final one, with the ending `.partial`. [`TokenWriter::finish`] gives the file its
/// name. A writer that is dropped before removes what it wrote, so a token file is whole or absent.
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
    partial: PathBuf,
    /// `None` once the file is finished.
    out: Option<BufWriter<File>>,
    width: TokenWidth,
    len: u64,
}

impl TokenWriter {
    /// Starts a token file.
    ///
    /// ```
    /// use isoshard::data::{TokenWidth, TokenWriter};
    /// let missing = TokenWriter::create("no/such/folder/train.bin", TokenWidth::U16);
    /// assert!(missing.unwrap_err().to_string().starts_with("token_writer: cannot access the file"));
    /// ```
    ///
    /// # Errors
    /// Returns an error if the file cannot be created.
    pub fn create(path: impl AsRef<Path>, width: TokenWidth) -> Result<TokenWriter> {
        let path = path.as_ref().to_path_buf();
        let mut partial = path.clone().into_os_string();
        partial.push(".partial");
        let partial = PathBuf::from(partial);
        let file = File::create(&partial).map_err(|e| Error::io("token_writer", &partial, e))?;
        Ok(TokenWriter { path, partial, out: Some(BufWriter::new(file)), width, len: 0 })
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
        let out = self.out.as_mut().expect("open until it is finished");
        let written = tokens.iter().try_for_each(|token| match self.width {
            TokenWidth::U16 => out.write_all(&(*token as u16).to_le_bytes()),
            TokenWidth::U32 => out.write_all(&token.to_le_bytes()),
        });
        written.map_err(|e| Error::io("token_writer", &self.partial, e))?;
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
    /// Returns an error if the file cannot be written or renamed; nothing stays then.
    pub fn finish(mut self) -> Result<u64> {
        let mut out = self.out.take().expect("open until it is finished");
        let written = out.flush().and_then(|()| out.get_ref().sync_all());
        drop(out);
        let named = written.and_then(|()| fs::rename(&self.partial, &self.path));
        if let Err(e) = named {
            // The first error says more than one of the removal.
            let _ = fs::remove_file(&self.partial);
            return Err(Error::io("token_writer", &self.path, e));
        }
        Ok(self.len)
    }
}

impl Drop for TokenWriter {
    fn drop(&mut self) {
        if self.out.take().is_some() {
            let _ = fs::remove_file(&self.partial);
        }
    }
}
