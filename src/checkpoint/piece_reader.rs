//! Reading bytes of pieces, block by block, each compared with its checksum.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde_json::Value;

use super::block_sums::BLOCK_BYTES;
use super::index::{Index, PieceFile, SavedPiece, SavedTensor};
use super::piece_file::format_name;
use crate::error::{Error, Result};
use crate::placement::Region;
use crate::tensor::{DType, open_regular};

const VERB: &str = "load";
/// Bytes are read and summed in parts of this size, so that the second pass finds them in the cache.
const PART_BYTES: usize = 256 << 10;

/// Reads pieces of one checkpoint. Keeps the block that it read last, because small runs share blocks.
pub(super) struct PieceReader<'a> {
    dir: &'a Path,
    index: &'a Index,
    files: Vec<Option<OpenFile>>,
    /// The file, the position, the length and the checksum of `block`, the one that was read last in part.
    last: Option<(usize, u64, usize, u32)>,
    block: Vec<u8>,
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

/// A range of a piece's bytes that belongs to a contiguous range of the destination.
#[derive(Clone, Copy)]
struct Run {
    at: usize,
    to: usize,
    len: usize,
}

impl<'a> PieceReader<'a> {
    pub fn new(dir: &'a Path, index: &'a Index) -> PieceReader<'a> {
        let files = index.files.iter().map(|_| None).collect();
        PieceReader { dir, index, files, last: None, block: Vec::new() }
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
            let mut runs = Vec::new();
            for overlap in region.intersect(&Region::of_box(start, shape)) {
                overlap.runs(|to, at, len| {
                    let (from, until) = ((to * size).max(first), ((to + len) * size).min(end));
                    if from < until {
                        let at = at * size + (from - to * size);
                        runs.push(Run { at, to: from - first, len: until - from });
                    }
                });
            }
            // A region of several boxes may meet the piece in another order than the piece's.
            runs.sort_unstable_by_key(|run| run.at);
            if !runs.is_empty() {
                self.read_runs(piece, dtype, &runs, into)?;
            }
        }
        Ok(())
    }

    fn read_runs(&mut self, piece: &SavedPiece, dtype: DType, runs: &[Run], into: &mut [u8]) -> Result<()> {
        if self.files[piece.file].is_none() {
            let file = OpenFile::open(self.dir, &self.index.files[piece.file])?;
            self.files[piece.file] = Some(file);
        }
        let (files, last, block) = (&self.files, &mut self.last, &mut self.block);
        let file = files[piece.file].as_ref().expect("just opened");
        let begin = file.data_of(piece, dtype)?;
        let bytes = piece.numel() * dtype.size_bytes();
        for run in runs {
            let (mut at, mut to, end) = (run.at, run.to, run.at + run.len);
            while at < end {
                let number = at / BLOCK_BYTES;
                let (from, until) = (number * BLOCK_BYTES, ((number + 1) * BLOCK_BYTES).min(bytes));
                let count = until.min(end) - at;
                let place = begin + from as u64;
                if at == from && count == until - from {
                    file.read_block(place, piece.blocks.at(number), &mut into[to..to + count])?;
                } else {
                    let wanted = Some((piece.file, place, until - from, piece.blocks.at(number)));
                    if *last != wanted {
                        *last = None;
                        block.resize(until - from, 0);
                        file.read_block(place, piece.blocks.at(number), block)?;
                        *last = wanted;
                    }
                    into[to..to + count].copy_from_slice(&block[at - from..][..count]);
                }
                (at, to) = (at + count, to + count);
            }
        }
        Ok(())
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
        let mut header = vec![0; 8];
        file.read_exact_at(&mut header, 0).map_err(failed)?;
        let header_len = u64::from_le_bytes(header[..].try_into().expect("eight bytes"));
        if header_len > len.saturating_sub(8) {
            return Err(damaged(&path, format!("a header of {header_len} bytes in {len}")));
        }
        (&file)
            .take(8 + header_len)
            .read_to_end({
                header.clear();
                &mut header
            })
            .map_err(failed)?;
        if crc32fast::hash(&header) != of.header_crc32 {
            return Err(damaged(&path, "the header's checksum differs from the index".into()));
        }
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
        if !fits || entry.shape != piece.shape || entry.dtype != format_dtype(dtype) {
            let given = format!("{:?} {:?} at {:?}", entry.dtype, entry.shape, entry.data_offsets);
            let rule = format!(
                "the piece {key:?} is {} {:?} in the index, {given} in the file",
                format_name(dtype),
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
pub(super) fn header_entries(text: &[u8]) -> std::result::Result<BTreeMap<String, TensorInfo>, String> {
    let mut entries: BTreeMap<String, Value> = serde_json::from_slice(text).map_err(|e| e.to_string())?;
    entries.remove("__metadata__");
    let read = |(key, entry): (String, Value)| {
        let entry = serde_json::from_value(entry).map_err(|e| format!("{e} in the entry of {key:?}"))?;
        Ok((key, entry))
    };
    entries.into_iter().map(read).collect()
}

fn format_dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::U8 => Dtype::U8,
        DType::Bool => Dtype::BOOL,
    }
}

fn damaged(path: &Path, what: String) -> Error {
    let given = format!("{}: {what}", path.display());
    Error::invalid(VERB, "the file is not the one that was saved", given, "load another checkpoint")
}
