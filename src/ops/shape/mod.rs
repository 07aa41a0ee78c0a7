//! Operators that move elements without computing with them.
//!
//! Missing: slices with a step; overlapping windows (`unfold`); padding with anything but zeros. No method of `DTensor`
//! has arguments for them.

mod cat;
mod diagonal;
mod flip;
mod pad;
mod permute;
mod reshape;
mod slice;
mod split;

pub use cat::Cat;
pub use diagonal::{DiagEmbed, Diagonal, MatrixDiagonal};
pub use flip::Flip;
pub use pad::Pad;
pub use permute::Permute;
pub use reshape::Reshape;
pub use slice::Slice;
pub use split::Split;

use super::Sample;

/// Returns the samples of the family's operators.
pub(super) fn samples() -> Vec<Sample> {
    [
        cat::samples(),
        diagonal::samples(),
        flip::samples(),
        pad::samples(),
        permute::samples(),
        reshape::samples(),
        slice::samples(),
        split::samples(),
    ]
    .concat()
}
