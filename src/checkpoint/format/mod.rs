//! The files of a checkpoint: pieces with checksums, the index, and the names of steps and runs.

pub(super) mod boxes;
pub(super) mod index;
pub(super) mod index_file;
pub(super) mod json_room;
pub(super) mod piece_checksums;
pub(super) mod piece_file;
pub(super) mod piece_reader;
pub(super) mod run_id;
pub(super) mod runs;
pub(super) mod steps;
