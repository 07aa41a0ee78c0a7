//! Masks and dropout. The decision is made on the element's 32-bit word, so every element type has the same mask.

use super::Draw;
use super::continuous::{expect_all, expect_len};
use super::fill::Real;
use super::philox::Blocks;
use super::sample::{PIECE, Sink, drive, in_wide};
use super::stretches::{Indices, Stretches};
use crate::error::{Error, Result};
use crate::tensor::Element;

/// The word from which on an element is kept: `p` times 2^32, to the nearest and at most 2^32 - 1.
///
/// At `p` = 1 nothing is kept, whatever the word.
///
/// # Errors
/// Refuses a `p` outside [0, 1].
pub fn keep_threshold(verb: &str, p: f64) -> Result<u32> {
    if (0.0..=1.0).contains(&p) {
        return Ok((p * 4_294_967_296.0).round() as u32);
    }
    Err(Error::invalid(verb, "a probability lies in [0, 1]", format!("p = {p}"), ""))
}

/// The mask of [`dropout`]: false with probability `p` (to 2^-32), which it drops, and true for what it keeps.
///
/// # Errors
/// Refuses a `p` outside [0, 1].
pub fn keep(draw: Draw, at: impl Indices, p: f64, out: &mut [bool]) -> Result<()> {
    let threshold = keep_threshold("keep", p)?;
    mask(draw, at.stretches(), p, threshold, true, out);
    Ok(())
}

/// True with probability `p` (to 2^-32): where [`keep`] is false.
///
/// # Errors
/// Refuses a `p` outside [0, 1].
pub fn bernoulli(draw: Draw, at: impl Indices, p: f64, out: &mut [bool]) -> Result<()> {
    let threshold = keep_threshold("bernoulli", p)?;
    mask(draw, at.stretches(), p, threshold, false, out);
    Ok(())
}

/// [`bernoulli`] with a probability for each element: true where (word + 1/2) <= p 2^32 in f64, which is the same where
/// the probabilities are equal (and less than 1 - 2^-33, or 1).
///
/// # Errors
/// Refuses slices of different lengths, and a probability outside [0, 1].
pub fn bernoulli_each<T: Real>(draw: Draw, at: impl Indices, p: &[T], out: &mut [bool]) -> Result<()> {
    expect_len("bernoulli", p, out)?;
    let rule = "a probability lies in [0, 1]";
    expect_all("bernoulli", rule, at.stretches(), p, |p| (0.0..=1.0).contains(&p))?;
    let mut chances = [T::Wide::default(); PIECE];
    let (mut at, mut done) = (at.stretches(), 0);
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

/// Zeroes each element with probability `p` and multiplies the others by 1 / (1 - `p`).
///
/// A kept element is multiplied in f32 (f64 for f64), by the factor rounded to that type, then rounded; a dropped
/// one is +0, be it a NaN. `p` = 0 copies, `p` = 1 gives zeros. The same draw applied to a gradient is the
/// derivative.
///
/// # Errors
/// Refuses a `p` outside [0, 1], and slices of different lengths.
pub fn dropout<T: Real>(draw: Draw, at: impl Indices, p: f64, x: &[T], out: &mut [T]) -> Result<()> {
    if x.len() != out.len() {
        return Err(Error::invalid(
            "dropout",
            "input and output differ in length",
            format!("{} and {} elements", x.len(), out.len()),
            "",
        ));
    }
    let threshold = keep_threshold("dropout", p)?;
    if p == 0.0 {
        out.copy_from_slice(x);
    } else {
        scale_kept(draw, at.stretches(), p, threshold, Some(x), out);
    }
    Ok(())
}

/// [`dropout`] of `x` into itself.
///
/// # Errors
/// Refuses a `p` outside [0, 1].
pub fn dropout_in_place<T: Real>(draw: Draw, at: impl Indices, p: f64, x: &mut [T]) -> Result<()> {
    let threshold = keep_threshold("dropout", p)?;
    if p != 0.0 {
        scale_kept(draw, at.stretches(), p, threshold, None, x);
    }
    Ok(())
}

fn mask(draw: Draw, at: Stretches<'_>, p: f64, threshold: u32, kept: bool, out: &mut [bool]) {
    if p == 1.0 {
        out.fill(!kept);
    } else {
        drive(draw, 0, at, out.len(), Mask { threshold, kept, out });
    }
}

fn scale_kept<T: Real>(
    draw: Draw,
    at: Stretches<'_>,
    p: f64,
    threshold: u32,
    x: Option<&[T]>,
    out: &mut [T],
) {
    if p == 1.0 {
        return out.fill(T::default());
    }
    let scale = Element::from_f64(1.0 / (1.0 - p));
    let mut wide = [T::Wide::default(); PIECE];
    in_wide(at, out, x.is_none(), &mut |at, here, out| {
        let x = x.map(|x| T::load(&x[here], &mut wide));
        drive(draw, 0, at, out.len(), ScaleKept { threshold, scale, x, out });
    });
}

struct Mask<'a> {
    threshold: u32,
    kept: bool,
    out: &'a mut [bool],
}

