//! Batches of token files.

use std::path::Path;
use std::sync::Arc;

use super::config::TokensConfig;
use super::local_batch::{BatchShard, LocalBatch};
use super::position::DataPosition;
use super::read_ahead::ReadAhead;
use super::source::{EpochOrder, TokenSource};
use super::token_file::{TokenFile, TokenWidth};
use crate::dtensor::{DTensor, DeviceMesh};
use crate::error::{Error, Result};
use crate::placement::{IntoLayout, Layout};
use crate::tensor::{DType, Device};

/// A batch of rows with several documents each. All tensors are i64 `[batch, block]` in one layout.
#[derive(Clone, Debug)]
pub struct PackedBatch {
    /// The tokens.
    pub tokens: DTensor,
    /// The token that follows each token, or -100 for padding and, in windows of documents, after the end of a
    /// document.
    pub targets: DTensor,
    /// The number of the document in its row, from 0; padding is a document of its own.
    pub documents: DTensor,
    /// The position in the document; 0 at the beginning of a row.
    pub positions: DTensor,
}

/// Batches of token files, in an order that depends on the files, the settings and nothing else.
///
/// Files have nanoGPT's layout: bare little-endian tokens of 16 or 32 bits. They are mapped into memory, take no
/// descriptors, and must not change while they are open. A sample is one row of a batch. Epoch `e` goes through all
/// samples in the order of a [`Permutation`](crate::rng::Permutation) of seed and epoch. The samples that are left at
/// the end of an epoch begin a batch that the next epoch completes, so none is lost.
///
/// Each rank reads only the rows that it stores. The global batches have the same bits on every mesh, and
/// [`Tokens::position`] continues on any other. The first batch compares the files' lengths and samples of their bytes,
/// settings and positions over the ranks (16 bytes to each rank, and a few more if they differ); later ones communicate
/// nothing. [`TokensConfig::compare_all`] compares all bytes. Batches, also those that are read ahead, are tensors of
/// the calling thread, whose memory limit counts them.
///
/// ```
/// use isoshard::comm::spmd;
/// use isoshard::data::{TokenWidth, TokenWriter, Tokens, TokensConfig};
/// use isoshard::dtensor::DeviceMesh;
/// # let path = std::env::temp_dir().join(format!("isoshard-tokens-{}.bin", std::process::id()));
/// # let file = path.clone();
/// let mut writer = TokenWriter::create(&path, TokenWidth::U16)?;
/// writer.write(&(0..100).collect::<Vec<u32>>())?;
/// writer.finish()?;
/// spmd(2, move |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
///     let mut tokens = Tokens::open(&[&path], TokensConfig::new(100, 8, 5, 7))?;
///     assert_eq!(tokens.samples(), 12); // 12 windows predict 96 tokens
///     let (x, y) = tokens.next_batch(&mesh, "(S0)")?;
///     assert_eq!(x.spec().to_string(), "i64[5, 8]@(dp:S0)"); // 3 rows on rank 0, 2 on rank 1
///     assert_eq!(x.add_scalar(1.0)?.full_tensor()?.to_vec::<i64>()?, y.full_tensor()?.to_vec::<i64>()?);
///     Ok(())
/// })?;
/// # std::fs::remove_file(file).unwrap();
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Debug)]
pub struct Tokens {
    source: Arc<TokenSource>,
    /// The next sample, counted over all epochs.
    next: u64,
    order: EpochOrder,
    ahead: Option<ReadAhead>,
    /// True once all ranks were found to have the same files, settings and position.
    compared: bool,
}

