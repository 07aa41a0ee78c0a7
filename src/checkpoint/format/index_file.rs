//! The file of the index: one JSON object with the format's name, a checksum of the index, and the index itself.
//!
//! `{"format":"isoshard checkpoint 2","sha256":"<64 digits>","index":<index>}`, without a space. A reader compares the whole
//! file with what it would write for the same index, before it believes a value of it. So no bit of the file can differ, not
//! one of its format's name either: a file of this format does not become one of the format before, which had no checksum
//! and no field `sha256`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::Read;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::index::{INDEX, Index, PieceFile, SavedTensor};
use super::json_room::expect_json_room;
use crate::error::{Error, Result};
use crate::tensor::{KernelList, open_regular};

const VERB: &str = "checkpoint";
const FORMAT: &str = "isoshard checkpoint 2";
/// The format before, which had no checksum. Its checkpoints are read, too.
const UNSUMMED_FORMAT: &str = "isoshard checkpoint 1";
/// The most bytes of an index: with one checksum per MiB, enough for more than 20 TiB of tensors.
const MOST_BYTES: u64 = 256 << 20;

/// An index that was read, with the SHA-256 of its text.
#[derive(Debug)]
pub(in crate::checkpoint) struct SummedIndex {
    pub index: Index,
    pub sha256: [u8; 32],
}

/// The file of the format before.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UnsummedIndex {
    #[serde(rename = "format")]
    _format: String,
    files: Vec<PieceFile>,
    tensors: BTreeMap<String, SavedTensor>,
    values: BTreeMap<String, Value>,
}

/// Returns the text of an index's file, which [`read_index`] can read.
///
/// # Errors
/// Refuses an index that could not be read again, so that no such checkpoint becomes visible.
pub(in crate::checkpoint) fn index_text(index: &Index) -> Result<Vec<u8>> {
    let refusal = |given: String| {
        let rule = "a checkpoint is made if its index can be read again";
        Error::invalid("save", rule, given, "change the names or values of the state")
    };
    let body = serde_json::to_vec(index).map_err(|e| refusal(e.to_string()))?;
    let text = [head(Sha256::digest(&body).into()).as_bytes(), &body, b"}"].concat();
    if text.len() as u64 > MOST_BYTES {
        return Err(refusal(format!("{} bytes, more than {MOST_BYTES}", text.len())));
    }
    let again: Index = serde_json::from_slice(&body).map_err(|e| refusal(e.to_string()))?;
    again.check().map_err(&refusal)?;
    match again == *index {
        true => Ok(text),
        false => Err(refusal("values that JSON changes".into())),
    }
}

/// Reads the index of a checkpoint's folder, and compares its checksum and the files' lengths.
pub(in crate::checkpoint) fn read_index(dir: &Path) -> Result<SummedIndex> {
    let path = dir.join(INDEX);
    let failed = |e: std::io::Error| Error::io(VERB, &path, e);
    let mut file = open_regular(&path).map_err(failed)?;
    let len = file.metadata().map_err(failed)?.len();
    if len > MOST_BYTES {
        return Err(refusal(format!("{len} bytes, more than {MOST_BYTES}")).at(&path.display().to_string()));
    }
    let mut text = KernelList::<u8>::zeros(VERB, len as usize)?;
    file.read_exact(&mut text).map_err(failed)?;
    let read = parse(&text).map_err(|e| e.at(&path.display().to_string()))?;
    for file in &read.index.files {
        let path = dir.join(&file.name);
        let len = std::fs::metadata(&path).map_err(|e| Error::io(VERB, &path, e))?.len();
        if len != file.bytes {
            let rule = format!("the index says that the file has {} bytes", file.bytes);
            let given = format!("{} with {len} bytes", path.display());
            return Err(Error::invalid(VERB, rule, given, "load another checkpoint"));
        }
    }
    Ok(read)
}

/// Reads the text of an index's file. Nothing of it is used before its checksum is compared; memory is asked for before
/// it is taken.
fn parse(text: &[u8]) -> Result<SummedIndex> {
    let format = text.strip_prefix(b"{\"format\":\"").and_then(|rest| rest.split(|&c| c == b'"').next());
    let index = match format {
        Some(format) if format == FORMAT.as_bytes() => {
            let body = summed_body(text).ok_or_else(|| {
                let rule = "the index is not the one that was saved";
                let given = "another checksum than its own";
                Error::invalid(VERB, rule, given, "load another checkpoint")
            })?;
            expect_json_room(VERB, body)?;
            serde_json::from_slice(body).map_err(|e| refusal(e.to_string()))?
        }
        Some(format) if format == UNSUMMED_FORMAT.as_bytes() => {
            expect_json_room(VERB, text)?;
            let UnsummedIndex { files, tensors, values, .. } =
                serde_json::from_slice(text).map_err(|e| refusal(e.to_string()))?;
            Index { run: None, files, tensors, values }
        }
        Some(format) => {
            let format = String::from_utf8_lossy(&format[..format.len().min(FORMAT.len())]);
            return Err(refusal(format!("format {format:?}")));
        }
        None => return Err(refusal("no format".into())),
    };
    index.check().map_err(refusal)?;
    Ok(SummedIndex { index, sha256: Sha256::digest(text).into() })
}

