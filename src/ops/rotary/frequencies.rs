//! The frequencies of rotary position embedding, and how they are scaled for longer contexts.

use crate::error::{Error, Result};
use crate::tensor::math::exp::exp_f64;
use crate::tensor::math::log::ln_f64;

/// The angle per position of each pair of elements, and a factor for cosines and sines.
///
/// [`DTensor::rotary_tables`](crate::dtensor::DTensor::rotary_tables) computes tables from it. All angles are computed
/// by fixed sequences of f64 operations, so they have the same bits on every machine.
///
/// ```
/// use isoshard::ops::RotaryFrequencies;
/// let frequencies = RotaryFrequencies::geometric(4, 1e4)?;
/// assert_eq!(format!("{:.3?}", frequencies.angles), "[1.000, 0.010]"); // 1e4^-0, 1e4^-1/2
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct RotaryFrequencies {
    /// Radians per position, one number per pair.
    pub angles: Vec<f64>,
    /// The factor by which cosines and sines are multiplied, 1 except for YaRN.
    pub scale: f64,
}

/// The scaling of Llama 3.1 (Grattafiori et al., *The Llama 3 Herd of Models*, 2024): low frequencies are divided by
/// `factor`, high ones stay, and those between are interpolated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Llama3Scaling {
    /// The divisor of low frequencies; 8 for Llama 3.1, 32 for Llama 3.2.
    pub factor: f64,
    /// Wavelengths above `original_context / low_frequency_factor` are low frequencies; 1 for Llama 3.1.
    pub low_frequency_factor: f64,
    /// Wavelengths below `original_context / high_frequency_factor` are high frequencies; 4 for Llama 3.1.
    pub high_frequency_factor: f64,
    /// The number of positions for which the model was trained first; 8192 for Llama 3.1.
    pub original_context: f64,
}

/// The scaling of YaRN (Peng et al., *YaRN: Efficient Context Window Extension of Large Language Models*, 2024): pairs
/// that turn rarely within the original context are interpolated, those that turn often stay, with a ramp between.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct YarnScaling {
    /// The factor by which the context is extended, at least 1.
    pub factor: f64,
    /// The number of turns within the original context above which a pair stays; 32 in the paper.
    pub fast_turns: f64,
    /// The number of turns within the original context below which a pair is interpolated; 1 in the paper.
    pub slow_turns: f64,
    /// The number of positions for which the model was trained first.
    pub original_context: f64,
    /// The factor of cosines and sines, or `None` for the paper's `0.1 ln(factor) + 1`.
    pub attention_factor: Option<f64>,
}

impl RotaryFrequencies {
    /// Returns the frequencies `base^(-2i/width)` of Su et al. (2021), those of
    /// [`DTensor::rotary`](crate::dtensor::DTensor::rotary).
    ///
    /// ```
    /// use isoshard::ops::RotaryFrequencies;
    /// assert_eq!(RotaryFrequencies::geometric(128, 5e5)?.angles.len(), 64);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an odd width, and a base that is not positive and finite.
    pub fn geometric(width: usize, base: f64) -> Result<RotaryFrequencies> {
        let refused = |rule: &str, given: String| Err(Error::invalid("rotary_frequencies", rule, given, ""));
        if !width.is_multiple_of(2) {
            return refused("pairs need an even width", width.to_string());
        }
        if !(base > 0.0 && base.is_finite()) {
            return refused("the base is not a positive number", base.to_string());
        }
        let (pairs, ln) = (width / 2, ln_f64(base));
        let angles = (0..pairs).map(|i| exp_f64(-(i as f64 / pairs as f64) * ln)).collect();
        Ok(RotaryFrequencies { angles, scale: 1.0 })
    }

