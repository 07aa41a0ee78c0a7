//! Writing one rank's pieces as a safetensors file, with checksums taken on the way.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, json};

use super::piece_checksums::{BLOCK_BYTES, PieceChecksums};
use crate::error::{Error, Result};
use crate::placement::Region;
use crate::tensor::{Dims, Shape, Tensor, safetensors_dtype, sort_by_key};

/// The most bytes of a file's header, with its length before it: as many as other readers of safetensors files accept.
pub(in crate::checkpoint) const MOST_HEADER_BYTES: u64 = 100_000_000;
/// Bytes are summed and written in parts of this size, so that the second pass finds them in the cache.
const PART_BYTES: usize = 256 << 10;

/// A box of a tensor, with the memory that it is written from.
pub(in crate::checkpoint) struct PieceSource {
    /// The tensor's name.
    pub tensor: String,
    /// The piece's name in its file.
    pub key: String,
    pub start: Dims,
    pub shape: Shape,
    /// The rank's shard, contiguous in the CPU's memory, and the indices that it stores.
    pub shard: Tensor,
    pub region: Region,
}

/// A written file: what the index says of it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::checkpoint) struct WrittenFile {
    pub bytes: u64,
    pub header_crc32: u32,
    pub pieces: Vec<WrittenPiece>,
}

/// A written piece.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::checkpoint) struct WrittenPiece {
    pub tensor: String,
    pub key: String,
    pub start: Vec<usize>,
    pub shape: Vec<usize>,
    pub blocks: PieceChecksums,
}

impl PieceSource {
    fn bytes(&self) -> usize {
        self.shape.numel() * self.shard.dtype().size_bytes()
    }
}

/// Writes the pieces and flushes them to the disk. Wider elements come first, so that every piece is aligned.
pub(in crate::checkpoint) fn write_file(path: &Path, mut pieces: Vec<&PieceSource>) -> Result<WrittenFile> {
    let failed = |e: std::io::Error| Error::io("save", path, e);
    sort_by_key(&mut pieces, |piece| std::cmp::Reverse(piece.shard.dtype().size_bytes()));
    let header = header(&pieces);
    if header.len() as u64 > MOST_HEADER_BYTES {
        let rule = format!("the names of a rank's pieces take at most {MOST_HEADER_BYTES} bytes");
        let given = format!("{} bytes for {}", header.len(), path.display());
        return Err(Error::invalid("save", rule, given, "save on more ranks, or give shorter names"));
    }
    let mut file = BufWriter::with_capacity(PART_BYTES, File::create(path).map_err(failed)?);
    file.write_all(&header).map_err(failed)?;
    let mut bytes = header.len() as u64;
    let mut written = Vec::with_capacity(pieces.len());
    for piece in pieces {
        let mut writer = SummedWriter {
            file: &mut file,
            sum: crc32fast::Hasher::new(),
            len: 0,
            written: 0,
            blocks: PieceChecksums::default(),
        };
        writer.write_piece(piece).map_err(failed)?;
        bytes += piece.bytes() as u64;
        written.push(WrittenPiece {
            tensor: piece.tensor.clone(),
            key: piece.key.clone(),
            start: piece.start.to_vec(),
            shape: piece.shape.to_vec(),
            blocks: writer.finish(),
        });
    }
    file.into_inner().map_err(|e| failed(e.into_error()))?.sync_all().map_err(failed)?;
    Ok(WrittenFile { bytes, header_crc32: crc32fast::hash(&header), pieces: written })
}

/// Returns the header's length in eight bytes, and the header, padded so that data begins at a multiple of 64 bytes.
fn header(pieces: &[&PieceSource]) -> Vec<u8> {
    let mut entries = Map::new();
    entries.insert("__metadata__".into(), json!({ "format": "pt" }));
    let mut start = 0;
    for piece in pieces {
        let end = start + piece.bytes();
        let dtype = safetensors_dtype(piece.shard.dtype());
        let entry = json!({ "dtype": dtype, "shape": piece.shape.to_vec(), "data_offsets": [start, end] });
        entries.insert(piece.key.clone(), entry);
        start = end;
    }
    let mut text = serde_json::to_vec(&entries).expect("a map of strings is JSON");
    text.resize((text.len() + 8).next_multiple_of(64) - 8, b' ');
    [&(text.len() as u64).to_le_bytes()[..], &text].concat()
}

/// Writes a piece's bytes and sums each block.
struct SummedWriter<'a> {
    file: &'a mut BufWriter<File>,
    sum: crc32fast::Hasher,
    /// The bytes in the block that is being summed.
    len: usize,
    /// All bytes so far.
    written: usize,
    blocks: PieceChecksums,
}

impl SummedWriter<'_> {
    fn write_piece(&mut self, piece: &PieceSource) -> std::io::Result<()> {
        let bytes = piece.shard.as_bytes().expect("contiguous, in the CPU's memory");
        let size = piece.shard.dtype().size_bytes();
        let wanted = Region::of_box(piece.start.clone(), piece.shape.clone());
        let (mut outcome, before) = (Ok(()), self.written);
        for overlap in wanted.intersect(&piece.region) {
            overlap.runs(|_, at, len| {
                if outcome.is_ok() {
                    outcome = self.write(&bytes[at * size..][..len * size]);
                }
            });
        }
        outcome?;
        let written = self.written - before;
        match written == piece.bytes() {
            true => Ok(()),
            false => {
                Err(std::io::Error::other(format!("{}: {written} of {} bytes", piece.key, piece.bytes())))
            }
        }
    }

    fn write(&mut self, mut bytes: &[u8]) -> std::io::Result<()> {
        while !bytes.is_empty() {
            let (part, rest) = bytes.split_at(bytes.len().min(PART_BYTES).min(BLOCK_BYTES - self.len));
            self.sum.update(part);
            self.file.write_all(part)?;
            self.len += part.len();
            self.written += part.len();
            if self.len == BLOCK_BYTES {
                self.end_block();
            }
            bytes = rest;
        }
        Ok(())
    }

    fn end_block(&mut self) {
        self.blocks.push(std::mem::take(&mut self.sum).finalize());
        self.len = 0;
    }

    fn finish(mut self) -> PieceChecksums {
        if self.len > 0 {
            self.end_block();
        }
        self.blocks
    }
}
