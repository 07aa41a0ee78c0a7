//! Reading bytes of pieces, block by block, each compared with its checksum.

use std::collections::BTreeMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustc_hash::FxHashMap;
use safetensors::tensor::TensorInfo;
use serde_json::Value;

use super::index::{Index, PieceFile, SavedPiece, SavedTensor};
use super::json_room::expect_json_room;
use super::piece_checksums::BLOCK_BYTES;
use super::piece_file::MOST_HEADER_BYTES;
use crate::error::{Error, Result};
use crate::placement::Region;
use crate::tensor::{DType, KernelList, open_regular, safetensors_dtype};

const VERB: &str = "load";
/// Bytes are read and summed in parts of this size, so that the second pass finds them in the cache.
const PART_BYTES: usize = 256 << 10;

/// Reads pieces of one checkpoint.
pub(in crate::checkpoint) struct PieceReader<'a> {
    dir: &'a Path,
    index: &'a Index,
    /// The files that were opened so far, by number.
    files: FxHashMap<usize, OpenFile>,
    last: LastRange,
}

/// A file whose header agrees with the index.
struct OpenFile {
    path: PathBuf,
    file: File,
    entries: BTreeMap<String, TensorInfo>,
    data_start: u64,
    /// The file's length.
    bytes: u64,
}

/// The range under one checksum that was read last in part, kept because small runs share ranges.
#[derive(Default)]
struct LastRange {
    /// Its file, position, length and checksum.
    place: Option<(usize, u64, usize, u32)>,
    bytes: KernelList<u8>,
}

/// A piece, and the place of its bytes.
struct PlacedPiece<'a> {
    of: &'a SavedPiece,
    file: &'a OpenFile,
    /// The position of its first byte.
    begin: u64,
    bytes: usize,
}

impl<'a> PieceReader<'a> {
    pub fn new(dir: &'a Path, index: &'a Index) -> PieceReader<'a> {
        PieceReader { dir, index, files: FxHashMap::default(), last: LastRange::default() }
    }

    /// Reads the bytes `first..first + into.len()` of a region's row-major storage.
    pub fn read(
        &mut self,
        of: &SavedTensor,
        dtype: DType,
        region: &Region,
        first: usize,
        into: &mut [u8],
    ) -> Result<()> {
        let size = dtype.size_bytes();
        let end = first + into.len();
        for piece in &of.pieces {
            let (start, shape) = piece.dims();
            for overlap in region.intersect(&Region::of_box(start, shape)) {
                let span = overlap.span();
                if span.end * size <= first || end <= span.start * size {
                    continue;
                }
                let (piece, last) = self.place(piece, dtype)?;
                let mut outcome = Ok(());
                overlap.runs(|to, at, len| {
                    let (from, until) = ((to * size).max(first), ((to + len) * size).min(end));
                    if from < until && outcome.is_ok() {
                        let at = at * size + (from - to * size);
                        outcome = last.read_run(&piece, at, &mut into[from - first..until - first]);
                    }
                });
                outcome?;
            }
        }
        Ok(())
    }

    /// Reads a piece and compares each block with its checksum.
    pub fn check(&mut self, piece: &SavedPiece, dtype: DType) -> Result<()> {
        let (piece, last) = self.place(piece, dtype)?;
        (0..piece.of.blocks.len()).try_for_each(|number| last.read(&piece, number).map(drop))
    }

    /// Returns a piece in its file, which is opened if it is not yet.
    fn place<'b>(
        &'b mut self,
        of: &'b SavedPiece,
        dtype: DType,
    ) -> Result<(PlacedPiece<'b>, &'b mut LastRange)> {
        let file = match self.files.entry(of.file) {
            Entry::Occupied(open) => open.into_mut(),
            Entry::Vacant(free) => free.insert(OpenFile::open(self.dir, &self.index.files[of.file])?),
        };
        let (begin, bytes) = (file.data_of(of, dtype)?, of.numel() * dtype.size_bytes());
        Ok((PlacedPiece { of, file, begin, bytes }, &mut self.last))
    }
}

impl LastRange {
    /// Reads the bytes of a piece from `at` on: whole blocks straight into place, parts of blocks from the one that is kept.
    fn read_run(&mut self, piece: &PlacedPiece, mut at: usize, mut into: &mut [u8]) -> Result<()> {
        while !into.is_empty() {
            let number = at / BLOCK_BYTES;
            let from = number * BLOCK_BYTES;
            let block_len = BLOCK_BYTES.min(piece.bytes - from);
            let (part, rest) = into.split_at_mut(into.len().min(from + block_len - at));
            if part.len() == block_len {
                piece.file.read_block(piece.begin + from as u64, piece.of.blocks.at(number), part)?;
            } else {
                part.copy_from_slice(&self.read(piece, number)?[at - from..][..part.len()]);
            }
            at += part.len();
            into = rest;
        }
        Ok(())
    }

