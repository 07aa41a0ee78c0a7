//! Operators that move elements without computing with them.
//!
//! Missing: slices with a step; overlapping windows (`unfold`); padding with anything but zeros. No method of `DTensor`
//! has arguments for them.

pub(super) mod cat;
pub(super) mod diagonal;
pub(super) mod flip;
pub(super) mod pad;
pub(super) mod permute;
pub(super) mod reshape;
pub(super) mod slice;
pub(super) mod split;
