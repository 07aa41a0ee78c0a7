//! The arithmetic of numbers, by which a loop is written once for several types.

pub(crate) mod bit_num;
pub mod real;
