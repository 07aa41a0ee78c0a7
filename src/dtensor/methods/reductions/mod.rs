//! Reductions over dims, statistics, and norms that use them.

pub(super) mod group_norm;
pub(super) mod norm;
pub(super) mod reduce;
pub(super) mod statistics;
