//! Training data: token files, their order, and batches. Each rank reads only the rows that it stores.
//!
//! [`Tokens`] maps token files into memory and returns global batches in the plan's layout. The order of samples
//! depends on the seed and the epoch alone, and the position in it is a small value that continues on any number of
//! ranks:
//!
//! ```
//! use isoshard::{comm::spmd, data::{TokenWidth, TokenWriter, Tokens, TokensConfig}, dtensor::DeviceMesh, nn::Plan};
//! # let path = std::env::temp_dir().join(format!("isoshard-data-{}.bin", std::process::id()));
//! # let file = path.clone();
//! // nanoGPT's layout: bare little-endian tokens.
//! let mut writer = TokenWriter::create(&path, TokenWidth::for_vocabulary(500))?;
//! writer.write(&(0..500).collect::<Vec<u32>>())?;
//! writer.finish()?;
//!
//! // Two batches on `ranks` ranks, from a position on: their tokens, and the position after them.
//! let train = |ranks, from: Option<String>| {
//!     let path = path.clone();
//!     let outcome = spmd(ranks, move |rank| {
//!         let mesh = DeviceMesh::new(&rank, &[("dp", ranks)])?;
//!         let layout = Plan::default().batch("dp").batch_layout(mesh.mesh());
//!         let mut tokens = Tokens::open(&[&path], TokensConfig::new(500, 16, 5, 1337))?;
//!         if let Some(saved) = &from {
//!             tokens.restore(saved.parse()?)?;
//!         }
//!         let mut seen = Vec::new();
//!         for _ in 0..2 {
//!             let (x, _targets) = tokens.next_batch(&mesh, layout.clone())?;
//!             seen.extend(x.full_tensor()?.to_vec::<i64>()?);
//!         }
//!         Ok((seen, tokens.position().to_string()))
//!     });
//!     outcome.map(|mut ranks| ranks.remove(0))
//! };
//! let (first, saved) = train(4, None)?;
//! assert_eq!(train(1, None)?.0, first); // the same batches on one rank
//! assert_eq!(train(3, Some(saved.clone()))?, train(2, Some(saved))?); // any mesh continues
//! # std::fs::remove_file(file).unwrap();
//! # Ok::<(), isoshard::Error>(())
//! ```
//!
//! Documents that end with a token of their own can be packed into rows ([`Packing`]);
//! [`Tokens::next_packed_batch`] then tells them apart.
//!
//! With the feature `tokenizers`, `Tokenizer` reads a model's `tokenizer.json` or trains a byte-level BPE, and encodes
//! text files into token files.
//!
//! Token files must not change while they are open: a file that another program truncates in the middle of a read ends
//! the process, as with any memory map. Not built: mixtures of several sources with weights; compressed files; files
//! that are read from a network store.

mod config;
mod documents;
mod file_kind;
mod local_batch;
mod open_rows;
mod position;
mod read_ahead;
mod same_files;
mod source;
#[cfg(any(feature = "tokenizers", test))]
mod text_chunks;
#[cfg(any(feature = "tokenizers", test))]
mod text_cuts;
mod token_file;
#[cfg(feature = "tokenizers")]
mod tokenizer;
mod tokens;
mod writer;

pub use config::{Packing, TokensConfig};
pub use position::DataPosition;
pub use token_file::TokenWidth;
#[cfg(feature = "tokenizers")]
pub use tokenizer::Tokenizer;
pub use tokens::{PackedBatch, Tokens};
pub use writer::TokenWriter;
