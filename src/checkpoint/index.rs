//! The index of a checkpoint: a JSON file with the place of each piece of each tensor.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use rustc_hash::FxHashSet;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::block_sums::{BLOCK_BYTES, BlockSums};
use super::run_id::RunId;
use crate::error::{Error, Result};
use crate::tensor::{DType, Dims, Shape, open_regular};

/// The name of the index's file. A folder without it is no checkpoint.
pub(super) const INDEX: &str = "checkpoint.json";
const FORMAT: &str = "isoshard checkpoint 1";

/// The content of the index.
#[derive(Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub(super) struct Index {
    pub format: String,
    /// The run that saved this. It comes before the files, so that the start of the index tells it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<RunId>,
    pub files: Vec<PieceFile>,
    pub tensors: BTreeMap<String, SavedTensor>,
    pub values: BTreeMap<String, Value>,
}

/// A safetensors file with pieces of tensors.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub(super) struct PieceFile {
    pub name: String,
    /// The length of the file.
    pub bytes: u64,
    /// The checksum of the file's first bytes: the header's length and the header.
    pub header_crc32: u32,
}

/// A tensor and its pieces, which cover it without overlap.
#[derive(Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub(super) struct SavedTensor {
    pub dtype: String,
    pub shape: Vec<usize>,
    pub pieces: Vec<SavedPiece>,
}

/// A box of a tensor's indices in a file.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub(super) struct SavedPiece {
    /// The file's number.
    pub file: usize,
    /// The piece's name in its file.
    pub key: String,
    pub start: Vec<usize>,
    pub shape: Vec<usize>,
    /// A checksum per block of the piece's bytes.
    pub blocks: BlockSums,
}

impl Index {
    pub fn new(values: BTreeMap<String, Value>) -> Index {
        Index { format: FORMAT.into(), run: None, files: Vec::new(), tensors: BTreeMap::new(), values }
    }

    /// Reads the index of a checkpoint's folder and compares the files' lengths.
    pub fn read(dir: &Path) -> Result<Index> {
        let path = dir.join(INDEX);
        let failed = |e: std::io::Error| Error::io("checkpoint", &path, e);
        let mut text = Vec::new();
        let file = open_regular(&path).map_err(failed)?;
        let len = file.metadata().map_err(failed)?.len();
        file.take(len).read_to_end(&mut text).map_err(failed)?;
        let index = Index::parse(&text).map_err(|e| e.at(&path.display().to_string()))?;
        for file in &index.files {
            let path = dir.join(&file.name);
            let len = std::fs::metadata(&path).map_err(|e| Error::io("checkpoint", &path, e))?.len();
            if len != file.bytes {
                let rule = format!("the index says that the file has {} bytes", file.bytes);
                let given = format!("{} with {len} bytes", path.display());
                return Err(Error::invalid("checkpoint", rule, given, "load another checkpoint"));
            }
        }
        Ok(index)
    }

    /// Reads an index. Every number is checked before it is used: names stay in the folder, pieces lie within their
    /// tensor and cover it once, and no file has more bytes of pieces than its length.
    pub fn parse(text: &[u8]) -> Result<Index> {
        let index: Index = serde_json::from_slice(text).map_err(|e| refusal(e.to_string()))?;
        if index.format != FORMAT {
            return Err(refusal(format!("format {:?}", index.format)));
        }
        let mut names = FxHashSet::default();
        for file in &index.files {
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            if file.name.is_empty() || file.name.starts_with('.') || !file.name.chars().all(plain) {
                return Err(refusal(format!("a file named {:?}", file.name)));
            }
            if !names.insert(&file.name) {
                return Err(refusal(format!("two files named {:?}", file.name)));
            }
        }
        let mut room: Vec<u64> = index.files.iter().map(|file| file.bytes).collect();
        for (name, tensor) in &index.tensors {
            tensor.check(&mut room).map_err(|e| refusal(format!("{e} in tensor {name:?}")))?;
        }
        Ok(index)
    }
}

fn refusal(given: String) -> Error {
    let rule = "the index is not one that this version writes";
    Error::invalid("checkpoint", rule, given, "load another checkpoint")
}

impl SavedTensor {
    pub fn dtype(&self) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| dtype.name() == self.dtype)
    }

    /// Refuses pieces that do not cover the tensor once. `room` has each file's bytes that no piece takes so far.
    fn check(&self, room: &mut [u64]) -> std::result::Result<(), String> {
        let dtype = self.dtype().ok_or_else(|| format!("dtype {:?}", self.dtype))?;
        let shape = Shape::from(&self.shape[..]);
        shape.checked_bytes("checkpoint", dtype).map_err(|e| e.to_string())?;
        for piece in &self.pieces {
            let dims = piece.start.len() == shape.len() && piece.shape.len() == shape.len();
            let inside =
                |d: usize| piece.start[d].checked_add(piece.shape[d]).is_some_and(|end| end <= shape[d]);
            if !dims || piece.shape.contains(&0) || !(0..shape.len()).all(inside) {
                return Err(format!("a piece at {:?} of shape {:?} of {shape}", piece.start, piece.shape));
            }
            let bytes = piece.numel() as u64 * dtype.size_bytes() as u64;
            let Some(left) = room.get_mut(piece.file) else {
                return Err(format!("a piece in file {} of {}", piece.file, room.len()));
            };
            *left =
                left.checked_sub(bytes).ok_or_else(|| format!("more bytes than file {} has", piece.file))?;
            if piece.blocks.len() as u64 != bytes.div_ceil(BLOCK_BYTES as u64) {
                return Err(format!("{} checksums for {bytes} bytes", piece.blocks.len()));
            }
        }
        let covered: u128 = self.pieces.iter().map(|piece| piece.numel() as u128).sum();
        if covered != shape.numel() as u128 {
            return Err(format!("pieces of {covered} elements for {shape}"));
        }
        match overlapping(&self.pieces, shape.len()) {
            Some([a, b]) => Err(format!("overlapping pieces at {:?} and {:?}", a.start, b.start)),
            None => Ok(()),
        }
    }
}

impl SavedPiece {
    /// The number of elements; it fits, because the piece lies within a tensor that fits.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    pub fn dims(&self) -> (Dims, Shape) {
        (Dims::from_slice(&self.start), Shape::from(&self.shape[..]))
    }
}

/// Returns two pieces that overlap, if there are any: pieces that begin ever later along one dim are compared with
/// the earlier ones that reach their begin.
fn overlapping(pieces: &[SavedPiece], dims: usize) -> Option<[&SavedPiece; 2]> {
    let distinct = |d: &usize| {
        let mut starts: Vec<usize> = pieces.iter().map(|piece| piece.start[*d]).collect();
        starts.sort_unstable();
        starts.dedup();
        starts.len()
    };
    let Some(sweep) = (0..dims).max_by_key(distinct) else {
        return if let [a, b, ..] = pieces { Some([a, b]) } else { None };
    };
    let mut order: Vec<&SavedPiece> = pieces.iter().collect();
    order.sort_by_key(|piece| piece.start[sweep]);
    let end = |piece: &SavedPiece, d: usize| piece.start[d] + piece.shape[d];
    let mut reaching: Vec<&SavedPiece> = Vec::new();
    for piece in order {
        reaching.retain(|other| end(other, sweep) > piece.start[sweep]);
        let meets = |other: &&&SavedPiece| {
            (0..dims).all(|d| other.start[d] < end(piece, d) && piece.start[d] < end(other, d))
        };
        if let Some(other) = reaching.iter().find(meets) {
            return Some([other, piece]);
        }
        reaching.push(piece);
    }
    None
}
