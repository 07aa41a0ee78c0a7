//! Generators: explicit values that count draws.

use std::fmt;
use std::str::FromStr;

use rand_chacha::ChaCha12Rng;
use rand_core::SeedableRng;
use smallvec::SmallVec;

use super::draw::Draw;
use super::philox;
use crate::base::Fnv1a;
use crate::error::{Error, Result};

/// Names the algorithm in a state's text, so that a state of another one is refused.
const ALGORITHM: &str = "philox4x32-10";
/// Comparisons that a generator remembers: programs make one or two.
const COMPARISONS: usize = 4;

/// A counter of draws: each random operator takes the next one.
///
/// A generator is plain data, equal on every rank of an SPMD program; [`Generator::state`] saves it. It is not `Copy`, because
/// two copies that count separately give the same numbers twice. Two generators are equal if their next draws are equal.
///
/// Ranks with different generators would store shards of different tensors. So a `&mut Generator` that is passed to a random
/// operator on a mesh is compared over the ranks at its first draw there (see [`IntoDraw`](crate::dtensor::IntoDraw)). Later
/// draws communicate nothing, because the same program counts equally on every rank. Clones remember the comparison;
/// [children](Generator::child) and restored generators are compared again.
#[derive(Clone, Debug)]
pub struct Generator {
    seed: u64,
    draws: u64,
    /// The numbers of the comparisons over ranks that found this generator equal.
    compared: SmallVec<[u64; COMPARISONS]>,
}

/// The state of a [`Generator`], for saving and restoring.
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
    /// Creates a generator that has made no draw. Every seed is equally good.
    ///
    /// ```
    /// use isoshard::rng::Generator;
    /// assert_eq!(Generator::new(7), Generator::new(7));
    /// assert_ne!(Generator::new(7), Generator::new(8));
    /// ```
    pub fn new(seed: u64) -> Generator {
        Generator::from_state(GeneratorState { seed, draws: 0 })
    }

    /// Creates the generator that has this state.
    ///
    /// ```
    /// use isoshard::rng::{Generator, GeneratorState};
    /// let generator = Generator::from_state(GeneratorState { seed: 7, draws: 3 });
    /// assert_eq!(generator.draws(), 3);
    /// ```
    pub fn from_state(state: GeneratorState) -> Generator {
        Generator { seed: state.seed, draws: state.draws, compared: SmallVec::new() }
    }

    /// Returns the state, from which [`Generator::from_state`] continues.
    ///
    /// ```
    /// use isoshard::rng::Generator;
    /// let generator = Generator::new(7);
    /// assert_eq!(Generator::from_state(generator.state()), generator);
    /// ```
    pub fn state(&self) -> GeneratorState {
        GeneratorState { seed: self.seed, draws: self.draws }
    }

    /// Goes back or forward to a state.
    ///
    /// ```
    /// use isoshard::rng::Generator;
    /// let mut generator = Generator::new(7);
    /// let (start, first) = (generator.state(), generator.next_draw());
    /// generator.restore(start);
    /// assert_eq!(generator.next_draw(), first);
    /// ```
    pub fn restore(&mut self, state: GeneratorState) {
        *self = Generator::from_state(state);
    }

    /// Returns the next draw, without a comparison over ranks.
    ///
    /// ```
    /// use isoshard::rng::Generator;
    /// let mut generator = Generator::new(7);
    /// assert_ne!(generator.next_draw(), generator.next_draw());
    /// ```
    pub fn next_draw(&mut self) -> Draw {
        let number = self.draws;
        self.draws = number.wrapping_add(1);
        Draw { seed: self.seed, number }
    }

    /// Returns the seed.
    ///
    /// ```
    /// assert_eq!(isoshard::rng::Generator::new(7).seed(), 7);
    /// ```
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns the number of draws made so far.
    ///
    /// ```
    /// let mut generator = isoshard::rng::Generator::new(7);
    /// generator.next_draw();
    /// assert_eq!(generator.draws(), 1);
    /// ```
    pub fn draws(&self) -> u64 {
        self.draws
    }

    /// Returns a separate generator for a part of the program, e.g. `"dropout"` or `"layers.3.weight"`.
    ///
    /// It depends on this generator's seed and on the name, not on the draws made so far, so adding a part does not change the
    /// numbers of another. Its seed is words 0 and 1 of the Philox block whose key is this seed and whose counter is the name's
    /// 64-bit FNV-1a hash, then all ones. No draw below 2^48 - 1 reads that block.
    ///
    /// ```
    /// use isoshard::rng::Generator;
    /// let root = Generator::new(7);
    /// assert_ne!(root.child("dropout"), root.child("params"));
    /// assert_eq!(root.child("dropout"), Generator::new(7).child("dropout"));
    /// ```
    pub fn child(&self, name: &str) -> Generator {
        let words = self.named_block(name, !0);
        Generator::new(u64::from(words[0]) | u64::from(words[1]) << 32)
    }

    /// Returns a ChaCha12 generator for use on the host (shuffling files, augmenting), by name.
    ///
    /// Like [`Generator::child`] it depends on the seed and the name only, so it is equal on every rank. If ranks should differ,
    /// put the rank number into the name. Its 256-bit key is the two Philox blocks whose key is this seed and whose counters
    /// are the name's 64-bit FNV-1a hash, then 0 or 1, then all ones. No draw below 0xffff_0000_0000 reads these blocks. It is
    /// seekable: `get_word_pos`, `set_word_pos`, and `set_stream` for 2^64 streams of one key. Prefer a [`Draw`] for tensors,
    /// whose elements any rank can compute.
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

    /// Returns this generator as it is after `draws` draws, compared between the same ranks.
    pub(crate) fn at_draw(&self, draws: u64) -> Generator {
        Generator { draws, ..self.clone() }
    }

    /// Returns true if the comparison of this number found the generator equal on all ranks.
    pub(crate) fn is_compared(&self, comparison: u64) -> bool {
        self.compared.contains(&comparison)
    }

    /// Remembers that the comparison of this number found the generator equal on all ranks.
    pub(crate) fn remember_compared(&mut self, comparison: u64) {
        if self.compared.len() == COMPARISONS {
            self.compared.remove(0);
        }
        self.compared.push(comparison);
    }

    /// Returns the block with the counter FNV-1a(name), `place`, all ones.
    fn named_block(&self, name: &str, place: u32) -> [u32; 4] {
        let hash = Fnv1a::of(name.bytes());
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

    /// Parses the text that `Display` writes, and no other.
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
