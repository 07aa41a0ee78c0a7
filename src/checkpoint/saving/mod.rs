//! Saves: the plan of the writers, and each rank's work.

pub(super) mod save;
pub(super) mod save_job;
pub(super) mod writers;
