//! The index of a checkpoint: a JSON file with the place of each piece of each tensor.

use std::collections::BTreeMap;

use rustc_hash::FxHashSet;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::boxes;
use super::piece_checksums::{BLOCK_BYTES, PieceChecksums};
use super::run_id::RunId;
use crate::tensor::{DType, Dims, Shape, sort_by};

/// The name of the index's file. A folder without it is no checkpoint.
pub(in crate::checkpoint) const INDEX: &str = "checkpoint.json";

/// The content of the index.
#[derive(Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub(in crate::checkpoint) struct Index {
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
pub(in crate::checkpoint) struct PieceFile {
    pub name: String,
    /// The length of the file.
    pub bytes: u64,
    /// The checksum of the file's first bytes: the header's length and the header.
    pub header_crc32: u32,
}

/// A tensor and its pieces, which cover it without overlap.
#[derive(Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub(in crate::checkpoint) struct SavedTensor {
    pub dtype: String,
    pub shape: Vec<usize>,
    pub pieces: Vec<SavedPiece>,
}

/// A box of a tensor's indices in a file.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub(in crate::checkpoint) struct SavedPiece {
    /// The file's number.
    pub file: usize,
    /// The piece's name in its file.
    pub key: String,
    pub start: Vec<usize>,
    pub shape: Vec<usize>,
    /// A checksum per block of the piece's bytes.
    pub blocks: PieceChecksums,
}

impl Index {
    pub fn new(values: BTreeMap<String, Value>) -> Index {
        Index { run: None, files: Vec::new(), tensors: BTreeMap::new(), values }
    }

    /// Checks every number before it is used: names of files stay in the folder, pieces have their tensors' names, lie within
    /// them and cover them once, and no file has more bytes of pieces than its length.
    pub fn check(&self) -> std::result::Result<(), String> {
        let mut names = FxHashSet::default();
        for file in &self.files {
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            if file.name.is_empty() || file.name.starts_with('.') || !file.name.chars().all(plain) {
                return Err(format!("a file named {:?}", file.name));
            }
            if !names.insert(&file.name) {
                return Err(format!("two files named {:?}", file.name));
            }
        }
        let mut room: Vec<u64> = self.files.iter().map(|file| file.bytes).collect();
        let mut pieces = |(name, tensor): (&String, &SavedTensor)| {
            tensor.check(name, &mut room).map_err(|e| format!("{e} in tensor {name:?}"))
        };
        self.tensors.iter().try_for_each(&mut pieces)
    }
}

/// Returns the name of a piece in its file: the tensor's if the piece is the whole tensor, else with the number of the
/// piece. A piece therefore belongs to one region of one tensor.
pub(in crate::checkpoint) fn key_of(tensor: &str, is_whole: bool, number: usize) -> String {
    if is_whole { tensor.into() } else { format!("{tensor}#{number}") }
}

impl SavedTensor {
    pub fn dtype(&self) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| dtype.name() == self.dtype)
    }

    /// Refuses pieces that do not cover the tensor once, or have other names than its own. `room` has each file's bytes that
    /// no piece takes so far.
    fn check(&self, name: &str, room: &mut [u64]) -> std::result::Result<(), String> {
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
        if !boxes::cover_once(self.pieces.iter().map(|piece| (&piece.start[..], &piece.shape[..])), &shape) {
            return Err("overlapping pieces".into());
        }
        // Numbers follow the order of regions.
        let mut order: Vec<&SavedPiece> = self.pieces.iter().collect();
        sort_by(&mut order, |a, b| a.start.cmp(&b.start));
        let is_own = |(number, piece): (usize, &&SavedPiece)| {
            piece.key == key_of(name, piece.shape == self.shape, number)
        };
        match order.iter().enumerate().position(|of| !is_own(of)) {
            Some(at) => Err(format!("a piece at {:?} named {:?}", order[at].start, order[at].key)),
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
