//! The basic fills: words, uniform and normal numbers, for ranges of global indices.

use super::sample::{Affine, Normal, PhiloxSink, Sampled, Unchanged, Uniform, drive};
use crate::rng::Draw;
use crate::rng::counter::index_ranges::Indices;
use crate::rng::counter::philox::PhiloxBlocks;
use crate::tensor::Float;
use crate::tensor::cpu::Isa;

/// A floating element type of random numbers: f32, f64, f16 or bf16. Sealed.
#[expect(private_bounds, reason = "sealed")]
pub trait RandomFloat: Float + Sampled {}

impl<T: Sampled> RandomFloat for T {}

/// Writes the words of a 32-bit draw: `out[i]` is the word of the i-th element.
///
/// In every fill, `at` is the global linear index of `out[0]`, with the others following; or
/// [`IndexRanges`](crate::rng::IndexRanges), for many ranges at once. A part has the whole's numbers.
///
/// ```
/// use isoshard::rng::{Generator, bits32};
/// let draw = Generator::new(7).next_draw();
/// let (mut whole, mut part) = ([0; 9], [0; 4]);
/// bits32(draw, 0, &mut whole);
/// bits32(draw, 5, &mut part);
/// assert_eq!(part, whole[5..]);
/// ```
pub fn bits32(draw: Draw, at: impl Indices, out: &mut [u32]) {
    drive(draw, 0, at.ranges(), out.len(), WordSink(out));
}

/// Writes the words of a 64-bit draw: `out[i]` is the pair of words of the i-th element, the earlier one in the low half.
///
/// ```
/// use isoshard::rng::{Generator, bits32, bits64};
/// let draw = Generator::new(7).next_draw();
/// let (mut pairs, mut words) = ([0; 2], [0; 4]);
/// bits64(draw, 0, &mut pairs);
/// bits32(draw, 0, &mut words);
/// assert_eq!(pairs[1], u64::from(words[2]) | u64::from(words[3]) << 32);
/// ```
pub fn bits64(draw: Draw, at: impl Indices, out: &mut [u64]) {
    drive(draw, 0, at.ranges(), out.len(), PairSink(out));
}

/// Writes uniform numbers in [0, 1).
///
/// f32: the upper 24 bits of the word, times 2^-24. f64: the upper 53 bits of the pair, times 2^-53. f16 and bf16: the f32
/// number rounded to nearest even, so 1 can occur.
///
/// ```
/// use isoshard::rng::{Generator, uniform};
/// let mut u = [0.0f32; 1000];
/// uniform(Generator::new(7).next_draw(), 0, &mut u);
/// assert!(u.iter().all(|u| (0.0..1.0).contains(u)));
/// assert!((u.iter().sum::<f32>() / 1000.0 - 0.5).abs() < 0.05);
/// ```
pub fn uniform<T: RandomFloat>(draw: Draw, at: impl Indices, out: &mut [T]) {
    T::sample(draw, 0, at.ranges(), out, Uniform(Unchanged));
}

/// Writes standard normal numbers, by the method of Box and Muller (Ann. Math. Stat. 29, 1958).
///
/// Elements 2j and 2j + 1 share two words (f64: two pairs) a and b. They are r cos 2πv and r sin 2πv with
/// r = sqrt(-2 ln u), v the uniform number of b, and u = (a + 1/2) / 2^32 rounded (f64: (a's upper 53 bits + 1/2) / 2^53
/// rounded). So |x| is at most 6.77 in f32 and 8.66 in f64. f16 and bf16: the f32 number rounded.
///
/// ```
/// use isoshard::rng::{Generator, normal};
/// let mut x = [0.0f64; 1000];
/// normal(Generator::new(7).next_draw(), 0, &mut x);
/// assert!((x.iter().map(|x| x * x).sum::<f64>() / 1000.0 - 1.0).abs() < 0.2);
/// ```
pub fn normal<T: RandomFloat>(draw: Draw, at: impl Indices, out: &mut [T]) {
    T::sample(draw, 0, at.ranges(), out, Normal(Affine::SAME));
}

struct WordSink<'a>(&'a mut [u32]);

impl PhiloxSink for WordSink<'_> {
    const PER_BLOCK: usize = 4;
    #[inline(always)]
    fn take<const N: usize>(&mut self, mut blocks: PhiloxBlocks<N>, skip: usize, at: usize, len: usize) {
        self.0[at..at + len].copy_from_slice(&blocks.words()[skip..skip + len]);
    }
}

