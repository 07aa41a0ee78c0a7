//! Hashes of long files, whole or by samples, by which copies are compared.

use crate::base::Fnv1a;

/// Bytes whose checksum is one word of the hash of a whole file.
const PIECE_BYTES: usize = 1 << 20;

/// Returns a hash (FNV-1a, 64 bits) of words.
pub(crate) fn hash_words(words: impl IntoIterator<Item = u64>) -> u64 {
    Fnv1a::of(words.into_iter().flat_map(u64::to_le_bytes))
}

/// Returns a hash of all bytes. A difference in one piece of a mebibyte stays unseen once in 2^32 cases.
pub(crate) fn hash_all(bytes: &[u8]) -> u64 {
    let pieces = bytes.chunks(PIECE_BYTES).map(|piece| crc32fast::hash(piece).into());
    hash_words([bytes.len() as u64].into_iter().chain(pieces))
}

/// Returns a hash of the length and of `count` samples of `each` bytes, at equal distances from the first byte to the
/// last. An odd `count` has a sample in the middle.
pub(crate) fn hash_samples(bytes: &[u8], count: usize, each: usize) -> u64 {
    let last = bytes.len().saturating_sub(each);
    let sample = |i: usize| {
        let start = (last as u128 * i as u128 / (count - 1).max(1) as u128) as usize;
        crc32fast::hash(&bytes[start..bytes.len().min(start + each)]).into()
    };
    hash_words([bytes.len() as u64].into_iter().chain((0..count).map(sample)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_see_both_ends_and_the_middle() {
        let bytes: Vec<u8> = (0..10_001).map(|i| (i % 251) as u8).collect();
        let changed = |at: usize| {
            let mut other = bytes.clone();
            other[at] ^= 1;
            (
                hash_samples(&other, 3, 100) != hash_samples(&bytes, 3, 100),
                hash_all(&other) != hash_all(&bytes),
            )
        };
        for at in [0, 99, 4951, 5000, 5049, 9901, 10_000] {
            assert_eq!(changed(at), (true, true), "{at}");
        }
        for at in [100, 4900, 9000] {
            assert_eq!(changed(at), (false, true), "{at} lies between samples");
        }
        assert_ne!(hash_samples(&bytes, 3, 100), hash_samples(&bytes[..10_000], 3, 100));
        for len in 0..5 {
            assert_eq!(hash_samples(&bytes[..len], 1, 4), hash_samples(&bytes[..len], 1, 4));
            let mut other = bytes[..len].to_vec();
            other.iter_mut().for_each(|byte| *byte ^= 9);
            assert_eq!(hash_samples(&other, 5, 4) == hash_samples(&bytes[..len], 5, 4), len == 0);
        }
    }
}
