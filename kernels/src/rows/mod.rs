//! Kernels of operators that compute rows from rows: softmax, cross entropies, norms and their derivatives, and rotary position embedding.

mod cross_entropy;
mod each_row;
mod norm_backward;
mod norm_forward;
mod rotary;
mod softmax;

pub use cross_entropy::{CrossEntropyRows, SoftGradientRows, SoftRows};
pub use each_row::{RowBody, each_row};
pub use norm_backward::NormBackward;
pub use norm_forward::NormForward;
pub use rotary::{Rotary, RotaryAngles};
pub use softmax::Softmax;

use crate::num::real::Real;

/// An element type of norms: f32 or f64.
///
/// ```
/// use isoshard_kernels::rows::{Norm, NormForward};
/// let (mut y, mut mean, mut rstd) = ([0.0f64; 2], [0.0], [0.0]);
/// f64::normalise(NormForward {
///     x: &[1.0, 3.0],
///     residual: None,
///     weight: None,
///     bias: None,
///     len: 2,
///     eps: 0.0,
///     centred: true,
///     y: &mut y,
///     sums: &mut [],
///     mean: &mut mean,
///     rstd: &mut rstd,
/// });
/// assert_eq!((y, mean, rstd), ([-1.0, 1.0], [2.0], [1.0]));
/// ```
pub trait Norm: Real {
    /// Normalises all rows.
    ///
    /// # Panics
    /// Panics if lengths do not fit each other.
    fn normalise(call: NormForward<'_, Self>);

    /// Computes the gradients of all rows.
    ///
    /// # Panics
    /// Panics if lengths do not fit each other.
    fn normalise_backward(call: NormBackward<'_, Self>);
}

macro_rules! norm {
    ($($t:ty)*) => {$(
        impl Norm for $t {
            fn normalise(call: NormForward<'_, $t>) {
                norm_forward::normalise(call);
            }

            fn normalise_backward(call: NormBackward<'_, $t>) {
                norm_backward::normalise_backward(call);
            }
        }
    )*};
}
norm!(f32 f64);