    /// Returns the bytes of a block, which is read if it was not the last one.
    fn read(&mut self, piece: &PlacedPiece, number: usize) -> Result<&[u8]> {
        let from = number * BLOCK_BYTES;
        let len = BLOCK_BYTES.min(piece.bytes - from);
        let (begin, sum) = (piece.begin + from as u64, piece.of.blocks.at(number));
        let place = Some((piece.of.file, begin, len, sum));
        if self.place != place {
            self.place = None;
            if self.bytes.len() < len {
                self.bytes = KernelList::zeros(VERB, len)?;
            }
            piece.file.read_block(begin, sum, &mut self.bytes[..len])?;
            self.place = place;
        }
        Ok(&self.bytes[..len])
    }
}

impl OpenFile {
    fn open(dir: &Path, of: &PieceFile) -> Result<OpenFile> {
        let path = dir.join(&of.name);
        let failed = |e: std::io::Error| Error::io(VERB, &path, e);
        let file = open_regular(&path).map_err(failed)?;
        let len = file.metadata().map_err(failed)?.len();
        if len != of.bytes {
            return Err(damaged(&path, format!("the index says {} bytes; there are {len}", of.bytes)));
        }
        let mut header_len = [0; 8];
        file.read_exact_at(&mut header_len, 0).map_err(failed)?;
        let header_len = u64::from_le_bytes(header_len);
        if header_len > len.min(MOST_HEADER_BYTES).saturating_sub(8) {
            return Err(damaged(&path, format!("a header of {header_len} bytes in {len}")));
        }
        let mut header = KernelList::<u8>::zeros(VERB, 8 + header_len as usize)?;
        file.read_exact_at(&mut header, 0).map_err(failed)?;
        if crc32fast::hash(&header) != of.header_crc32 {
            return Err(damaged(&path, "the header's checksum differs from the index".into()));
        }
        expect_json_room(VERB, &header[8..])?;
        let entries = header_entries(&header[8..]).map_err(|e| damaged(&path, e))?;
        Ok(OpenFile { path, file, entries, data_start: 8 + header_len, bytes: len })
    }

    /// Returns the position of a piece's first byte.
    fn data_of(&self, piece: &SavedPiece, dtype: DType) -> Result<u64> {
        let key = &piece.key;
        let Some(entry) = self.entries.get(key) else {
            return Err(damaged(&self.path, format!("there is no piece {key:?}")));
        };
        let bytes = piece.numel() * dtype.size_bytes();
        let (from, to) = entry.data_offsets;
        let fits = from.checked_add(bytes) == Some(to);
        if !fits || entry.shape != piece.shape || entry.dtype != safetensors_dtype(dtype) {
            let given = format!("{:?} {:?} at {:?}", entry.dtype, entry.shape, entry.data_offsets);
            let rule = format!(
                "the piece {key:?} is {} {:?} in the index, {given} in the file",
                safetensors_dtype(dtype),
                piece.shape
            );
            return Err(damaged(&self.path, rule));
        }
        match self.data_start.checked_add(to as u64).is_some_and(|end| end <= self.bytes) {
            true => Ok(self.data_start + from as u64),
            false => {
                Err(damaged(&self.path, format!("the piece {key:?} at {from}..{to} is not in the file")))
            }
        }
    }

    /// Reads a block and compares it with its checksum.
    fn read_block(&self, at: u64, sum: u32, into: &mut [u8]) -> Result<()> {
        let mut hasher = crc32fast::Hasher::new();
        let mut place = at;
        for part in into.chunks_mut(PART_BYTES) {
            self.file.read_exact_at(part, place).map_err(|e| Error::io(VERB, &self.path, e))?;
            hasher.update(part);
            place += part.len() as u64;
        }
        let found = hasher.finalize();
        if found == sum {
            return Ok(());
        }
        let (from, to) = (at, at + into.len() as u64);
        Err(damaged(
            &self.path,
            format!("bytes {from}..{to} have the checksum {found:08x}, in the index {sum:08x}"),
        ))
    }
}

/// Reads the entries of a safetensors header.
pub(in crate::checkpoint) fn header_entries(
    text: &[u8],
) -> std::result::Result<BTreeMap<String, TensorInfo>, String> {
    let mut entries: BTreeMap<String, Value> = serde_json::from_slice(text).map_err(|e| e.to_string())?;
    entries.remove("__metadata__");
    let read = |(key, entry): (String, Value)| {
        let entry = serde_json::from_value(entry).map_err(|e| format!("{e} in the entry of {key:?}"))?;
        Ok((key, entry))
    };
    entries.into_iter().map(read).collect()
}

fn damaged(path: &Path, what: String) -> Error {
    let given = format!("{}: {what}", path.display());
    Error::invalid(VERB, "the file is not the one that was saved", given, "load another checkpoint")
}
