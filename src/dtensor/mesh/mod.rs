//! Meshes of ranks and the metadata of tensors on them: interned specs, reduction modes, reports of ranks.

pub(super) mod copied_bytes;
pub(super) mod counted_list;
pub(super) mod device_mesh;
pub(super) mod interned;
pub(super) mod into_draw;
pub(super) mod mesh_caches;
pub(super) mod rank_reports;
pub(super) mod reduction;
pub(super) mod reduction_modes;
pub(super) mod tensor_meta;
pub(super) mod unoptimised;