impl Tokens {
    /// Opens token files, in the order of the list, at the beginning of the first epoch.
    ///
    /// ```
    /// use isoshard::data::{Tokens, TokensConfig};
    /// let path = std::env::temp_dir().join(format!("isoshard-odd-{}.bin", std::process::id()));
    /// std::fs::write(&path, [1, 0, 2])?;
    /// let refused = Tokens::open(&[&path], TokensConfig::new(11, 8, 4, 7)).unwrap_err().to_string();
    /// assert!(refused.starts_with("tokens: a file of 2-byte tokens has another number of bytes; got 3 bytes in"));
    /// # std::fs::remove_file(path)?;
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an empty list; a file that cannot be read, is empty, has another format (`.npy`, zip, Parquet, text and
    /// more), has a number of bytes that its tokens do not divide, or is shorter than a row and its last target; a
    /// batch or a block of 0 or beyond 2^31; an end of text outside the vocabulary. Without a
    /// [width](TokensConfig::width), refuses a file whose tokens seem to be wider than the vocabulary's. With
    /// [`Packing::Documents`](super::Packing::Documents), refuses tokens outside the vocabulary, and returns an error
    /// if there is no room for eight bytes per document.
    pub fn open<P: AsRef<Path>>(paths: &[P], config: TokensConfig) -> Result<Tokens> {
        config.check()?;
        if paths.is_empty() {
            return Err(Error::invalid("tokens", "wants at least one token file", "none", ""));
        }
        let width = config.width.unwrap_or_else(|| TokenWidth::for_vocabulary(config.vocabulary));
        let files = paths.iter().map(|path| TokenFile::open(path.as_ref(), width));
        let files = files.collect::<Result<Vec<_>>>()?;
        if config.width.is_none() {
            files.iter().try_for_each(TokenFile::check_width)?;
        }
        let source = TokenSource::open(files, width, config)?;
        Ok(Tokens::at_start(Arc::new(source)))
    }

    fn at_start(source: Arc<TokenSource>) -> Tokens {
        Tokens { source, next: 0, order: EpochOrder::default(), ahead: None, compared: false }
    }

    /// Returns the next batch: tokens, and the token that follows each of them, both i64 `[batch, block]` in `layout`.
    /// If documents are told apart, targets without a next token are -100, which `ignore_index` leaves out of a loss.
    ///
    /// `layout` is usually the plan's ([`Plan::batch_layout`](crate::nn::Plan::batch_layout)). The position moves on
    /// only if the batch could be read. In a dry run the tokens are zeros without elements.
    ///
    /// ```
    /// use isoshard::{comm::spmd, data::{TokenWidth, TokenWriter, Tokens, TokensConfig}, dtensor::DeviceMesh};
    /// # let path = std::env::temp_dir().join(format!("isoshard-next-{}.bin", std::process::id()));
    /// # let file = path.clone();
    /// let mut writer = TokenWriter::create(&path, TokenWidth::U16)?;
    /// writer.write(&[3, 1, 4, 1, 5, 9, 2])?;
    /// writer.finish()?;
    /// spmd(2, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let config = TokensConfig { shuffle: None, ..TokensConfig::new(10, 3, 2, 7) };
    ///     let (x, y) = Tokens::open(&[&path], config)?.next_batch(&mesh, "(S0)")?;
    ///     assert_eq!(x.full_tensor()?.to_vec::<i64>()?, [3, 1, 4, 1, 5, 9]);
    ///     assert_eq!(y.full_tensor()?.to_vec::<i64>()?, [1, 4, 1, 5, 9, 2]);
    ///     Ok(())
    /// })?;
    /// # std::fs::remove_file(file).unwrap();
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a layout that does not fit or is `Partial`, a token outside the vocabulary, and a file that became
    /// shorter; returns an error if there is no room. Ranks with different files, settings or positions get the same
    /// error, which names the first file that differs and the ranks. A rank that cannot read fails alone; the other
    /// ranks fail when they next wait for it.
    pub fn next_batch(&mut self, mesh: &DeviceMesh, layout: impl IntoLayout) -> Result<(DTensor, DTensor)> {
        let [tokens, targets, ..] = self.next_tensors(mesh, layout.into_layout()?, false)?;
        Ok((tokens.expect("always made"), targets.expect("always made")))
    }

    /// Returns the next batch with the number of each token's document and its position in it. A
    /// [`Decoder`](crate::nn::Decoder) takes them as [`Sequences::packed`](crate::nn::Sequences::packed): its attention
    /// stays within a document, positions start anew, and padding does not count in its loss.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh};
    /// use isoshard::data::{Packing, TokenWidth, TokenWriter, Tokens, TokensConfig};
    /// # let path = std::env::temp_dir().join(format!("isoshard-packed-{}.bin", std::process::id()));
    /// # let file = path.clone();
    /// let mut writer = TokenWriter::create(&path, TokenWidth::U16)?;
    /// writer.write(&[5, 6, 0, 7, 8, 9, 0])?; // two documents that end with 0
    /// writer.finish()?;
    /// spmd(1, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let packing = Packing::Documents { end_of_text: 0 };
    ///     let mut tokens = Tokens::open(&[&path], TokensConfig { packing, ..TokensConfig::new(10, 6, 1, 7) })?;
    ///     let batch = tokens.next_packed_batch(&mesh, "()")?;
    ///     assert_eq!(batch.tokens.full_tensor()?.to_vec::<i64>()?, [7, 8, 9, 5, 6, 0]);
    ///     assert_eq!(batch.targets.full_tensor()?.to_vec::<i64>()?, [8, 9, 0, 6, 0, -100]);
    ///     assert_eq!(batch.documents.full_tensor()?.to_vec::<i64>()?, [0, 0, 0, 1, 1, 2]);
    ///     assert_eq!(batch.positions.full_tensor()?.to_vec::<i64>()?, [0, 1, 2, 0, 1, 0]);
    ///     Ok(())
    /// })?;
    /// # std::fs::remove_file(file).unwrap();
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`Tokens::next_batch`]; refuses [`Packing::Windows`](super::Packing::Windows).
    pub fn next_packed_batch(&mut self, mesh: &DeviceMesh, layout: impl IntoLayout) -> Result<PackedBatch> {
        if !self.source.has_documents() {
            let remedy = "choose Packing::DocumentWindows or Packing::Documents";
            return Err(Error::invalid("tokens", "these rows know no documents", "Packing::Windows", remedy));
        }
        let all = self.next_tensors(mesh, layout.into_layout()?, true)?;
        let [tokens, targets, documents, positions] = all.map(|made| made.expect("always made"));
        Ok(PackedBatch { tokens, targets, documents, positions })
    }

