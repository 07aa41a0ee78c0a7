//! Generators: explicit values that count the draws they hand out.

use std::fmt;
use std::str::FromStr;

use rand_chacha::ChaCha12Rng;
use rand_core::SeedableRng;
use smallvec::SmallVec;

use super::{Draw, philox};
use crate::error::{Error, Result};

/// Names the algorithm in a state's text, so that a state of another one is refused.
const ALGORITHM: &str = "philox4x32-10";
/// Comparisons that a generator remembers: programs make one or two.
const COMPARISONS: usize = 4;

/// Hands out draws, one for each random operator, in the program's order.
///
/// It is plain data, equal on every rank of an SPMD program; [`Generator::state`] saves it. It is not `Copy`, because
/// two copies that count apart give the same numbers twice. Two generators are equal if they will hand out the same
/// draws.
///
/// Ranks whose generators differ would hold parts of different tensors. A `&mut Generator` given to a random operator
/// on a mesh is therefore compared over the ranks at its first draw there (see
/// [`IntoDraw`](crate::dtensor::IntoDraw)); later draws communicate nothing, because a program that is the same on
/// every rank counts alike. Clones keep what has been compared; [children](Generator::child) and restored generators
/// are compared anew.
#[derive(Clone, Debug)]
pub struct Generator {
    seed: u64,
    draws: u64,
    /// The comparisons with other copies in which this generator was found to be the same, by numbers that those who
    /// compare give.
    compared: SmallVec<[u64; COMPARISONS]>,
}

/// All there is to a [`Generator`], to be saved and restored.
///
/// Its text names the algorithm, the seed in 16 hexadecimal digits, and the number of draws made so far. Any other
/// text is refused.
///
/// ```
/// use isoshard::rng::{Generator, GeneratorState};
/// let mut generator = Generator::new(7);
/// generator.next_draw();
/// let text = generator.state().to_string();
/// assert_eq!(text, "philox4x32-10:0000000000000007:1");
/// let mut restored = Generator::from_state(text.parse()?);
/// assert_eq!(restored.next_draw(), generator.next_draw());
/// assert!("philox4x32-10:7:1".parse::<GeneratorState>().is_err());
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GeneratorState {
    /// The seed.
    pub seed: u64,
    /// The number of draws made so far.
    pub draws: u64,
}

impl Generator {
    /// A generator that has not drawn yet. Any seed is as good as another.
    pub fn new(seed: u64) -> Generator {
        Generator::from_state(GeneratorState { seed, draws: 0 })
    }

    /// The generator that was in this state.
    pub fn from_state(state: GeneratorState) -> Generator {
        Generator { seed: state.seed, draws: state.draws, compared: SmallVec::new() }
    }

    /// The state, from which [`Generator::from_state`] goes on.
    pub fn state(&self) -> GeneratorState {
        GeneratorState { seed: self.seed, draws: self.draws }
    }

    /// Goes back, or forward, to a state.
    pub fn restore(&mut self, state: GeneratorState) {
        *self = Generator::from_state(state);
    }

    /// The next operator's draw, whoever asks: nothing is compared over ranks.
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
        let words = self.named_block(name, !0);
        Generator::new(u64::from(words[0]) | u64::from(words[1]) << 32)
    }

    /// A ChaCha12 stream for the host's own use (shuffling files, negotiating, augmenting), by name.
    ///
    /// It depends on the seed and the name alone, as [`Generator::child`] does, so it is equal on every rank; where
    /// ranks shall differ, put the rank into the name. Its 256-bit key is the two Philox blocks whose key is this
    /// seed and whose counters are the name's 64-bit FNV-1a hash, then 0 or 1, then all ones: places that no draw
    /// below 0xffff_0000_0000 reads. It is seekable: `get_word_pos`, `set_word_pos`, and `set_stream` for 2^64
    /// streams of one key. Prefer a [`Draw`] for tensors, whose elements any rank can compute.
    ///
    /// ```
    /// use isoshard::rng::Generator;
    /// use rand_core::Rng;
    /// let mut a = Generator::new(7).host("files");
    /// let mut b = a.clone();
    /// let _ = a.next_u64();
    /// b.set_word_pos(2);
    /// assert_eq!(a.next_u32(), b.next_u32());
    /// ```
    pub fn host(&self, name: &str) -> ChaCha12Rng {
        let mut key = [0; 32];
        let words = [0, 1].map(|i| self.named_block(name, i));
        for (bytes, word) in key.chunks_exact_mut(4).zip(words.as_flattened()) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        ChaCha12Rng::from_seed(key)
    }

    /// True if the comparison of this number is known to have found the same generator everywhere.
    pub(crate) fn is_compared(&self, comparison: u64) -> bool {
        self.compared.contains(&comparison)
    }

    /// Remembers that the comparison of this number found the same generator everywhere.
    pub(crate) fn remember_compared(&mut self, comparison: u64) {
        if self.compared.len() == COMPARISONS {
            self.compared.remove(0);
        }
        self.compared.push(comparison);
    }

    /// The block at a place of its own for each name: counter FNV-1a(name), `place`, all ones.
    fn named_block(&self, name: &str, place: u32) -> [u32; 4] {
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let key = [self.seed as u32, (self.seed >> 32) as u32];
        philox::block(key, [hash as u32, (hash >> 32) as u32, place, !0])
    }
}

