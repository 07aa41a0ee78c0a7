//! The index of a checkpoint: a JSON file that says which part of which tensor stands in which file.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::tensor::{DType, Shape};

/// The name of the index's file. A folder without it is no checkpoint.
pub(super) const INDEX: &str = "checkpoint.json";
const FORMAT: &str = "isoshard checkpoint 1";
/// The largest index that is read.
pub(super) const INDEX_BYTES: u64 = 1 << 30;

/// The content of the index.
#[derive(Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub(super) struct Index {
    pub format: String,
    pub files: Vec<PieceFile>,
    pub tensors: BTreeMap<String, TensorIndex>,
    pub values: BTreeMap<String, serde_json::Value>,
}

/// A safetensors file with pieces of tensors.
#[derive(Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub(super) struct PieceFile {
    pub name: String,
    pub bytes: u64,
    pub crc32: u32,
}

/// A tensor and its pieces, which cover it without overlap.
#[derive(Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub(super) struct TensorIndex {
    pub dtype: String,
    pub shape: Vec<usize>,
    pub pieces: Vec<PieceIndex>,
}

/// A box of a tensor's indices in a file.
#[derive(Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub(super) struct PieceIndex {
    pub file: usize,
    pub key: String,
    pub start: Vec<usize>,
    pub shape: Vec<usize>,
}

impl Index {
    pub fn new() -> Index {
        Index { format: FORMAT.into(), files: Vec::new(), tensors: BTreeMap::new(), values: BTreeMap::new() }
    }

    /// Reads an index. Every number is checked before it is used: names stay in the folder, pieces lie within their
    /// tensor and cover it once.
    pub fn parse(text: &str) -> Result<Index> {
        let refuse = |given: String| {
            Err(Error::invalid("checkpoint", "the index is not one that this version writes", given, ""))
        };
        let index: Index = match serde_json::from_str(text) {
            Ok(index) => index,
            Err(error) => return refuse(error.to_string()),
        };
        if index.format != FORMAT {
            return refuse(format!("format {:?}", index.format));
        }
        for file in &index.files {
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            if file.name.starts_with('.') || file.name.is_empty() || !file.name.chars().all(plain) {
                return refuse(format!("a file named {:?}", file.name));
            }
        }
        for (name, tensor) in &index.tensors {
            let Some(dtype) = tensor.dtype() else {
                return refuse(format!("{name} of dtype {}", tensor.dtype));
            };
            let shape = Shape::from(tensor.shape.clone());
            shape.checked_bytes("checkpoint", dtype)?;
            let fits = |piece: &PieceIndex| {
                let lens = piece.start.len() == shape.len() && piece.shape.len() == shape.len();
                let ends = piece.start.iter().zip(&piece.shape).map(|(start, len)| start.checked_add(*len));
                lens && piece.file < index.files.len()
                    && ends.zip(shape.iter()).all(|(end, n)| end.is_some_and(|end| end <= *n))
            };
            if let Some(piece) = tensor.pieces.iter().find(|piece| !fits(piece)) {
                return refuse(format!("{name}{shape} with the piece {piece:?}"));
            }
            let numel = |shape: &[usize]| shape.iter().map(|&n| n as u128).product::<u128>();
            let covered: u128 = tensor.pieces.iter().map(|piece| numel(&piece.shape)).sum();
            if covered != numel(&shape) {
                return refuse(format!("{name}{shape} with pieces of {covered} elements"));
            }
        }
        Ok(index)
    }
}

impl TensorIndex {
    pub fn dtype(&self) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| dtype.name() == self.dtype)
    }
}
