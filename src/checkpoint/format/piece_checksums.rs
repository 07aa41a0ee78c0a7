//! Checksums of a piece's bytes, block by block, so that a reader of some bytes checks them without reading all.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// The bytes that one checksum covers; the last block of a piece may be shorter.
pub(in crate::checkpoint) const BLOCK_BYTES: usize = 1 << 20;

/// A CRC-32 (ISO 3309, as in zip files) per block of [`BLOCK_BYTES`]; in JSON, eight hexadecimal digits each.
#[derive(Clone, Debug, Default, PartialEq)]
pub(in crate::checkpoint) struct PieceChecksums(Vec<u32>);

impl PieceChecksums {
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn push(&mut self, sum: u32) {
        self.0.push(sum);
    }

    /// The checksum of a block.
    pub fn at(&self, block: usize) -> u32 {
        self.0[block]
    }
}

impl Serialize for PieceChecksums {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let digits: String = self.0.iter().map(|sum| format!("{sum:08x}")).collect();
        serializer.serialize_str(&digits)
    }
}

impl<'de> Deserialize<'de> for PieceChecksums {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<PieceChecksums, D::Error> {
        let digits = String::deserialize(deserializer)?;
        let sum = |eight: &[u8]| {
            let lower = eight.len() == 8 && eight.iter().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'));
            let text = std::str::from_utf8(eight).ok().filter(|_| lower)?;
            u32::from_str_radix(text, 16).ok()
        };
        let sums: Option<Vec<u32>> = digits.as_bytes().chunks(8).map(sum).collect();
        sums.map(PieceChecksums)
            .ok_or_else(|| de::Error::custom("checksums have eight hexadecimal digits each"))
    }
}