impl PartialEq for Generator {
    fn eq(&self, other: &Generator) -> bool {
        self.state() == other.state()
    }
}

impl Eq for Generator {}

impl fmt::Display for GeneratorState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{ALGORITHM}:{:016x}:{}", self.seed, self.draws)
    }
}

impl FromStr for GeneratorState {
    type Err = Error;

    /// Reads what `Display` writes, and nothing else.
    fn from_str(text: &str) -> Result<GeneratorState> {
        let read = || {
            let (seed, draws) = text.strip_prefix(ALGORITHM)?.strip_prefix(':')?.split_once(':')?;
            let seed = u64::from_str_radix(seed, 16).ok()?;
            Some(GeneratorState { seed, draws: draws.parse().ok()? })
        };
        // One state has one text: signs, spaces, leading zeros and upper case are damage.
        read().filter(|state| state.to_string() == text).ok_or_else(|| {
            Error::invalid(
                "generator",
                "not the text of a generator's state",
                format!("{text:?}"),
                format!("a state reads {ALGORITHM}:<16 hexadecimal digits of the seed>:<draws made so far>"),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use rand_core::Rng;
    use rand_distr::Distribution;

    use super::*;

    #[test]
    fn a_generator_counts_and_can_be_restored() {
        let mut a = Generator::new(3);
        assert_eq!([a.next_draw(), a.next_draw()].map(|d| d.number), [0, 1]);
        let saved = a.state();
        let mut b = Generator::from_state(saved.to_string().parse().unwrap());
        assert_eq!(a.next_draw(), b.next_draw());
        assert_eq!(a, b);
        b.restore(saved);
        assert_ne!(a, b);
        let last = GeneratorState { seed: !0, draws: !0 };
        assert_eq!(last.to_string().parse(), Ok(last));
    }

    #[test]
    fn damaged_states_are_refused() {
        let sound = "philox4x32-10:0123456789abcdef:5";
        assert!(sound.parse::<GeneratorState>().is_ok());
        for damaged in [
            "",
            "philox4x32-10",
            "philox4x32-10:",
            "philox4x32-10:0123456789abcdef",
            "philox4x32-10:0123456789abcdef:",
            "philox4x32-10:0123456789abcdef:-5",
            "philox4x32-10:0123456789abcdef:+5",
            "philox4x32-10:0123456789abcdef:05",
            "philox4x32-10:0123456789abcdef:5 ",
            "philox4x32-10:0123456789abcdef:5:1",
            "philox4x32-10:0123456789ABCDEF:5",
            "philox4x32-10:+123456789abcdef:5",
            "philox4x32-10:123456789abcdef:5",
            "philox4x32-10:00123456789abcdef:5",
            "philox4x32-10:0123456789abcdef:18446744073709551616",
            "philox4x32-7:0123456789abcdef:5",
        ] {
            assert!(damaged.parse::<GeneratorState>().is_err(), "{damaged:?}");
        }
        assert_eq!(
            "7".parse::<GeneratorState>().unwrap_err().to_string(),
            "generator: not the text of a generator's state; got \"7\"; a state reads philox4x32-10:<16 hexadecimal \
             digits of the seed>:<draws made so far>"
        );
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

    #[test]
    fn what_was_compared_is_cloned_but_not_restored() {
        let mut g = Generator::new(1);
        (10..10 + COMPARISONS as u64).for_each(|number| g.remember_compared(number));
        assert!(g.is_compared(10) && g.clone().is_compared(13) && !g.is_compared(9));
        g.remember_compared(20);
        assert!(!g.is_compared(10) && g.is_compared(20), "the oldest is forgotten");
        assert!(!g.child("a").is_compared(20) && !Generator::from_state(g.state()).is_compared(20));
        g.restore(g.state());
        assert!(!g.is_compared(20));
    }

    #[test]
    fn host_streams_are_frozen_seekable_and_apart() {
        let root = Generator::new(0x0123_4567_89ab_cdef);
        let mut files = root.host("files");
        assert_eq!(
            [(); 4].map(|()| files.next_u32()),
            [907_465_010, 750_221_612, 1_142_489_706, 971_891_331]
        );
        files.set_word_pos((1 << 40) + 3);
        let far = files.next_u32();
        let mut again = root.host("files");
        again.set_word_pos((1 << 40) + 3);
        assert_eq!(again.next_u32(), far);
        let first = |mut rng: ChaCha12Rng| rng.next_u64();
        assert_ne!(first(root.host("files")), first(root.host("file")));
        assert_ne!(first(root.host("files")), first(Generator::new(1).host("files")));
        assert_ne!(first(root.host("files")), root.child("files").next_stream().next_u64());
    }

    #[test]
    fn other_crates_distributions_take_streams() {
        let mut root = Generator::new(5);
        let poisson = rand_distr::Poisson::new(40.0).unwrap();
        let mean = |rng: &mut dyn Rng| (0..4000).map(|_| poisson.sample(rng)).sum::<f64>() / 4000.0;
        // The mean of 4000 has a standard deviation of 0.1: 5 sigma.
        for got in [mean(&mut root.next_stream()), mean(&mut root.host("lengths"))] {
            assert!((got - 40.0_f64).abs() < 0.5, "{got}");
        }
        assert_eq!(root.draws(), 1, "a stream is a draw, a host stream is none");
    }
}