    fn next_tensors(
        &mut self,
        mesh: &DeviceMesh,
        layout: Layout,
        packed: bool,
    ) -> Result<[Option<DTensor>; 4]> {
        let &TokensConfig { block, batch, .. } = self.source.config();
        if layout.has_partial() {
            let remedy = "shard the batch, or replicate it";
            return Err(Error::invalid("tokens", "a batch is not Partial", layout.to_string(), remedy));
        }
        let shape = [batch, block];
        let meta = mesh.meta(DType::I64, &shape.into(), &layout)?;
        let wanted = [true, true, packed, packed];
        if mesh.device() == Device::Meta {
            self.next += batch as u64;
            let zeros =
                |wanted: bool| wanted.then(|| DTensor::zeros(mesh, DType::I64, shape, &layout)).transpose();
            let [a, b, c, d] = wanted.map(zeros);
            return Ok([a?, b?, c?, d?]);
        }
        self.compare(mesh)?;
        let part = BatchShard::new(&meta.window().region, (batch, block), self.source.has_documents());
        let LocalBatch { tokens, targets, documents, positions } = self.read(part)?;
        self.next += batch as u64;
        let all = [Some(tokens), Some(targets), documents, positions];
        let made = |k: usize| {
            let local = all[k].clone().filter(|_| wanted[k]);
            local.map(|local| DTensor::from_local(mesh, local, shape, &layout)).transpose()
        };
        Ok([made(0)?, made(1)?, made(2)?, made(3)?])
    }

    /// Reads this rank's part of the next batch, which a thread may have read already.
    fn read(&mut self, part: BatchShard) -> Result<LocalBatch> {
        let &TokensConfig { batch, read_ahead, .. } = self.source.config();
        if read_ahead == 0 {
            let mut read = LocalBatch::new(&part)?;
            self.source.read(self.next, &part, &mut self.order, &mut read)?;
            return Ok(read);
        }
        let mut ahead = match self.ahead.take() {
            Some(ahead) if ahead.serves(self.next, &part) => ahead,
            // The position or the layout is another one.
            _ => ReadAhead::start(&self.source, part, self.next, read_ahead)?,
        };
        let read = ahead.take(batch)?;
        self.ahead = Some(ahead);
        Ok(read)
    }

    /// Compares files, settings and position over the ranks of a mesh, once.
    fn compare(&mut self, mesh: &DeviceMesh) -> Result<()> {
        if self.compared {
            return Ok(());
        }
        self.source.expect_same_on_ranks(mesh, self.next)?;
        self.compared = true;
        Ok(())
    }

