//! The fill for each pair of [`Distribution`] and element type.

use half::{bf16, f16};

use super::continuous::{exponential, log_normal};
use super::distribution::Distribution;
use super::fill::{RandomFloat, bits32, bits64};
use super::gamma::gamma;
use super::integers::{Integer, uniform_int};
use super::keep::bernoulli;
use super::poisson::{Count, poisson};
use super::sample::{Affine, Normal, Uniform};
use super::truncated::Truncated;
use crate::rng::Draw;
use crate::rng::counter::index_ranges::IndexRanges;
use crate::tensor::Element;

/// An element type that a [`Distribution`] can fill: every element type. Sealed.
#[expect(private_bounds, reason = "sealed")]
pub trait RandomElement: Element + FillFrom {}

impl<T: FillFrom> RandomElement for T {}

/// Fills from a distribution that was checked for this type.
pub(in crate::rng) trait FillFrom: Element {
    /// Fills as [`Distribution::fill`] does, without its checks.
    fn fill(from: Distribution, draw: Draw, at: IndexRanges<'_>, out: &mut [Self]);
}

macro_rules! fill {
    ($($t:ty => $with:expr;)*) => {$(
        impl FillFrom for $t {
            fn fill(from: Distribution, draw: Draw, at: IndexRanges<'_>, out: &mut [Self]) {
                let with: fn(Distribution, Draw, IndexRanges<'_>, &mut [Self]) = $with;
                with(from, draw, at, out)
            }
        }
    )*};
}

fill! {
    f32 => floats;
    f64 => floats;
    f16 => floats;
    bf16 => floats;
    i64 => |from, draw, at, out| match from {
        Distribution::Bits => bits64(draw, at, bytemuck::cast_slice_mut(out)),
        Distribution::Poisson { .. } => counts(from, draw, at, out),
        _ => whole(from, draw, at, out),
    };
    i32 => |from, draw, at, out| match from {
        Distribution::Bits => bits32(draw, at, bytemuck::cast_slice_mut(out)),
        Distribution::Poisson { .. } => counts(from, draw, at, out),
        _ => whole(from, draw, at, out),
    };
    u8 => |from, draw, at, out| match from {
        Distribution::Bits => {
            by_chunks(at, out, |at, words: &mut [u32]| bits32(draw, at, words), |w| (w >> 24) as u8)
        }
        _ => whole(from, draw, at, out),
    };
    bool => |from, draw, at, out| match from {
        Distribution::Bernoulli { p } => bernoulli(draw, at, p, out).expect(CHECKED),
        _ => any(from, draw, at, out),
    };
}

/// Fills floating elements; `from` was checked.
pub(in crate::rng) fn floats<T: RandomFloat>(
    from: Distribution,
    draw: Draw,
    at: IndexRanges<'_>,
    out: &mut [T],
) {
    match from {
        Distribution::Uniform { low, high } => {
            T::sample(draw, 0, at, out, Uniform(Affine { scale: high - low, shift: low }));
        }
        Distribution::Normal { mean, std } => {
            T::sample(draw, 0, at, out, Normal(Affine { scale: std, shift: mean }));
        }
        Distribution::TruncatedNormal { mean, std, low, high } => {
            Truncated { mean, std, low, high }.fill(draw, at, out);
        }
        Distribution::LogNormal { mean, std } => log_normal(draw, at, mean, std, out).expect(CHECKED),
        Distribution::Exponential { rate } => exponential(draw, at, rate, out).expect(CHECKED),
        Distribution::Gamma { shape, scale } => gamma(draw, at, shape, scale, out).expect(CHECKED),
        Distribution::Poisson { .. } => counts(from, draw, at, out),
        _ => any(from, draw, at, out),
    }
}

const CHECKED: &str = "its parameters were checked";

/// Fills counts.
fn counts<T: Count>(from: Distribution, draw: Draw, at: IndexRanges<'_>, out: &mut [T]) {
    let Distribution::Poisson { rate } = from else { unreachable!("{from:?} is no count") };
    poisson(draw, at, rate, out).expect(CHECKED);
}

/// Fills integers.
fn whole<T: Integer>(from: Distribution, draw: Draw, at: IndexRanges<'_>, out: &mut [T]) {
    match from {
        Distribution::UniformInt { low, high } => uniform_int(draw, at, low, high, out).expect(CHECKED),
        _ => any(from, draw, at, out),
    }
}

/// Fills any type with Bernoulli zeros and ones.
fn any<T: Element>(from: Distribution, draw: Draw, at: IndexRanges<'_>, out: &mut [T]) {
    let Distribution::Bernoulli { p } = from else { unreachable!("{from:?} was checked for {}", T::DTYPE) };
    let [no, yes] = [0.0, 1.0].map(T::from_f64);
    let mask = |at: IndexRanges<'_>, mask: &mut [bool]| bernoulli(draw, at, p, mask).expect(CHECKED);
    by_chunks(at, out, mask, |bit| if bit { yes } else { no });
}

/// Fills from numbers of another type, in chunks.
fn by_chunks<A: Copy + Default, T>(
    mut at: IndexRanges<'_>,
    out: &mut [T],
    draw: impl Fn(IndexRanges<'_>, &mut [A]),
    to: impl Fn(A) -> T,
) {
    const CHUNK: usize = 512;
    let mut numbers = [A::default(); CHUNK];
    for out in out.chunks_mut(CHUNK) {
        let numbers = &mut numbers[..out.len()];
        draw(at, numbers);
        at.advance(out.len());
        out.iter_mut().zip(numbers).for_each(|(out, &mut number)| *out = to(number));
    }
}
