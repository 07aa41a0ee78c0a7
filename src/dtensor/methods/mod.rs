//! Operators as methods of `DTensor`, a file per family.
//!
//! A method communicates nothing if a sharding rule of its operator fits the operands' layouts; otherwise operands are
//! redistributed to the layouts that cost least. A negative dim counts from the last.

mod activations;
mod attention;
mod create;
mod foreach;
mod index;
mod logic;
mod losses;
mod norm;
mod pointwise;
mod product;
mod random;
mod reduce;
mod rotary;
mod sampling;
mod shape;
