//! Normal numbers conditioned on an interval that rejection of plain normals seldom meets: a tail, or a narrow interval.
//! C. P. Robert, *Simulation of truncated normal variables*, Statistics and Computing 5 (1995).
//!
//! Attempt `k` of element `e` reads block `e` of the draw's attempt `k`, so an element does not depend on its neighbours.
//! Everything is computed in f64.

use super::rejection::{ElementLanes, LANES, LaneSetups, RejectionMethod, SharedSetup, run};
use super::sample::{PIECE, Sampled, unit_f64};
use crate::error::{Error, Result};
use crate::rng::Draw;
use crate::rng::counter::index_ranges::IndexRanges;
use crate::tensor::Element;
use crate::tensor::cpu::Real;

/// A normal distribution on [`low`, `high`], with the interval [`from`, `to`] of standard numbers, mirrored if most of it
/// is negative, and the proposal.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::rng) struct TruncatedTail {
    pub mean: f64,
    /// The standard deviation, negative if standard numbers are mirrored.
    pub std: f64,
    pub low: f64,
    pub high: f64,
    pub from: f64,
    pub to: f64,
    /// The rate of the exponential proposal, or 0 for the uniform one.
    pub rate: f64,
    /// The number of the interval with the largest density: the nearest to 0.
    pub peak: f64,
}

impl TruncatedTail {
    /// Refuses intervals without numbers, and those so far from the mean that f64 has no squares there.
    pub(in crate::rng) fn new(mean: f64, std: f64, low: f64, high: f64) -> Result<TruncatedTail> {
        let refuse = |rule: &str| {
            let given = format!("mean {mean}, std {std}, interval [{low}, {high}]");
            Err(Error::invalid("init", rule, given, "draw from another distribution"))
        };
        if !(mean.is_finite() && std.is_finite() && std > 0.0 && low < high) {
            return refuse("a truncated normal has finite parameters, a std above 0, and low < high");
        }
        let (a, b) = ((low - mean) / std, (high - mean) / std);
        // The side with the larger part is positive.
        let (from, to, std) = if a + b < 0.0 { (-b, -a, -std) } else { (a, b, std) };
        let peak = from.max(0.0);
        if peak > 1e150 || from == to || from.is_nan() || to.is_nan() {
            return refuse("the interval is too far from the mean, in units of the std");
        }
        let root = (from * from + 4.0).sqrt();
        // Robert's bound: beyond it the exponential proposal accepts more often than the uniform one.
        let wide = from >= 0.0 && {
            let bound = 2.0 * (0.5 + (from * from - from * root) * 0.25).exp() / (from + root);
            to - from > bound
        };
        let rate = if wide { (from + root) * 0.5 } else { 0.0 };
        if !wide && !(to - from).is_finite() {
            return refuse("a truncation must leave a quarter of a std within two of the mean");
        }
        Ok(TruncatedTail { mean, std, low, high, from, to, rate, peak })
    }

    pub(in crate::rng) fn fill<T: Sampled>(&self, draw: Draw, mut at: IndexRanges<'_>, out: &mut [T]) {
        let (mut numbers, mut wide) = ([0.0; PIECE], [T::Wide::default(); PIECE]);
        for out in out.chunks_mut(PIECE) {
            let numbers = &mut numbers[..out.len()];
            run(*self, SharedSetup(()), draw, at, numbers);
            let wide = &mut wide[..out.len()];
            wide.iter_mut().zip(numbers).for_each(|(wide, &mut x)| *wide = Element::from_f64(x));
            T::narrow_into(wide, out);
            at.advance(out.len());
        }
    }
}

impl RejectionMethod for TruncatedTail {
    type Wide = f64;
    type Setup = ();
    /// An attempt succeeds with probability 0.4 or more.
    const ATTEMPTS: u16 = u16::MAX;

    #[inline(always)]
    fn setup(self, _: f64) {}

