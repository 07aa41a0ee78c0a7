//! The numbered checkpoints of a run in one folder: saves beside the program, the newest one, and the removal of older ones.

pub(super) mod background_save;
pub(super) mod folder;
pub(super) mod newest;
pub(super) mod removal;
