//! Learning-rate schedules.

use crate::tensor::math::trig::sin_cos_2pi_f64;

/// Linear warm-up, then a cosine down to a floor (Loshchilov & Hutter 2017). The same bits on every machine.
///
/// ```
/// let s = isoshard::optim::WarmupCosine { peak: 1e-3, floor: 1e-4, warmup: 10, steps: 100 };
/// assert_eq!(s.at(9), 1e-3);
/// assert!((s.at(99) - 1e-4).abs() < 1e-5);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WarmupCosine {
    /// The rate after the warm-up.
    pub peak: f64,
    /// The rate at the end.
    pub floor: f64,
    /// Steps of warm-up: step `i` takes `(i + 1) / warmup` of the peak.
    pub warmup: usize,
    /// Steps in all.
    pub steps: usize,
}

impl WarmupCosine {
    /// The rate of a step, counted from 0.
    pub fn at(&self, step: usize) -> f64 {
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / self.warmup as f64;
        }
        let span = self.steps.saturating_sub(self.warmup).max(1) as f64;
        let done = ((step - self.warmup) as f64 / span).min(1.0);
        let (_, cos) = sin_cos_2pi_f64(0.5 * done);
        self.floor + (self.peak - self.floor) * 0.5 * (1.0 + cos)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rises_and_falls_as_defined() {
        let s = WarmupCosine { peak: 1.0, floor: 0.125, warmup: 4, steps: 12 };
        assert_eq!([0, 1, 3, 4].map(|i| s.at(i)), [0.25, 0.5, 1.0, 1.0]);
        for i in 4..12 {
            let want = 0.125 + 0.875 * 0.5 * (1.0 + (std::f64::consts::PI * (i - 4) as f64 / 8.0).cos());
            assert!((s.at(i) - want).abs() < 1e-15, "{i}");
        }
        // A quarter turn is exact.
        assert_eq!((s.at(8), s.at(12), s.at(99)), (0.5625, 0.125, 0.125));
        let none = WarmupCosine { peak: 1.0, floor: 0.5, warmup: 0, steps: 0 };
        assert_eq!((none.at(0), none.at(1)), (1.0, 0.5));
    }
}
