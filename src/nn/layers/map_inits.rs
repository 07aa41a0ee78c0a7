//! The initial values of a layer's maps.

use crate::rng::Init;

/// The initial values of the maps of a layer whose result is added to its operand. One [`Init`] stands for both.
///
/// ```
/// use isoshard::{nn::MapInits, rng::Init};
/// let normal = |std| Init::Normal { mean: 0.0, std };
/// assert_eq!(MapInits::from(normal(0.02)), MapInits { inner: normal(0.02), out: normal(0.02) });
/// // GPT-2 draws the last map of each of 2 x 12 layers with a smaller deviation.
/// let gpt2 = MapInits { inner: normal(0.02), out: normal(0.02 / 24f64.sqrt()) };
/// assert_ne!(gpt2.inner, gpt2.out);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MapInits {
    /// The values of all maps but the last.
    pub inner: Init,
    /// The values of the last map, `down` or `out`.
    pub out: Init,
}

impl From<Init> for MapInits {
    fn from(init: Init) -> MapInits {
        MapInits { inner: init, out: init }
    }
}
