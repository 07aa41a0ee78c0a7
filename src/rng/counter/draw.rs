//! The identity of one operator's random numbers.

/// Identifies all random numbers of one operator: a seed and the number of the draw.
///
/// The mapping to Philox is frozen. The key is the seed, low word first. The counter is, word by word,
/// `[block low, block high, number low, number high (16 bits) | attempt << 16]`: a block index of 64 bits, a draw
/// number of 48 and an attempt of 16. Every fill reads attempt 0 first; rejection sampling continues with 1, 2, ....
/// The bits of `number` above 48 are multiplied by 0x9e3779b97f4a7c15 and xored into the key, so every number is a
/// different draw. (A counting generator reaches them after nine years at a draw per microsecond.)
///
/// Element `e` (global, row-major) of a 32-bit draw reads word `e mod 4` of block `e div 4`. Element `e` of a 64-bit draw
/// reads words `2(e mod 2)` (the low half) and `2(e mod 2) + 1` of block `e div 2`. f16, bf16 and f32 use 32-bit draws,
/// f64 uses 64-bit draws.
///
/// ```
/// use isoshard::rng::{Draw, Generator};
/// let mut generator = Generator::new(7);
/// assert_eq!(generator.next_draw(), Draw { seed: 7, number: 0 });
/// assert_eq!(generator.next_draw(), Draw { seed: 7, number: 1 });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Draw {
    /// The generator's seed.
    pub seed: u64,
    /// The number of draws that the generator had made before.
    pub number: u64,
}

impl Draw {
    /// Returns the key for Philox.
    ///
    /// ```
    /// let draw = isoshard::rng::Draw { seed: 0x0000_0002_0000_0001, number: 0 };
    /// assert_eq!(draw.key(), [1, 2]);
    /// ```
    #[inline]
    pub fn key(self) -> [u32; 2] {
        let key = self.seed ^ (self.number >> 48).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        [key as u32, (key >> 32) as u32]
    }

    /// Returns Philox's counter for a block of an attempt.
    ///
    /// ```
    /// let draw = isoshard::rng::Draw { seed: 0, number: 5 };
    /// assert_eq!(draw.counter(9, 1), [9, 0, 5, 1 << 16]);
    /// ```
    #[inline]
    pub fn counter(self, block: u64, attempt: u16) -> [u32; 4] {
        let high = self.counter_high(attempt);
        [block as u32, (block >> 32) as u32, high as u32, (high >> 32) as u32]
    }

    #[inline]
    pub(in crate::rng) fn counter_high(self, attempt: u16) -> u64 {
        (self.number & 0xffff_ffff_ffff) | u64::from(attempt) << 48
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_is_frozen() {
        let draw = Draw { seed: 0x1122_3344_5566_7788, number: 0x0000_aabb_ccdd_eeff };
        assert_eq!(draw.key(), [0x5566_7788, 0x1122_3344]);
        assert_eq!(
            draw.counter(0x0102_0304_0506_0708, 9),
            [0x0506_0708, 0x0102_0304, 0xccdd_eeff, 0x0009_aabb]
        );
        let beyond = Draw { number: draw.number | 1 << 48, ..draw };
        assert_eq!(beyond.counter(0, 0), draw.counter(0, 0));
        assert_eq!(beyond.key(), [0x5566_7788 ^ 0x7f4a_7c15, 0x1122_3344 ^ 0x9e37_79b9]);
    }
}
