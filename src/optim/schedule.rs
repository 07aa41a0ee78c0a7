//! Learning-rate schedules.

use crate::tensor::math::trig::sin_cos_2pi_f64;

/// A learning rate as a function of the step, counted from 0.
///
/// A number is a constant rate, and a closure is a schedule of its own:
///
/// ```
/// use isoshard::optim::Schedule;
/// let halving = |step: usize| 0.1 / (1 << (step / 10)) as f64;
/// assert_eq!([0, 9, 10].map(|step| Schedule::at(&halving, step)), [0.1, 0.1, 0.05]);
/// assert_eq!(Schedule::at(&3e-4, 7), 3e-4);
/// ```
pub trait Schedule {
    /// Returns the rate of a step, counted from 0.
    ///
    /// ```
    /// use isoshard::optim::{Schedule, WarmupCosine};
    /// let schedule = WarmupCosine { peak: 1.0, floor: 0.0, warmup: 4, steps: 12 };
    /// assert_eq!([0, 3, 8].map(|step| Schedule::at(&schedule, step)), [0.25, 1.0, 0.5]);
    /// ```
    fn at(&self, step: usize) -> f64;
}

impl Schedule for f64 {
    fn at(&self, _: usize) -> f64 {
        *self
    }
}

impl<F: Fn(usize) -> f64> Schedule for F {
    fn at(&self, step: usize) -> f64 {
        self(step)
    }
}

/// A linear warm-up followed by a cosine decay (Loshchilov & Hutter 2017), with the same bits on every machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WarmupCosine {
    /// The rate at the end of the warm-up.
    pub peak: f64,
    /// The rate at the end of the decay, and after it.
    pub floor: f64,
    /// The number of warm-up steps: step `i` has the rate `(i + 1) / warmup · peak`.
    pub warmup: usize,
    /// The number of all steps, the warm-up's included.
    pub steps: usize,
}

impl WarmupCosine {
    /// Returns the rate of a step, counted from 0.
    ///
    /// ```
    /// use isoshard::optim::WarmupCosine;
    /// let schedule = WarmupCosine { peak: 1e-3, floor: 1e-4, warmup: 10, steps: 100 };
    /// assert_eq!([0, 9, 100].map(|step| schedule.at(step)), [1e-4, 1e-3, 1e-4]);
    /// assert!((schedule.at(55) - 5.5e-4).abs() < 1e-12); // half of the decay
    /// ```
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

impl Schedule for WarmupCosine {
    fn at(&self, step: usize) -> f64 {
        WarmupCosine::at(self, step)
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
        // The cosine of a quarter turn is exactly 0.
        assert_eq!((s.at(8), s.at(12), s.at(99)), (0.5625, 0.125, 0.125));
        let none = WarmupCosine { peak: 1.0, floor: 0.5, warmup: 0, steps: 0 };
        assert_eq!((none.at(0), none.at(1)), (1.0, 0.5));
    }
}
