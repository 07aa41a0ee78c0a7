//! Rotary positions as models configure them.

use crate::error::{Error, Result};
use crate::ops::{Llama3Scaling, RotaryFrequencies, YarnScaling};

/// The rotary positions of a [`SelfAttention`](crate::nn::SelfAttention): which elements of queries and keys are rotated,
/// and by which angles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RotaryConfig {
    /// The base of the angles (`rope_theta`), usually 10000.
    pub base: f64,
    /// The number of leading elements of a head that are rotated, an even number; `None` for all of them.
    pub width: Option<usize>,
    /// The scaling of the angles for contexts longer than the model was trained for first.
    pub scaling: RotaryScaling,
}

/// The scaling of rotary angles for longer contexts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RotaryScaling {
    /// The angles of Su et al. (2021).
    Plain,
    /// All angles are divided by this factor (Chen et al., *Extending Context Window of Large Language Models via
    /// Positional Interpolation*, 2023), as in Gemma 3.
    Linear(f64),
    /// The scaling of Llama 3.1.
    Llama3(Llama3Scaling),
    /// YaRN.
    Yarn(YarnScaling),
}

impl RotaryConfig {
    /// Returns unscaled rotary positions of whole heads.
    ///
    /// ```
    /// use isoshard::nn::{RotaryConfig, RotaryScaling};
    /// let rotary = RotaryConfig::plain(1e4);
    /// assert!(rotary.width.is_none() && rotary.scaling == RotaryScaling::Plain);
    /// ```
    pub fn plain(base: f64) -> RotaryConfig {
        RotaryConfig { base, width: None, scaling: RotaryScaling::Plain }
    }

    /// Returns the angle per position of each pair of the rotated elements of a head.
    ///
    /// ```
    /// use isoshard::nn::{RotaryConfig, RotaryScaling};
    /// let plain = RotaryConfig { width: Some(4), ..RotaryConfig::plain(1e4) };
    /// let scaled = RotaryConfig { scaling: RotaryScaling::Linear(8.0), ..plain };
    /// let (plain, scaled) = (plain.frequencies(6)?, scaled.frequencies(6)?);
    /// assert_eq!(plain.angles.len(), 2); // four of six elements
    /// assert_eq!(scaled.angles[0], plain.angles[0] / 8.0);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a width that is odd or wider than the head, a base or factor that is not positive and finite, and what
    /// [`RotaryFrequencies`] refuses.
    pub fn frequencies(&self, head_width: usize) -> Result<RotaryFrequencies> {
        let width = self.width.unwrap_or(head_width);
        if width > head_width || width == 0 {
            let given = format!("{width} elements of a head of {head_width}");
            return Err(Error::invalid("rotary", "rotates one or more elements of a head", given, ""));
        }
        match self.scaling {
            RotaryScaling::Plain => RotaryFrequencies::geometric(width, self.base),
            RotaryScaling::Linear(factor) if factor > 0.0 && factor.is_finite() => {
                let mut frequencies = RotaryFrequencies::geometric(width, self.base)?;
                frequencies.angles.iter_mut().for_each(|angle| *angle /= factor);
                Ok(frequencies)
            }
            RotaryScaling::Linear(factor) => {
                let rule = "the factor of a linear scaling is positive and finite";
                Err(Error::invalid("rotary", rule, factor.to_string(), ""))
            }
            RotaryScaling::Llama3(scaling) => RotaryFrequencies::llama3(width, self.base, scaling),
            RotaryScaling::Yarn(scaling) => RotaryFrequencies::yarn(width, self.base, scaling),
        }
    }
}
