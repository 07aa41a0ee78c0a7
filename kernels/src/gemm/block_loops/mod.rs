//! The loops around tiles: blocks that fit the caches, packed operands, products in bands.

pub(super) mod banded;
pub(super) mod blocking;
pub(super) mod blocks;
pub(super) mod pack;
pub(super) mod scratch;
