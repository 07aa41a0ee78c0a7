//! Which numbers an operator draws.

use super::philox;

/// One random operator's numbers, all of them: a seed and the draw's number.
///
/// The layout, frozen. Philox's key is the seed, low word first. Its counter is, word by word,
/// `[block low, block high, number low, number high (16 bits) | attempt << 16]`: a block index of 64 bits, a draw
/// number of 48 and an attempt of 16. Attempt 0 is what every fill reads first; rejection sampling goes on to 1,
/// 2, …. The bits of `number` from 48 up, which a counting generator reaches after nine years at a draw a
/// microsecond, are multiplied by 0x9e3779b97f4a7c15 and xored into the key: every number is a draw of its own.
///
/// Element `e` (global, row-major) of a 32-bit draw reads word `e mod 4` of block `e div 4`; of a 64-bit draw,
/// words `2(e mod 2)` (the low half) and `2(e mod 2) + 1` of block `e div 2`. f16, bf16 and f32 are 32-bit draws,
/// f64 is a 64-bit one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Draw {
    /// The generator's seed.
    pub seed: u64,
    /// How many draws the generator had made before.
    pub number: u64,
}

/// Hands out draws, one for each random operator, in the program's order.
///
/// It is plain data: equal on every rank of an SPMD program, saved and restored as `(seed, draws)`. It is not
/// `Copy`, because two copies that count apart give the same numbers twice.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Generator {
    seed: u64,
    draws: u64,
}

impl Draw {
    /// The key for Philox.
    #[inline]
    pub fn key(self) -> [u32; 2] {
        let key = self.seed ^ (self.number >> 48).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        [key as u32, (key >> 32) as u32]
    }

    /// The counter of a block of an attempt.
    #[inline]
    pub fn counter(self, block: u64, attempt: u16) -> [u32; 4] {
        let high = self.counter_high(attempt);
        [block as u32, (block >> 32) as u32, high as u32, (high >> 32) as u32]
    }

    #[inline]
    pub(super) fn counter_high(self, attempt: u16) -> u64 {
        (self.number & 0xffff_ffff_ffff) | u64::from(attempt) << 48
    }
}

impl Generator {
    /// A generator that has not drawn yet. Any seed is as good as another.
    pub fn new(seed: u64) -> Generator {
        Generator { seed, draws: 0 }
    }

    /// The generator that had this [`seed`](Generator::seed) and this count of [`draws`](Generator::draws).
    pub fn from_state(seed: u64, draws: u64) -> Generator {
        Generator { seed, draws }
    }

    /// The next operator's draw.
    pub fn next_draw(&mut self) -> Draw {
        let number = self.draws;
        self.draws = number.wrapping_add(1);
        Draw { seed: self.seed, number }
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The number of draws made so far.
    pub fn draws(&self) -> u64 {
        self.draws
    }

    /// A generator of its own for a part of the program, e.g. `"dropout"` or `"layers.3.weight"`.
    ///
    /// It depends on this one's seed and on the name, not on the draws made so far: adding a part does not change
    /// the numbers of another. Its seed is words 0 and 1 of the Philox block whose key is this seed and whose
    /// counter is the name's 64-bit FNV-1a hash, then all ones, a place that no draw below 2^48 - 1 reads.
    pub fn child(&self, name: &str) -> Generator {
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let key = [self.seed as u32, (self.seed >> 32) as u32];
        let words = philox::block(key, [hash as u32, (hash >> 32) as u32, !0, !0]);
        Generator::new(u64::from(words[0]) | u64::from(words[1]) << 32)
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

    #[test]
    fn a_generator_counts_and_can_be_restored() {
        let mut a = Generator::new(3);
        assert_eq!([a.next_draw(), a.next_draw()].map(|d| d.number), [0, 1]);
        let mut b = Generator::from_state(a.seed(), a.draws());
        assert_eq!(a.next_draw(), b.next_draw());
        assert_eq!(a, b);
    }

    #[test]
    fn children_depend_on_seed_and_name_alone() {
        let mut parent = Generator::new(3);
        let before = parent.child("dropout");
        parent.next_draw();
        assert_eq!(parent.child("dropout"), before);
        let seeds = [before, parent.child(""), parent.child("dropouu"), Generator::new(4).child("dropout")];
        for (i, a) in seeds.iter().enumerate() {
            assert!(seeds[..i].iter().all(|b| b.seed() != a.seed()));
        }
    }
}