struct PairSink<'a>(&'a mut [u64]);

impl PhiloxSink for PairSink<'_> {
    const WIDEST: Isa = Isa::Avx2;
    const PER_BLOCK: usize = 2;
    #[inline(always)]
    fn take<const N: usize>(&mut self, blocks: PhiloxBlocks<N>, skip: usize, at: usize, len: usize) {
        self.0[at..at + len].copy_from_slice(&blocks.0.as_flattened()[skip..skip + len]);
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::rng::distributions::continuous::{exponential, exponential_each, log_normal, uniform_between};
    use crate::rng::distributions::gamma::gamma_each;
    use crate::rng::distributions::integers::uniform_int;
    use crate::rng::distributions::keep::bernoulli_each;
    use crate::rng::distributions::poisson::{Count, poisson_each};
    use crate::rng::{Init, Permutation};
    use crate::rng::{gamma, poisson};
    use crate::tensor::cpu::{Isa, with_isa};

    const DRAW: Draw = Draw { seed: 21, number: 22 };

    fn fills<T: RandomFloat + Count>() -> Vec<u64> {
        let mut out = vec![T::default(); 1003];
        let mut bits = Vec::new();
        for start in [1, (1 << 32) - 5] {
            let mut collect = |out: &[T]| bits.extend(out.iter().map(|x| x.to_f64().to_bits()));
            uniform(DRAW, start, &mut out);
            collect(&out);
            normal(DRAW, start, &mut out);
            collect(&out);
            exponential(DRAW, start, 1.5, &mut out).unwrap();
            collect(&out);
            log_normal(DRAW, start, 0.1, 0.7, &mut out).unwrap();
            collect(&out);
            uniform_between(DRAW, start, -0.1, 0.7, &mut out).unwrap();
            collect(&out);
            for shape in [0.3, 1.0, 20.0] {
                gamma(DRAW, start, shape, 0.7, &mut out).unwrap();
                collect(&out);
            }
            for rate in [0.1, 8.0, 10.0, 1e5] {
                poisson(DRAW, start, rate, &mut out).unwrap();
                collect(&out);
            }
            let params: Vec<T> = (0..1003).map(|i| T::from_f64(f64::from(i % 8) / 8.0 + 0.125)).collect();
            exponential_each(DRAW, start, &params, &mut out).unwrap();
            collect(&out);
            gamma_each(DRAW, start, &params, &mut out).unwrap();
            collect(&out);
            let mut chosen = vec![false; 1003];
            bernoulli_each(DRAW, start, &params, &mut chosen).unwrap();
            bits.extend(chosen.iter().map(|&b| u64::from(b)));
            let mut collect = |out: &[T]| bits.extend(out.iter().map(|x| x.to_f64().to_bits()));
            let rates: Vec<T> = params.iter().map(|p| T::from_f64(p.to_f64() * 16.0)).collect();
            poisson_each(DRAW, start, &rates, &mut out).unwrap();
            collect(&out);
            for init in [
                Init::Uniform { low: -0.1, high: 0.3 },
                Init::Normal { mean: 0.1, std: 0.3 },
                Init::TruncatedNormal { mean: 0.1, std: 0.3, low: 0.0, high: 0.5 },
            ] {
                init.fill(DRAW, &[1 << 40], start, &mut out).unwrap();
                collect(&out);
            }
        }
        bits
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let all = || {
            let mut words = vec![0; 1003];
            bits32(DRAW, 2, &mut words);
            let (mut narrow, mut wide) = (vec![0i32; 1003], vec![0i64; 1003]);
            uniform_int(DRAW, 5, -3, (1 << 30) + 1, &mut narrow).unwrap();
            uniform_int(DRAW, 5, -3, 3 << 61, &mut wide).unwrap();
            let mut order = vec![0; 101];
            Permutation::new(DRAW, 1009).fill(3, &mut order).unwrap();
            (words, order, narrow, wide, [fills::<f32>(), fills::<f64>(), fills::<f16>(), fills::<bf16>()])
        };
        let want = with_isa(Isa::Baseline, all);
        for &isa in Isa::available() {
            assert!(with_isa(isa, all) == want, "{isa:?}");
        }
    }
}