/// Returns the index's text if the rest of the file is what belongs to it.
fn summed_body(text: &[u8]) -> Option<&[u8]> {
    let head_len = head([0; 32]).len();
    let body = text.get(head_len..)?.strip_suffix(b"}")?;
    (head(Sha256::digest(body).into()).as_bytes() == &text[..head_len]).then_some(body)
}

/// Returns the beginning of the file with an index; its length is always the same.
fn head(sha256: [u8; 32]) -> String {
    let mut digits = String::with_capacity(64);
    for byte in sha256 {
        write!(digits, "{byte:02x}").expect("a string takes all text");
    }
    format!("{{\"format\":\"{FORMAT}\",\"sha256\":\"{digits}\",\"index\":")
}

fn refusal(given: String) -> Error {
    let rule = "the index is not one that this version writes";
    Error::invalid(VERB, rule, given, "load another checkpoint")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Index {
        let values = [("data.epoch".to_string(), Value::from(3)), ("dropout".into(), "philox:7:0".into())];
        let mut index = Index::new(values.into());
        let piece = |key: &str, start: usize| serde_json::json!({ "file": 0, "key": key, "start": [start], "shape": [2], "blocks": "0123abcd" });
        let file = serde_json::json!({ "name": "part-00000.safetensors", "bytes": 16, "header_crc32": 7 });
        index.files.push(serde_json::from_value(file).unwrap());
        let pieces = [piece("w#0", 0), piece("w#1", 2)];
        let w = serde_json::json!({ "dtype": "f32", "shape": [4], "pieces": pieces });
        index.tensors.insert("w".into(), serde_json::from_value(w).unwrap());
        index
    }

    fn refused(text: &[u8]) -> String {
        parse(text).map(drop).unwrap_err().to_string()
    }

    #[test]
    fn each_flipped_bit_and_each_cut_is_refused() {
        let text = index_text(&sample()).unwrap();
        assert_eq!(parse(&text).unwrap().index, sample());
        for bit in 0..8 * text.len() {
            let mut flipped = text.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            refused(&flipped);
        }
        for len in 0..text.len() {
            refused(&text[..len]);
        }
        assert!(refused(&[&text[..], b" "].concat()).contains("another checksum than its own"));
        assert!(refused(&[&text[..9], b" ", &text[9..]].concat()).contains("no format"));
    }

    /// A file of this format with the format's name of the one before, which needs two flipped bits.
    #[test]
    fn the_format_before_is_read_and_a_new_file_does_not_become_one() {
        let text = String::from_utf8(index_text(&sample()).unwrap()).unwrap();
        let downgraded = text.replacen(FORMAT, UNSUMMED_FORMAT, 1);
        assert!(refused(downgraded.as_bytes()).contains("unknown field `sha256`"));
        assert!(refused(text.replacen("checkpoint 2", "checkpoint 3", 1).as_bytes()).contains(
            "the index is not one that this version writes; got format \"isoshard checkpoint 3\"; load another"
        ));
        let body = serde_json::to_string(&sample()).unwrap();
        let before = format!("{{\"format\":\"{UNSUMMED_FORMAT}\",{}", &body[1..]);
        assert_eq!(parse(before.as_bytes()).unwrap().index, sample());
        assert_eq!(
            FORMAT.bytes().zip(UNSUMMED_FORMAT.bytes()).map(|(a, b)| (a ^ b).count_ones()).sum::<u32>(),
            2
        );
    }

    /// Exchanges of what tells pieces apart, under a right checksum.
    #[test]
    fn a_piece_under_another_name_is_refused() {
        let with = |change: &dyn Fn(&mut SavedTensor)| {
            let mut index = sample();
            change(index.tensors.get_mut("w").unwrap());
            index.check().unwrap_err()
        };
        assert_eq!(with(&|w| w.pieces[0].key = "v#0".into()), "a piece at [0] named \"v#0\" in tensor \"w\"");
        let exchanged = with(&|w| {
            let [a, b] = &mut w.pieces[..] else { panic!("two") };
            std::mem::swap(&mut a.key, &mut b.key);
        });
        assert_eq!(exchanged, "a piece at [0] named \"w#1\" in tensor \"w\"");
        assert_eq!(with(&|w| w.pieces[1].start[0] = 1), "overlapping pieces in tensor \"w\"");
        let mut renamed = sample();
        let w = renamed.tensors.remove("w").unwrap();
        renamed.tensors.insert("v".into(), w);
        assert!(renamed.check().unwrap_err().ends_with("in tensor \"v\""));
        assert!(index_text(&renamed).unwrap_err().to_string().starts_with("save: a checkpoint is made if"));
    }
}
