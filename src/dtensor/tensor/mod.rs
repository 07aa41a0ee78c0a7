//! The tensor, the nodes of its tape, and methods that change its layout or compare its replicas.

pub(super) mod blocks;
pub(super) mod check;
pub(super) mod dtensor;
pub(super) mod from_local;
pub(super) mod layout_methods;
pub(super) mod lineage;
pub(super) mod list;
pub(super) mod module_watch;
pub(super) mod peak_memory;
pub(super) mod reduce_partials;
pub(super) mod saved;
pub(super) mod start_moves;
pub(super) mod tape;
