//! Tokenizers of Hugging Face's `tokenizer.json`, and byte-level BPE.

use std::fmt;
use std::io::Read;
use std::path::Path;
use std::sync::Mutex;

use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, NormalizerWrapper, PostProcessorWrapper};

use super::text_chunks::TextChunks;
use super::text_cuts::may_be_cut;
use super::writer::TokenWriter;
use crate::base::{lock, unpoisoned};
use crate::error::{Error, Result};
use crate::files::write_whole;
use crate::tensor::open_regular;

/// The most bytes of a `tokenizer.json`; the largest that are published have a tenth of it.
const MOST_BYTES: u64 = 256 << 20;

/// A tokenizer: text to tokens and back.
///
/// It wraps the `tokenizers` crate, so it reads and writes the `tokenizer.json` of Hugging Face's models. It never adds
/// tokens of its own, such as a beginning of text. A text may contain special tokens by name:
/// [`Tokenizer::END_OF_TEXT`] between two documents becomes one token.
///
/// ```
/// use isoshard::data::Tokenizer;
/// let path = std::env::temp_dir().join(format!("isoshard-text-{}.txt", std::process::id()));
/// std::fs::write(&path, "the cat and the hat and the rat\n".repeat(20))?;
/// let tokenizer = Tokenizer::train(&[&path], 270)?; // 256 bytes, the end of text and 13 merges
/// let tokens = tokenizer.encode("the hat")?;
/// assert!(tokens.len() < 7);
/// assert_eq!(tokenizer.decode(&tokens)?, "the hat");
/// # std::fs::remove_file(path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    vocabulary: usize,
    /// True if the pieces of a text have the tokens of the whole text.
    may_be_cut: bool,
}

impl Tokenizer {
    /// The token that [`Tokenizer::train`] adds to the vocabulary for the end of a document, GPT-2's.
    pub const END_OF_TEXT: &str = "<|endoftext|>";

