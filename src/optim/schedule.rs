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
        let WarmupCosine { peak, floor, warmup, steps } = *self;
        warmed_up(step, warmup, peak, |after| cosine(after, steps.saturating_sub(warmup), peak, floor))
    }
}

/// A linear warm-up followed by a linear decay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WarmupLinear {
    /// The rate at the end of the warm-up.
    pub peak: f64,
    /// The rate at the end of the decay, and after it.
    pub floor: f64,
    /// The number of warm-up steps: step `i` has the rate `(i + 1) / warmup · peak`.
    pub warmup: usize,
    /// The number of all steps, the warm-up's included.
    pub steps: usize,
}

/// A linear warm-up, a constant rate, and a linear decay at the end (Hu et al., *MiniCPM*, 2024). The constant part can be made
/// longer while a run goes on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WarmupStableDecay {
    /// The rate between warm-up and decay.
    pub peak: f64,
    /// The rate at the end of the decay, and after it.
    pub floor: f64,
    /// The number of warm-up steps: step `i` has the rate `(i + 1) / warmup · peak`.
    pub warmup: usize,
    /// The number of steps of the decay.
    pub decay: usize,
    /// The number of all steps.
    pub steps: usize,
}

/// A linear warm-up, then cosine decays that begin anew at the peak, each `factor` times as long as the one before (SGDR,
/// Loshchilov & Hutter 2017), with the same bits on every machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WarmupRestarts {
    /// The rate at the end of the warm-up and at each restart.
    pub peak: f64,
    /// The rate that a decay goes to.
    pub floor: f64,
    /// The number of warm-up steps: step `i` has the rate `(i + 1) / warmup · peak`.
    pub warmup: usize,
    /// The number of steps of the first decay.
    pub first: usize,
    /// The length of a decay in lengths of the one before, 1 or more.
    pub factor: usize,
}

/// Returns the rate of a step of the warm-up, or what `later` returns for a step after it, counted from its end.
fn warmed_up(step: usize, warmup: usize, peak: f64, later: impl Fn(usize) -> f64) -> f64 {
    if step < warmup { peak * (step + 1) as f64 / warmup as f64 } else { later(step - warmup) }
}

/// Returns the rate of step `step` of a linear decay over `span` steps.
fn linear(step: usize, span: usize, peak: f64, floor: f64) -> f64 {
    floor + (peak - floor) * (1.0 - (step as f64 / span.max(1) as f64).min(1.0))
}

/// Returns the rate of step `step` of a cosine decay over `span` steps.
fn cosine(step: usize, span: usize, peak: f64, floor: f64) -> f64 {
    let (_, cos) = sin_cos_2pi_f64(0.5 * (step as f64 / span.max(1) as f64).min(1.0));
    floor + (peak - floor) * 0.5 * (1.0 + cos)
}

/// ```
/// use isoshard::optim::{Schedule, WarmupLinear};
/// let schedule = WarmupLinear { peak: 1.0, floor: 0.0, warmup: 2, steps: 6 };
/// assert_eq!([0, 1, 2, 4, 6, 9].map(|step| schedule.at(step)), [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]);
/// ```
impl Schedule for WarmupLinear {
    fn at(&self, step: usize) -> f64 {
        let WarmupLinear { peak, floor, warmup, steps } = *self;
        warmed_up(step, warmup, peak, |after| linear(after, steps.saturating_sub(warmup), peak, floor))
    }
}

/// ```
/// use isoshard::optim::{Schedule, WarmupStableDecay};
/// let schedule = WarmupStableDecay { peak: 1.0, floor: 0.0, warmup: 2, decay: 4, steps: 100 };
/// assert_eq!([0, 1, 50, 96, 98, 100].map(|step| schedule.at(step)), [0.5, 1.0, 1.0, 1.0, 0.5, 0.0]);
/// ```
impl Schedule for WarmupStableDecay {
    fn at(&self, step: usize) -> f64 {
        let WarmupStableDecay { peak, floor, warmup, decay, steps } = *self;
        let decayed = step.saturating_sub(steps.saturating_sub(decay));
        warmed_up(step, warmup, peak, |_| linear(decayed, decay, peak, floor))
    }
}

/// ```
/// use isoshard::optim::{Schedule, WarmupRestarts};
/// let schedule = WarmupRestarts { peak: 1.0, floor: 0.0, warmup: 2, first: 4, factor: 2 };
/// // Decays begin at steps 2, 6 and 14.
/// assert_eq!([0, 2, 4, 6, 10, 14].map(|step| schedule.at(step)), [0.5, 1.0, 0.5, 1.0, 0.5, 1.0]);
/// ```
impl Schedule for WarmupRestarts {
    fn at(&self, step: usize) -> f64 {
        let WarmupRestarts { peak, floor, warmup, first, factor } = *self;
        warmed_up(step, warmup, peak, |mut after| {
            let mut span = first.max(1);
            if factor <= 1 {
                return cosine(after % span, span, peak, floor);
            }
            while after >= span {
                (after, span) = (after - span, span.saturating_mul(factor));
            }
            cosine(after, span, peak, floor)
        })
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
