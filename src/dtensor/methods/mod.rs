//! Operators as methods of `DTensor`, a file per family.
//!
//! A method communicates nothing if a sharding rule of its operator fits the operands' layouts; otherwise operands are
//! redistributed to the layouts that cost least. A negative dim counts from the last.

mod attention;
mod index;
mod losses;
mod moe;
mod norm;
mod pointwise;
mod product;
mod random;
mod reduce;
mod sampling;
mod shape;