    /// Reads a `tokenizer.json`.
    ///
    /// ```
    /// use isoshard::data::Tokenizer;
    /// let missing = Tokenizer::load("no/such/tokenizer.json").unwrap_err().to_string();
    /// assert!(missing.starts_with("tokenizer: cannot access the file; got no/such/tokenizer.json"));
    /// ```
    ///
    /// # Errors
    /// Refuses what is no regular file, has more than 256 MiB, cannot be read or is no tokenizer.
    pub fn load(path: impl AsRef<Path>) -> Result<Tokenizer> {
        let path = path.as_ref();
        let bytes = read(path)?;
        let inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| {
            let given = format!("{}: {e}", path.display());
            Error::invalid("tokenizer", "the file is no tokenizer", given, "give a tokenizer.json")
        })?;
        Tokenizer::new(inner)
    }

    fn new(mut inner: tokenizers::Tokenizer) -> Result<Tokenizer> {
        // A batch pads and cuts by itself.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| failed("read", &*e))?;
        let vocabulary = inner.get_vocab(true).values().max().map_or(0, |&last| last as usize + 1);
        let settings = inner.to_string(false).map_err(|e| failed("read", &*e))?;
        let settings: serde_json::Value = serde_json::from_str(&settings).map_err(|e| failed("read", &e))?;
        Ok(Tokenizer { inner, vocabulary, may_be_cut: may_be_cut(&settings) })
    }

    /// Trains a byte-level BPE (Sennrich et al. 2016; Radford et al. 2019) of at most `vocabulary` tokens on text
    /// files.
    ///
    /// The vocabulary has [`Tokenizer::END_OF_TEXT`] as token 0, the 256 bytes, and merges of them; fewer than asked
    /// for if the text has no pair left that occurs twice. Text is split as GPT-2 does before pairs are counted. The
    /// same text gives the same tokenizer. The files are read in pieces; the counts of their words are kept in memory.
    ///
    /// ```
    /// use isoshard::data::Tokenizer;
    /// let path = std::env::temp_dir().join(format!("isoshard-train-{}.txt", std::process::id()));
    /// std::fs::write(&path, "banana bandana ".repeat(8))?;
    /// let tokenizer = Tokenizer::train(&[&path], 260)?;
    /// assert_eq!(tokenizer.vocabulary(), 260);
    /// assert_eq!(tokenizer.id(Tokenizer::END_OF_TEXT), Some(0));
    /// let small = Tokenizer::train(&[&path], 100).unwrap_err().to_string();
    /// assert!(small.starts_with("tokenizer: a byte-level vocabulary has 257 tokens or more; got 100"));
    /// # std::fs::remove_file(path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a vocabulary below 257, and files that cannot be read, are not UTF-8 or hold no text.
    pub fn train<P: AsRef<Path>>(texts: &[P], vocabulary: usize) -> Result<Tokenizer> {
        let chunks = texts.iter().map(|path| TextChunks::open(path.as_ref(), false));
        let chunks = chunks.collect::<Result<Vec<TextChunks>>>()?;
        Tokenizer::train_on(chunks.into_iter().flatten(), vocabulary)
    }

    /// Trains as [`Tokenizer::train`] does, on a text in memory.
    ///
    /// ```
    /// use isoshard::data::Tokenizer;
    /// let tokenizer = Tokenizer::train_on_text("aaaa aaaa", 258)?; // room for one pair
    /// assert_eq!(tokenizer.encode("aaaa")?.len(), 2);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a vocabulary below 257 and an empty text.
    pub fn train_on_text(text: &str, vocabulary: usize) -> Result<Tokenizer> {
        let some = (!text.is_empty()).then(|| Ok(text.to_string()));
        Tokenizer::train_on(some.into_iter(), vocabulary)
    }

    fn train_on(texts: impl Iterator<Item = Result<String>> + Send, vocabulary: usize) -> Result<Tokenizer> {
        let alphabet: std::collections::HashSet<char> = ByteLevel::alphabet().into_iter().collect();
        if vocabulary <= alphabet.len() {
            let rule = format!("a byte-level vocabulary has {} tokens or more", alphabet.len() + 1);
            return Err(Error::invalid("tokenizer", rule, vocabulary.to_string(), ""));
        }
        let trainer =
            BpeTrainer::builder().vocab_size(vocabulary).min_frequency(2).initial_alphabet(alphabet);
        let trainer = trainer.show_progress(false);
        let trainer = trainer.special_tokens(vec![AddedToken::from(Tokenizer::END_OF_TEXT, true)]).build();
        let mut inner = tokenizers::Tokenizer::new(BPE::default());
        inner.with_pre_tokenizer(Some(byte_level()));
        inner.with_decoder(Some(byte_level()));
        inner.with_normalizer(None::<NormalizerWrapper>);
        inner.with_post_processor(None::<PostProcessorWrapper>);
        // The trainer takes texts, not errors.
        let error = Mutex::new(None);
        let mut read = false;
        let texts = texts.map_while(|chunk| match chunk {
            Ok(text) => {
                read = true;
                Some(text)
            }
            Err(e) => {
                *lock(&error) = Some(e);
                None
            }
        });
        let trained = inner.train(&mut TrainerWrapper::BpeTrainer(trainer), texts).map(drop);
        if let Some(error) = unpoisoned(error.into_inner()) {
            return Err(error);
        }
        trained.map_err(|e| failed("train", &*e))?;
        if !read {
            return Err(Error::invalid("tokenizer", "there is no text to train on", "an empty text", ""));
        }
        Tokenizer::new(inner)
    }

    /// Writes the tokenizer as a `tokenizer.json`; others see the file whole or not at all.
    ///
    /// ```
    /// use isoshard::data::Tokenizer;
    /// let folder = std::env::temp_dir().join(format!("isoshard-save-{}", std::process::id()));
    /// std::fs::create_dir_all(&folder)?;
    /// let (text, json) = (folder.join("text.txt"), folder.join("tokenizer.json"));
    /// std::fs::write(&text, "to be or not to be ".repeat(9))?;
    /// let tokenizer = Tokenizer::train(&[text], 265)?;
    /// tokenizer.save(&json)?;
    /// assert_eq!(Tokenizer::load(&json)?.encode("not to be")?, tokenizer.encode("not to be")?);
    /// # std::fs::remove_dir_all(folder)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let text = self.inner.to_string(true).map_err(|e| failed("save", &*e))?;
        write_whole(path, &[text.as_bytes()]).map_err(|e| Error::io("tokenizer", path, e))
    }

    /// Returns the size of a model's vocabulary for these tokens: one more than the largest token.
    ///
    /// ```
    /// use isoshard::data::Tokenizer;
    /// let path = std::env::temp_dir().join(format!("isoshard-short-{}.txt", std::process::id()));
    /// std::fs::write(&path, "ab")?; // no pair occurs twice
    /// assert_eq!(Tokenizer::train(&[&path], 1000)?.vocabulary(), 257);
    /// # std::fs::remove_file(path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Returns the number of a token, such as [`Tokenizer::END_OF_TEXT`], by its name in the vocabulary.
    ///
    /// ```
    /// use isoshard::data::Tokenizer;
    /// let path = std::env::temp_dir().join(format!("isoshard-id-{}.txt", std::process::id()));
    /// std::fs::write(&path, "abc")?;
    /// let tokenizer = Tokenizer::train(&[&path], 257)?;
    /// assert_eq!(tokenizer.id("c").map(|c| vec![c]), Some(tokenizer.encode("c")?));
    /// assert_eq!(tokenizer.id("no such token"), None);
    /// # std::fs::remove_file(path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Returns the tokens of a text.
    ///
    /// ```
    /// use isoshard::data::Tokenizer;
    /// let path = std::env::temp_dir().join(format!("isoshard-encode-{}.txt", std::process::id()));
    /// std::fs::write(&path, "abc")?;
    /// let tokenizer = Tokenizer::train(&[&path], 257)?;
    /// let tokens = tokenizer.encode("é<|endoftext|>")?;
    /// assert_eq!((tokens.len(), tokens[2]), (3, 0)); // two bytes, and the end of text
    /// # std::fs::remove_file(path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the tokenizer cannot encode the text, such as an unknown character without a token for it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.inner.encode_fast(text, false).map_err(|e| failed("encode", &*e))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Returns the text of tokens, special tokens included.
    ///
    /// ```
    /// use isoshard::data::Tokenizer;
    /// let path = std::env::temp_dir().join(format!("isoshard-decode-{}.txt", std::process::id()));
    /// std::fs::write(&path, "abc")?;
    /// let tokenizer = Tokenizer::train(&[&path], 257)?;
    /// assert_eq!(tokenizer.decode(&tokenizer.encode("naïve 🦀<|endoftext|>\n")?)?, "naïve 🦀<|endoftext|>\n");
    /// # std::fs::remove_file(path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the tokenizer cannot decode the tokens.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        self.inner.decode(tokens, false).map_err(|e| failed("decode", &*e))
    }

    /// Encodes a text file into a token file, and returns the number of tokens. Call it once per text file, and write
    /// the end of text in between if the files are documents.
    ///
    /// The file is read in pieces of about a mebibyte. A piece ends before white space that follows a letter or a
    /// digit, or after a line feed that stands alone, such as that after a full stop. The tokenizers of GPT-2, Llama 3,
    /// and Qwen 2 and 3 give such pieces the tokens of the whole text. With any other tokenizer, and without such a place in the
    /// text, the whole file is one piece in memory.
    ///
    /// ```
    /// use isoshard::data::{TokenWidth, TokenWriter, Tokenizer};
    /// let folder = std::env::temp_dir().join(format!("isoshard-file-{}", std::process::id()));
    /// std::fs::create_dir_all(&folder)?;
    /// let (text, tokens) = (folder.join("text.txt"), folder.join("train.bin"));
    /// std::fs::write(&text, "one two one two")?;
    /// let tokenizer = Tokenizer::train(&[&text], 260)?;
    /// let mut writer = TokenWriter::create(&tokens, TokenWidth::for_vocabulary(tokenizer.vocabulary()))?;
    /// let len = tokenizer.encode_file(&text, &mut writer)?;
    /// writer.write(&[tokenizer.id(Tokenizer::END_OF_TEXT).expect("it was trained with one")])?;
    /// assert_eq!(writer.finish()?, len + 1);
    /// assert_eq!(std::fs::metadata(tokens)?.len(), 2 * (len + 1));
    /// # std::fs::remove_dir_all(folder)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a text that cannot be read or is not UTF-8, and a token that the file's width cannot hold; returns an
    /// error if the token file cannot be written.
    pub fn encode_file(&self, text: impl AsRef<Path>, writer: &mut TokenWriter) -> Result<u64> {
        let before = writer.len();
        for chunk in TextChunks::open(text.as_ref(), !self.may_be_cut)? {
            writer.write(&self.encode(&chunk?)?)?;
        }
        Ok(writer.len() - before)
    }
}

/// Prints the size of the vocabulary.
impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("vocabulary", &self.vocabulary).finish_non_exhaustive()
    }
}

fn byte_level() -> ByteLevel {
    ByteLevel::default().add_prefix_space(false)
}

fn failed(verb: &str, reason: &dyn fmt::Display) -> Error {
    Error::other(format!("tokenizer: cannot {verb}: {reason}"))
}

/// Reads a file whole, if it is a regular one that is not too long.
fn read(path: &Path) -> Result<Vec<u8>> {
    let failed = |e| Error::io("tokenizer", path, e);
    let mut bytes = Vec::new();
    open_regular(path).map_err(failed)?.take(MOST_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > MOST_BYTES {
        let rule = format!("the file has more than {MOST_BYTES} bytes");
        return Err(Error::invalid("tokenizer", rule, path.display().to_string(), "give a tokenizer.json"));
    }
    Ok(bytes)
}