    /// Returns the position of the next batch's first sample, which [`Tokens::restore`] continues from.
    ///
    /// ```
    /// use isoshard::{comm::spmd, data::{TokenWidth, TokenWriter, Tokens, TokensConfig}, dtensor::DeviceMesh};
    /// # let path = std::env::temp_dir().join(format!("isoshard-position-{}.bin", std::process::id()));
    /// # let file = path.clone();
    /// let mut writer = TokenWriter::create(&path, TokenWidth::U16)?;
    /// writer.write(&[1; 21])?;
    /// writer.finish()?;
    /// spmd(1, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let mut tokens = Tokens::open(&[&path], TokensConfig::new(2, 2, 4, 7))?; // 10 samples
    ///     for _ in 0..3 {
    ///         tokens.next_batch(&mesh, "()")?;
    ///     }
    ///     // Two samples of the third batch are the next epoch's.
    ///     assert_eq!((tokens.position().epoch, tokens.position().sample), (1, 2));
    ///     Ok(())
    /// })?;
    /// # std::fs::remove_file(file).unwrap();
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn position(&self) -> DataPosition {
        let samples = self.source.len();
        DataPosition { epoch: self.next / samples, sample: self.next % samples, order: self.source.order }
    }

    /// Goes to a position that [`Tokens::position`] returned, on any mesh and with any batch size. The next batch
    /// compares it over the ranks.
    ///
    /// ```
    /// use isoshard::{comm::spmd, data::{TokenWidth, TokenWriter, Tokens, TokensConfig}, dtensor::DeviceMesh};
    /// # let path = std::env::temp_dir().join(format!("isoshard-restore-{}.bin", std::process::id()));
    /// # let file = path.clone();
    /// let mut writer = TokenWriter::create(&path, TokenWidth::U16)?;
    /// writer.write(&(0..50).collect::<Vec<u32>>())?;
    /// writer.finish()?;
    /// spmd(2, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let open = || Tokens::open(&[&path], TokensConfig::new(50, 4, 3, 7));
    ///     let (mut first, mut second) = (open()?, open()?);
    ///     first.next_batch(&mesh, "(S0)")?;
    ///     let saved = first.position().to_string();
    ///     second.restore(saved.parse()?)?;
    ///     let [a, b] = [&mut first, &mut second].map(|tokens| tokens.next_batch(&mesh, "(S0)"));
    ///     assert_eq!(a?.0.local().to_vec::<i64>()?, b?.0.local().to_vec::<i64>()?);
    ///     Ok(())
    /// })?;
    /// # std::fs::remove_file(file).unwrap();
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a position of another block, packing, width or seed, of files with another length, first 4 KiB or last 4
    /// KiB (any byte with [`Packing::Documents`](super::Packing::Documents)), and one that does not exist.
    pub fn restore(&mut self, position: DataPosition) -> Result<()> {
        let samples = self.source.len();
        let DataPosition { epoch, sample, order } = position;
        let refused =
            |rule: &str, remedy: String| Err(Error::invalid("tokens", rule, position.to_string(), remedy));
        if order != self.source.order {
            let remedy = format!("these have the order {:016x}", self.source.order);
            return refused(
                "the position is one of other files, or of another block, packing or seed",
                remedy,
            );
        }
        let next = epoch.checked_mul(samples).and_then(|start| start.checked_add(sample));
        // Half of the range leaves room for all batches to come.
        let Some(next) = next.filter(|&next| sample < samples && next < 1 << 62) else {
            return refused("there is no such position", format!("an epoch has {samples} samples"));
        };
        (self.next, self.ahead, self.compared) = (next, None, false);
        Ok(())
    }

    /// Returns the number of samples (rows) in an epoch.
    ///
    /// ```
    /// use isoshard::data::{TokenWidth, TokenWriter, Tokens, TokensConfig};
    /// let path = std::env::temp_dir().join(format!("isoshard-samples-{}.bin", std::process::id()));
    /// let mut writer = TokenWriter::create(&path, TokenWidth::U16)?;
    /// writer.write(&[0; 100])?;
    /// writer.finish()?;
    /// // 100 tokens have 99 targets: 12 rows of 8, and 3 left out.
    /// assert_eq!(Tokens::open(&[&path], TokensConfig::new(1, 8, 4, 7))?.samples(), 12);
    /// # std::fs::remove_file(path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn samples(&self) -> u64 {
        self.source.len()
    }
}

/// Shares the open files. The clone has the same position and reads ahead by itself.
impl Clone for Tokens {
    fn clone(&self) -> Tokens {
        Tokens { next: self.next, ..Tokens::at_start(self.source.clone()) }
    }
}
