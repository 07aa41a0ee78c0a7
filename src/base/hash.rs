//! Hashes of bytes and numbers whose values never change: files, messages and random streams have them.

/// A hash of bytes: FNV-1a, 64 bits (Fowler, Noll and Vo).
pub(crate) struct Fnv1a(u64);

impl Fnv1a {
    /// Returns the hash of no bytes.
    pub const fn new() -> Fnv1a {
        Fnv1a(0xcbf2_9ce4_8422_2325)
    }

    /// Returns the hash of all these bytes.
    pub fn of(bytes: impl IntoIterator<Item = u8>) -> u64 {
        let mut hash = Fnv1a::new();
        hash.add(bytes);
        hash.value()
    }

    /// Appends bytes to those that are hashed.
    pub fn add(&mut self, bytes: impl IntoIterator<Item = u8>) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    pub fn value(&self) -> u64 {
        self.0
    }
}

/// Mixes the bits of a number: SplitMix64's finaliser. Different numbers give different numbers.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_the_published_ones() {
        for (text, hash) in
            [("", 0xcbf2_9ce4_8422_2325), ("a", 0xaf63_dc4c_8601_ec8c), ("foobar", 0x8594_4171_f739_67e8)]
        {
            assert_eq!(Fnv1a::of(text.bytes()), hash, "{text}");
        }
        let mut hash = Fnv1a::new();
        ["foo", "bar"].iter().for_each(|part| hash.add(part.bytes()));
        assert_eq!(hash.value(), Fnv1a::of("foobar".bytes()));
        assert_eq!(mix(0x9e37_79b9_7f4a_7c15), 0xe220_a839_7b1d_cdaf, "the first number of SplitMix64(0)");
    }
}
