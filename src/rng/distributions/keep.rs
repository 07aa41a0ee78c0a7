//! Random masks. The decision depends on the element's 32-bit word, so every element type has the same mask.

use super::continuous::{expect_all, expect_len};
use super::fill::RandomFloat;
use super::sample::{PIECE, PhiloxSink, drive};
use crate::error::{Error, Result};
use crate::rng::Draw;
use crate::rng::counter::index_ranges::{IndexRanges, Indices};
use crate::rng::counter::philox::PhiloxBlocks;
use crate::tensor::Element;
use crate::tensor::cpu::{Isa, widest_of};

/// Returns the smallest word with which dropout keeps an element: `p` times 2^32, rounded, at most 2^32 - 1.
///
/// At `p` = 1 nothing is kept, whatever the word.
///
/// ```
/// use isoshard::rng::keep_threshold;
/// assert_eq!(keep_threshold("dropout", 0.25)?, 1 << 30);
/// assert!(keep_threshold("dropout", 1.5).is_err());
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Refuses a `p` outside [0, 1].
pub fn keep_threshold(verb: &str, p: f64) -> Result<u32> {
    if (0.0..=1.0).contains(&p) {
        return Ok((p * 4_294_967_296.0).round() as u32);
    }
    Err(Error::invalid(verb, "a probability lies in [0, 1]", format!("p = {p}"), ""))
}

/// Writes dropout's mask: false (dropped) with probability `p` (to 2^-32), true (kept) otherwise.
///
/// ```
/// use isoshard::rng::{Generator, bernoulli, keep};
/// let draw = Generator::new(7).next_draw();
/// let (mut kept, mut dropped) = ([false; 100], [false; 100]);
/// keep(draw, 0, 0.1, &mut kept)?;
/// bernoulli(draw, 0, 0.1, &mut dropped)?;
/// assert!(kept.iter().zip(&dropped).all(|(kept, dropped)| kept != dropped));
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Refuses a `p` outside [0, 1].
pub fn keep(draw: Draw, at: impl Indices, p: f64, out: &mut [bool]) -> Result<()> {
    let threshold = keep_threshold("keep", p)?;
    mask(draw, at.ranges(), p, threshold, true, out);
    Ok(())
}

/// Writes true with probability `p` (to 2^-32): the opposite of [`keep`].
///
/// ```
/// use isoshard::rng::{Generator, bernoulli};
/// let mut coins = [false; 1000];
/// bernoulli(Generator::new(7).next_draw(), 0, 0.25, &mut coins)?;
/// assert!((200..300).contains(&coins.iter().filter(|&&coin| coin).count()));
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Refuses a `p` outside [0, 1].
pub fn bernoulli(draw: Draw, at: impl Indices, p: f64, out: &mut [bool]) -> Result<()> {
    let threshold = keep_threshold("bernoulli", p)?;
    mask(draw, at.ranges(), p, threshold, false, out);
    Ok(())
}

/// Writes true with one probability per element: true if (word + 1/2) <= p 2^32 in f64. Equal probabilities (below 1 - 2^-33,
/// or 1) give the values of [`bernoulli`].
///
/// ```
/// use isoshard::rng::{Generator, bernoulli_each};
/// let mut coins = [false; 3];
/// bernoulli_each(Generator::new(7).next_draw(), 0, &[0.0f32, 1.0, 0.0], &mut coins)?;
/// assert_eq!(coins, [false, true, false]);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Refuses slices of different lengths, and a probability outside [0, 1].
pub fn bernoulli_each<T: RandomFloat>(draw: Draw, at: impl Indices, p: &[T], out: &mut [bool]) -> Result<()> {
    expect_len("bernoulli", p, out)?;
    let rule = "a probability lies in [0, 1]";
    expect_all("bernoulli", rule, at.ranges(), p, |p| (0.0..=1.0).contains(&p))?;
    let mut chances = [T::Wide::default(); PIECE];
    let (mut at, mut done) = (at.ranges(), 0);
    while done < p.len() {
        let len = if T::NATIVE { p.len() } else { PIECE.min(p.len() - done) };
        let here = done..done + len;
        let p = T::load(&p[here.clone()], &mut chances);
        drive(draw, 0, at, len, Chances { p, out: &mut out[here] });
        at.advance(len);
        done += len;
    }
    Ok(())
}

fn mask(draw: Draw, at: IndexRanges<'_>, p: f64, threshold: u32, kept: bool, out: &mut [bool]) {
    if p == 1.0 {
        out.fill(!kept);
    } else {
        drive(draw, 0, at, out.len(), KeepMask { threshold, kept, out });
    }
}

struct KeepMask<'a> {
    threshold: u32,
    kept: bool,
    out: &'a mut [bool],
}

impl PhiloxSink for KeepMask<'_> {
    const PER_BLOCK: usize = 4;
    #[inline(always)]
    fn take<const N: usize>(&mut self, mut blocks: PhiloxBlocks<N>, skip: usize, at: usize, len: usize) {
        let words = &blocks.words()[skip..skip + len];
        for (out, &word) in self.out[at..at + len].iter_mut().zip(words) {
            *out = (word >= self.threshold) == self.kept;
        }
    }
}

struct Chances<'a, T> {
    p: &'a [T],
    out: &'a mut [bool],
}

impl<W: Element> PhiloxSink for Chances<'_, W> {
    const WIDEST: Isa = widest_of::<W>();
    const PER_BLOCK: usize = 4;
    #[inline(always)]
    fn take<const N: usize>(&mut self, mut blocks: PhiloxBlocks<N>, skip: usize, at: usize, len: usize) {
        let words = &blocks.words()[skip..skip + len];
        for ((out, p), &word) in self.out[at..at + len].iter_mut().zip(&self.p[at..at + len]).zip(words) {
            *out = f64::from(word) + 0.5 <= p.to_f64() * 4_294_967_296.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::distributions::fill::bits32;

    const DRAW: Draw = Draw { seed: 9, number: 4 };

    #[test]
    fn the_definition() {
        for (p, len) in [(0.1, 0), (0.1, 1), (0.25, 127), (0.5, 128), (0.9, 1001)] {
            let mut words = vec![0; len];
            bits32(DRAW, 3, &mut words);
            let kept: Vec<bool> = words.iter().map(|&w| w >= keep_threshold("", p).unwrap()).collect();
            let mut mask = vec![false; len];
            keep(DRAW, 3, p, &mut mask).unwrap();
            assert_eq!(mask, kept);
            bernoulli(DRAW, 3, p, &mut mask).unwrap();
            assert!(mask.iter().zip(&kept).all(|(a, b)| a != b));
        }
    }

    #[test]
    fn the_ends_of_p() {
        let mut mask = [false; 300];
        keep(DRAW, 0, 0.0, &mut mask).unwrap();
        assert!(mask.iter().all(|&m| m));
        keep(DRAW, 0, 1.0, &mut mask).unwrap();
        assert!(mask.iter().all(|&m| !m));
    }

    #[test]
    fn refusals() {
        assert!(keep(DRAW, 0, f64::NAN, &mut []).is_err());
        assert!(bernoulli(DRAW, 0, -0.1, &mut []).is_err());
    }
}