    /// Returns the frequencies of Llama 3.1.
    ///
    /// ```
    /// use isoshard::ops::{Llama3Scaling, RotaryFrequencies};
    /// let scaling = Llama3Scaling {
    ///     factor: 8.0, low_frequency_factor: 1.0, high_frequency_factor: 4.0, original_context: 8192.0,
    /// };
    /// let plain = RotaryFrequencies::geometric(128, 5e5)?;
    /// let scaled = RotaryFrequencies::llama3(128, 5e5, scaling)?;
    /// assert_eq!(scaled.angles[0], plain.angles[0]); // a high frequency stays
    /// assert_eq!(scaled.angles[63], plain.angles[63] / 8.0); // a low one does not
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`RotaryFrequencies::geometric`] refuses, numbers that are not positive and finite, and a high
    /// factor that does not exceed the low one.
    pub fn llama3(width: usize, base: f64, scaling: Llama3Scaling) -> Result<RotaryFrequencies> {
        let Llama3Scaling {
            factor,
            low_frequency_factor: low,
            high_frequency_factor: high,
            original_context,
        } = scaling;
        expect_positive(&[factor, low, high, original_context])?;
        if high <= low {
            let rule = "the factor of high frequencies exceeds that of low ones";
            return Err(Error::invalid("rotary_frequencies", rule, format!("{high} and {low}"), ""));
        }
        let scaled = |angle: f64| {
            let turns = original_context * angle / std::f64::consts::TAU;
            // 0 for low frequencies, 1 for high ones.
            let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
            match kept {
                0.0 => angle / factor,
                1.0 => angle,
                _ => (1.0 - kept) * (angle / factor) + kept * angle,
            }
        };
        let plain = RotaryFrequencies::geometric(width, base)?;
        Ok(RotaryFrequencies { angles: plain.angles.into_iter().map(scaled).collect(), scale: 1.0 })
    }

    /// Returns the frequencies of YaRN, and the factor of cosines and sines.
    ///
    /// ```
    /// use isoshard::ops::{RotaryFrequencies, YarnScaling};
    /// let scaling = YarnScaling {
    ///     factor: 4.0, fast_turns: 32.0, slow_turns: 1.0, original_context: 4096.0, attention_factor: None,
    /// };
    /// let (plain, scaled) = (RotaryFrequencies::geometric(64, 1e4)?, RotaryFrequencies::yarn(64, 1e4, scaling)?);
    /// assert_eq!(scaled.angles[0], plain.angles[0]);
    /// assert_eq!(scaled.angles[31], plain.angles[31] / 4.0);
    /// assert!((scaled.scale - 1.1386).abs() < 1e-4);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`RotaryFrequencies::geometric`] refuses, a base of at most 1, numbers that are not positive and
    /// finite, and a `factor` below 1.
    pub fn yarn(width: usize, base: f64, scaling: YarnScaling) -> Result<RotaryFrequencies> {
        let YarnScaling { factor, fast_turns, slow_turns, original_context, attention_factor } = scaling;
        expect_positive(&[
            factor,
            fast_turns,
            slow_turns,
            original_context,
            attention_factor.unwrap_or(1.0),
        ])?;
        let plain = RotaryFrequencies::geometric(width, base)?;
        if factor < 1.0 || base <= 1.0 {
            let rule = "the context factor is at least 1 and the base above 1";
            return Err(Error::invalid("rotary_frequencies", rule, format!("{factor} and {base}"), ""));
        }
        // The pair that turns this often within the original context, as a real number.
        let pair_of = |turns: f64| {
            width as f64 * ln_f64(original_context / (turns * std::f64::consts::TAU)) / (2.0 * ln_f64(base))
        };
        let first = pair_of(fast_turns).floor().max(0.0);
        let last = pair_of(slow_turns).ceil().min(width as f64 - 1.0);
        let width_of_ramp = if first == last { 0.001 } else { last - first };
        let scaled = |(i, angle): (usize, f64)| {
            let kept = 1.0 - ((i as f64 - first) / width_of_ramp).clamp(0.0, 1.0);
            match kept {
                0.0 => angle / factor,
                1.0 => angle,
                _ => (angle / factor) * (1.0 - kept) + angle * kept,
            }
        };
        let scale = attention_factor.unwrap_or_else(|| 0.1 * ln_f64(factor) + 1.0);
        Ok(RotaryFrequencies { angles: plain.angles.into_iter().enumerate().map(scaled).collect(), scale })
    }
}

fn expect_positive(numbers: &[f64]) -> Result<()> {
    match numbers.iter().find(|n| !(**n > 0.0 && n.is_finite())) {
        Some(n) => {
            let rule = "the numbers of a scaling are positive and finite";
            Err(Error::invalid("rotary_frequencies", rule, n.to_string(), ""))
        }
        None => Ok(()),
    }
}
