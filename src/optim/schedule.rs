//! Learning-rate schedules.

/// Linear warm-up, then a cosine down to a floor (Loshchilov & Hutter 2017).
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
        self.floor + (self.peak - self.floor) * 0.5 * (1.0 + (std::f64::consts::PI * done).cos())
    }
}