impl Sink for Mask<'_> {
    const PER_BLOCK: usize = 4;
    #[inline(always)]
    fn take<const N: usize>(&mut self, mut blocks: Blocks<N>, skip: usize, at: usize, len: usize) {
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

impl<W: Element> Sink for Chances<'_, W> {
    const PER_BLOCK: usize = 4;
    #[inline(always)]
    fn take<const N: usize>(&mut self, mut blocks: Blocks<N>, skip: usize, at: usize, len: usize) {
        let words = &blocks.words()[skip..skip + len];
        for ((out, p), &word) in self.out[at..at + len].iter_mut().zip(&self.p[at..at + len]).zip(words) {
            *out = f64::from(word) + 0.5 <= p.to_f64() * 4_294_967_296.0;
        }
    }
}

/// In place where there is no `x`.
struct ScaleKept<'a, W> {
    threshold: u32,
    scale: W,
    x: Option<&'a [W]>,
    out: &'a mut [W],
}

impl<W: Element + std::ops::Mul<Output = W>> Sink for ScaleKept<'_, W> {
    const PER_BLOCK: usize = 4;
    #[inline(always)]
    fn take<const N: usize>(&mut self, mut blocks: Blocks<N>, skip: usize, at: usize, len: usize) {
        let mut values = [[W::default(); 4]; N];
        let values = &mut values.as_flattened_mut()[..len];
        let out = &mut self.out[at..at + len];
        values.copy_from_slice(match self.x {
            Some(x) => &x[at..at + len],
            None => out,
        });
        for (value, &word) in values.iter_mut().zip(&blocks.words()[skip..skip + len]) {
            *value = if word >= self.threshold { *value * self.scale } else { W::default() };
        }
        out.copy_from_slice(values);
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::rng::bits32;

    const DRAW: Draw = Draw { seed: 9, number: 4 };

    fn dropped<T: Real>(p: f64, start: u64, x: &[T]) -> Vec<T> {
        let mut out = vec![T::from_f64(7.0); x.len()];
        dropout(DRAW, start, p, x, &mut out).unwrap();
        let mut same = x.to_vec();
        dropout_in_place(DRAW, start, p, &mut same).unwrap();
        assert_eq!(same, out);
        out
    }

    #[test]
    fn the_definition_in_every_type() {
        for (p, len) in [(0.1, 0), (0.1, 1), (0.25, 127), (0.5, 128), (0.9, 1001)] {
            let mut words = vec![0; len];
            bits32(DRAW, 3, &mut words);
            let kept: Vec<bool> = words.iter().map(|&w| w >= keep_threshold("", p).unwrap()).collect();
            let mut mask = vec![false; len];
            keep(DRAW, 3, p, &mut mask).unwrap();
            assert_eq!(mask, kept);
            bernoulli(DRAW, 3, p, &mut mask).unwrap();
            assert!(mask.iter().zip(&kept).all(|(a, b)| a != b));
            let x: Vec<f64> = (0..len).map(|i| (i as f64 - 40.5) / 8.0).collect();
            let scale = 1.0 / (1.0 - p);
            macro_rules! check {
                ($t:ty, $acc:ty) => {{
                    let x: Vec<$t> = x.iter().map(|&x| <$t as crate::tensor::Element>::from_f64(x)).collect();
                    let want: Vec<$t> = x
                        .iter()
                        .zip(&kept)
                        .map(|(&x, &k)| {
                            let y = crate::tensor::Float::widen(x) * scale as $acc;
                            if k { crate::tensor::Float::narrow(y) } else { <$t>::default() }
                        })
                        .collect();
                    assert_eq!(dropped(p, 3, &x), want);
                }};
            }
            check!(f32, f32);
            check!(f64, f64);
            check!(f16, f32);
            check!(bf16, f32);
        }
    }

    #[test]
    fn the_ends_of_p() {
        let x = [1.5f32, f32::NAN, -0.0, f32::INFINITY, 3.0];
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let mut out = [9.0f32; 5];
        dropout(DRAW, 0, 0.0, &x, &mut out).unwrap();
        assert_eq!(bits(&out), bits(&x));
        dropout(DRAW, 0, 1.0, &x, &mut out).unwrap();
        assert_eq!(bits(&out), [0; 5]);
        dropout(DRAW, 0, 1.0 - 1e-15, &x, &mut out).unwrap();
        assert_eq!(bits(&out), [0; 5]);
        let mut mask = [false; 300];
        keep(DRAW, 0, 0.0, &mut mask).unwrap();
        assert!(mask.iter().all(|&m| m));
        keep(DRAW, 0, 1.0, &mut mask).unwrap();
        assert!(mask.iter().all(|&m| !m));
    }

    #[test]
    fn refusals() {
        let mut out = [0.0f32; 2];
        let text = dropout(DRAW, 0, 1.5, &[0.0; 2], &mut out).unwrap_err().to_string();
        assert_eq!(text, "dropout: a probability lies in [0, 1]; got p = 1.5");
        let text = dropout(DRAW, 0, 0.5, &[0.0; 3], &mut out).unwrap_err().to_string();
        assert_eq!(text, "dropout: input and output differ in length; got 3 and 2 elements");
        assert!(keep(DRAW, 0, f64::NAN, &mut []).is_err());
        assert!(bernoulli(DRAW, 0, -0.1, &mut []).is_err());
    }
}
