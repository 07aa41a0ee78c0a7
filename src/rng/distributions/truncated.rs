//! Normal numbers conditioned on an interval, by rejection. An element outside the interval uses its own number of the next
//! attempt, never its neighbours' words.

use super::sample::{Affine, Computed, Normal, Sampled};
use super::truncated_tail::TruncatedTail;
use crate::error::Result;
use crate::rng::Draw;
use crate::rng::counter::index_ranges::{IndexRanges, IndexSource};
use crate::tensor::Element;

const CHUNK: usize = 512;

/// Normal numbers of this mean and standard deviation, conditioned on [`low`, `high`].
///
/// Serves intervals into which plain normals often fall; [`TruncatedTail`] serves the others. The number is
/// `z std + mean` for the standard number z (f32, or f64 for f64) of the first attempt with `low <= z std + mean <= high`,
/// all computed in f64. The sum is rounded to z's type, then to the element's.
pub(in crate::rng) struct Truncated {
    pub mean: f64,
    pub std: f64,
    pub low: f64,
    pub high: f64,
}

impl Truncated {
    /// Refuses unsound parameters.
    pub(in crate::rng) fn check(&self) -> Result<()> {
        if self.is_frequent() { Ok(()) } else { self.tail().map(|_| ()) }
    }

    /// Returns true if plain normals often fall into the interval: at least a quarter of a standard deviation of it is within
    /// two of the mean. Then an attempt succeeds with probability 0.013 or more, and 65536 attempts suffice.
    pub(in crate::rng) fn is_frequent(&self) -> bool {
        let reach = 2.0 * self.std;
        let width = self.high.min(self.mean + reach) - self.low.max(self.mean - reach);
        let ordered = self.mean.is_finite() && self.std.is_finite() && self.low < self.high;
        ordered && self.std > 0.0 && width >= 0.25 * self.std
    }

    /// Returns the distribution for all other intervals, by another method.
    pub(in crate::rng) fn tail(&self) -> Result<TruncatedTail> {
        TruncatedTail::new(self.mean, self.std, self.low, self.high)
    }

    pub(in crate::rng) fn fill<T: Sampled>(&self, draw: Draw, mut at: IndexRanges<'_>, out: &mut [T]) {
        if !self.is_frequent() {
            return self.tail().expect("its parameters were checked").fill(draw, at, out);
        }
        let (mut values, mut index) = ([T::Wide::default(); CHUNK], [0; CHUNK]);
        for out in out.chunks_mut(CHUNK) {
            let values = &mut values[..out.len()];
            at.write(&mut index[..out.len()]);
            T::Wide::numbers(draw, 0, at, values, Normal(Affine::SAME));
            for (value, &index) in values.iter_mut().zip(&index) {
                *value = self.first_inside(draw, index, *value);
            }
            T::narrow_into(values, out);
            at.advance(out.len());
        }
    }

    #[inline]
    fn first_inside<A: Computed>(&self, draw: Draw, index: u64, first: A) -> A {
        let place = |z: A| z.to_f64() * self.std + self.mean;
        let mut x = place(first);
        let mut attempt = 0;
        while !(self.low <= x && x <= self.high) && attempt < u16::MAX {
            attempt += 1;
            let mut z = [A::default()];
            A::numbers(draw, attempt, index.ranges(), &mut z, Normal(Affine::SAME));
            x = place(z[0]);
        }
        Element::from_f64(x)
    }
}
