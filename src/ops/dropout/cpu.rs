//! The CPU kernel of dropout. An element's 32-bit random word decides, so the mask is the same for every dtype.

use crate::error::{Error, Result};
use crate::rng::philox::PhiloxBlocks;
use crate::rng::{
    Draw, IndexRanges, Indices, PIECE, PhiloxSink, RandomFloat, drive, in_compute_type, keep_threshold,
};
use crate::tensor::Element;
use crate::tensor::cpu::{Isa, for_each_part, widest_of};

/// Zeroes each element with probability `p` and multiplies the others by 1 / (1 - `p`).
///
/// A kept element is multiplied in f32 (f64 for f64) by the factor rounded to that type, and the product is rounded. A
/// dropped element is +0, even if it was NaN. `p` = 0 copies, and `p` = 1 gives zeros. The derivative is the same call
/// on the gradient.
///
/// ```
/// use isoshard::{ops::cpu::dropout, rng::Generator};
/// let (draw, mut y) = (Generator::new(1).next_draw(), [0.0f32; 3]);
/// dropout(draw, 0, 0.0, &[1.0, 2.0, 3.0], &mut y)?; // element 0 of the draw onwards, p = 0
/// assert_eq!(y, [1.0, 2.0, 3.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Refuses a `p` outside [0, 1], and slices of different lengths.
pub fn dropout<T: RandomFloat>(draw: Draw, at: impl Indices, p: f64, x: &[T], out: &mut [T]) -> Result<()> {
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
        scale_kept(draw, at.ranges(), p, threshold, Some(x), out);
    }
    Ok(())
}

/// Applies [`dropout`] to `x` in place.
///
/// ```
/// use isoshard::{ops::cpu::dropout_in_place, rng::Generator};
/// let mut x = [1.0f32, 2.0];
/// dropout_in_place(Generator::new(1).next_draw(), 0, 1.0, &mut x)?;
/// assert_eq!(x, [0.0, 0.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Refuses a `p` outside [0, 1].
pub fn dropout_in_place<T: RandomFloat>(draw: Draw, at: impl Indices, p: f64, x: &mut [T]) -> Result<()> {
    let threshold = keep_threshold("dropout", p)?;
    if p != 0.0 {
        scale_kept(draw, at.ranges(), p, threshold, None, x);
    }
    Ok(())
}

fn scale_kept<T: RandomFloat>(
    draw: Draw,
    at: IndexRanges<'_>,
    p: f64,
    threshold: u32,
    x: Option<&[T]>,
    out: &mut [T],
) {
    if p == 1.0 {
        return out.fill(T::default());
    }
    let scale = Element::from_f64(1.0 / (1.0 - p));
    for_each_part(out.len(), out.len(), out, |part, out| {
        let (x, mut wide) = (x.map(|x| &x[part.clone()]), [T::Wide::default(); PIECE]);
        in_compute_type(at.after(part.start), out, x.is_none(), &mut |at, here, out| {
            let x = x.map(|x| T::load(&x[here], &mut wide));
            drive(draw, 0, at, out.len(), ScaleKept { threshold, scale, x, out });
        });
    });
}

/// The kernel. It works in place if `x` is `None`.
struct ScaleKept<'a, W> {
    threshold: u32,
    scale: W,
    x: Option<&'a [W]>,
    out: &'a mut [W],
}

impl<W: Element + std::ops::Mul<Output = W>> PhiloxSink for ScaleKept<'_, W> {
    const WIDEST: Isa = widest_of::<W>();
    const PER_BLOCK: usize = 4;
    #[inline(always)]
    fn take<const N: usize>(&mut self, mut blocks: PhiloxBlocks<N>, skip: usize, at: usize, len: usize) {
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
    use crate::rng::{bits32, keep};
    use crate::tensor::cpu::{Isa, with_isa};

    const DRAW: Draw = Draw { seed: 9, number: 4 };

    fn dropped<T: RandomFloat>(p: f64, start: u64, x: &[T]) -> Vec<T> {
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
    }

    #[test]
    fn refusals() {
        let mut out = [0.0f32; 2];
        let text = dropout(DRAW, 0, 1.5, &[0.0; 2], &mut out).unwrap_err().to_string();
        assert_eq!(text, "dropout: a probability lies in [0, 1]; got p = 1.5");
        let text = dropout(DRAW, 0, 0.5, &[0.0; 3], &mut out).unwrap_err().to_string();
        assert_eq!(text, "dropout: input and output differ in length; got 3 and 2 elements");
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        fn bits<T: RandomFloat>() -> Vec<u64> {
            let x: Vec<T> = (0..1003).map(|i| T::from_f64(f64::from(i) / 7.0 - 70.0)).collect();
            let of = |start| dropped(0.2, start, &x).into_iter().map(|x| x.to_f64().to_bits());
            [1, (1 << 32) - 5].into_iter().flat_map(of).collect()
        }
        let all = || [bits::<f32>(), bits::<f64>(), bits::<f16>(), bits::<bf16>()];
        let want = with_isa(Isa::Baseline, all);
        for &isa in Isa::available() {
            assert!(with_isa(isa, all) == want, "{isa:?}");
        }
    }
}
