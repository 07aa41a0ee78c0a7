//! The kernels of one tile or of a few rows: sums in registers over the whole tree, for each instruction set and each type that
//! operands are stored in.

pub(super) mod lines;
pub(super) mod prefetch;
pub(super) mod stored;
pub(super) mod strip;
pub(super) mod thin_tile;
pub(super) mod tile;
pub(super) mod transpose;
pub(super) mod vector;
pub(super) mod widening;