    #[inline(always)]
    fn attempt(
        self,
        k: u16,
        _: &impl LaneSetups<()>,
        lanes: &ElementLanes,
        out: &mut [f64; LANES],
        accepted: &mut [bool; LANES],
    ) {
        let blocks = lanes.blocks(k);
        for ((out, accepted), &[a, b]) in out.iter_mut().zip(accepted).zip(&blocks.0) {
            let half_step = 0.5 / 9_007_199_254_740_992.0;
            let u = unit_f64(a) + half_step;
            let exponential = self.rate > 0.0;
            let step = if exponential { -Real::ln(u) / self.rate } else { u * (self.to - self.from) };
            let z = self.from + step;
            // The density of z over the proposal's, at most 1.
            let power = if exponential { z - self.rate } else { z };
            let peak = if exponential { 0.0 } else { self.peak };
            let density = Real::exp((peak * peak - power * power) * 0.5);
            let x = z * self.std + self.mean;
            *accepted = unit_f64(b) < density && z <= self.to;
            let x = if x < self.low { self.low } else { x };
            *out = if x > self.high { self.high } else { x };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::counter::index_ranges::IndexSource;

    const DRAW: Draw = Draw { seed: 5, number: 2 };

    fn fill(mean: f64, std: f64, low: f64, high: f64, n: usize) -> Vec<f64> {
        let mut out = vec![0.0; n];
        TruncatedTail::new(mean, std, low, high).unwrap().fill(DRAW, 0u64.ranges(), &mut out);
        out
    }

    /// The means and variances of intervals of a unit normal, by mpmath's quadrature.
    #[test]
    fn moments_of_intervals() {
        for (low, high, mean, variance) in MOMENTS {
            for (sign, low, high) in [(1.0, low, high), (-1.0, -high, -low)] {
                let n = 100_000;
                let x = fill(3.0, 2.0, 3.0 + 2.0 * low, 3.0 + 2.0 * high, n);
                assert!(x.iter().all(|x| (3.0 + 2.0 * low..=3.0 + 2.0 * high).contains(x)));
                let z = x.iter().map(|x| (x - 3.0) / 2.0 * sign);
                let got = z.clone().sum::<f64>() / n as f64;
                let spread = z.map(|z| (z - got) * (z - got)).sum::<f64>() / n as f64;
                // Five standard errors; the fourth central moment is at most nine squared variances (exponential).
                assert!((got - mean).abs() < 5.0 * (variance / n as f64).sqrt(), "[{low}, {high}] {got}");
                assert!(
                    (spread / variance - 1.0).abs() < 5.0 * (8.0 / n as f64).sqrt(),
                    "[{low}, {high}] {spread}"
                );
            }
        }
    }

    #[test]
    fn parts_are_the_whole_and_far_intervals_end() {
        let whole = fill(0.0, 1.0, 2.0, 4.0, 700);
        let mut part = vec![0.0; 90];
        TruncatedTail::new(0.0, 1.0, 2.0, 4.0).unwrap().fill(DRAW, 333u64.ranges(), &mut part);
        assert_eq!(part, whole[333..423]);
        for (low, high) in [(1e8, f64::INFINITY), (40.0, 41.0), (0.5, 0.5 + 1e-9), (-1e-3, 1e-3)] {
            assert!(fill(0.0, 1.0, low, high, 100).iter().all(|x| (low..=high).contains(x)));
        }
        for (low, high) in [(4.0, 2.0), (1e200, 2e200), (f64::NAN, 1.0)] {
            assert!(TruncatedTail::new(0.0, 1.0, low, high).is_err());
        }
    }

    const MOMENTS: [(f64, f64, f64, f64); 7] = [
        (2.0, 4.0, 2.37063315968, 0.109583113632),
        (3.0, f64::INFINITY, 3.28309865493, 0.0705591867853),
        (8.0, 9.0, 8.12118899298, 0.0141485427827),
        (0.5, 0.6, 0.54954184251, 0.000832929682064),
        (-0.05, 0.1, 0.0249531601578, 0.00187359281128),
        (2.5, 2.6, 2.54787800547, 0.000830355757849),
        (-9.0, -2.5, -2.82274479766, 0.0889738014211),
    ];
}
