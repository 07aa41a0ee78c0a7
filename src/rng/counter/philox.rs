//! Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2,
//! 3", SC 2011.
//!
//! ```
//! // The first known answer of Random123.
//! let words = isoshard::rng::philox::block([0; 2], [0; 4]);
//! assert_eq!(words, [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
//! ```

/// The number of rounds.
const ROUNDS: usize = 10;
const MULTIPLIERS: [u64; 2] = [0xd251_1f53, 0xcd9e_8d57];
const WEYL: [u64; 2] = [0x9e37_79b9, 0xbb67_ae85];
const LOW: u64 = 0xffff_ffff;

/// Returns the four words of one block. For every key this is a bijection of the counter.
///
/// The bits are those of `philox4x32` in Random123, cuRAND and others.
///
/// ```
/// use isoshard::rng::philox::block;
/// assert_ne!(block([1, 0], [0; 4]), block([2, 0], [0; 4]));
/// ```
#[inline(always)]
pub fn block(key: [u32; 2], counter: [u32; 4]) -> [u32; 4] {
    let low = u64::from(counter[0]) | u64::from(counter[1]) << 32;
    let high = u64::from(counter[2]) | u64::from(counter[3]) << 32;
    let [a, b] = pairs(key, low, high);
    [a as u32, (a >> 32) as u32, b as u32, (b >> 32) as u32]
}

/// `N` consecutive blocks. Each is two `u64`s, words 0 and 1, then words 2 and 3, with the earlier word in the low half.
#[repr(C, align(64))]
pub(crate) struct PhiloxBlocks<const N: usize>(pub(in crate::rng) [[u64; 2]; N]);

impl<const N: usize> PhiloxBlocks<N> {
    /// Computes the blocks from index `first` on (wrapping), with `high` in the counter's upper half. Vectorises over blocks.
    #[inline(always)]
    pub(in crate::rng) fn compute(key: [u32; 2], first: u64, high: u64) -> Self {
        let mut out = PhiloxBlocks([[0; 2]; N]);
        for (i, block) in out.0.iter_mut().enumerate() {
            *block = pairs(key, first.wrapping_add(i as u64), high);
        }
        out
    }

    /// Returns all words, in order.
    #[inline(always)]
    pub(crate) fn words(&mut self) -> &[u32] {
        let pairs = self.0.as_flattened_mut();
        if cfg!(target_endian = "big") {
            pairs.iter_mut().for_each(|pair| *pair = pair.rotate_left(32));
        }
        bytemuck::cast_slice(pairs)
    }
}

/// Computes one block in 64-bit lanes. Between rounds the upper halves are garbage; the products read the lower halves only.
#[inline(always)]
pub(in crate::rng) fn pairs(key: [u32; 2], low: u64, high: u64) -> [u64; 2] {
    let (mut k0, mut k1) = (u64::from(key[0]), u64::from(key[1]));
    let (mut c0, mut c1, mut c2, mut c3) = (low, low >> 32, high, high >> 32);
    for _ in 0..ROUNDS {
        let p0 = (c0 & LOW) * MULTIPLIERS[0];
        let p1 = (c2 & LOW) * MULTIPLIERS[1];
        (c0, c1, c2, c3) = ((p1 >> 32) ^ c1 ^ k0, p1, (p0 >> 32) ^ c3 ^ k1, p0);
        k0 = (k0 + WEYL[0]) & LOW;
        k1 = (k1 + WEYL[1]) & LOW;
    }
    [(c0 & LOW) | c1 << 32, (c2 & LOW) | c3 << 32]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers of Random123's `kat_vectors`: counter, key, result.
    const KNOWN: [([u32; 4], [u32; 2], [u32; 4]); 3] = [
        ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
        ([!0; 4], [!0; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
        (
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        ),
    ];

    /// The paper's definition: 32-bit words, a multiplication in two halves.
    fn definition(mut k: [u32; 2], mut c: [u32; 4]) -> [u32; 4] {
        let mulhilo = |a: u32, b: u32| {
            let p = u64::from(a) * u64::from(b);
            ((p >> 32) as u32, p as u32)
        };
        for _ in 0..10 {
            let (hi0, lo0) = mulhilo(0xd251_1f53, c[0]);
            let (hi1, lo1) = mulhilo(0xcd9e_8d57, c[2]);
            c = [hi1 ^ c[1] ^ k[0], lo1, hi0 ^ c[3] ^ k[1], lo0];
            k = [k[0].wrapping_add(0x9e37_79b9), k[1].wrapping_add(0xbb67_ae85)];
        }
        c
    }

    #[test]
    fn known_answers() {
        for (counter, key, want) in KNOWN {
            assert_eq!(block(key, counter), want);
            assert_eq!(definition(key, counter), want);
        }
    }

    #[test]
    fn bulk_is_the_definition() {
        let key = [0x0123_4567, 0x89ab_cdef];
        for first in [0, 5, u64::from(u32::MAX) - 3, u64::MAX - 2] {
            let high = 0xfedc_ba98_7654_3210;
            let mut blocks = PhiloxBlocks::<8>::compute(key, first, high);
            let want: Vec<u32> = (0..8u64)
                .flat_map(|i| {
                    let low = first.wrapping_add(i);
                    definition(key, [low as u32, (low >> 32) as u32, high as u32, (high >> 32) as u32])
                })
                .collect();
            assert_eq!(blocks.words(), want);
        }
    }
}
