//! Checkpoints that are read: opened, and loaded into any layout.

pub(super) mod checkpoint;
pub(super) mod load;
