//! Layers: modules of linear maps, norms, attention and experts, and the configurations of each.

pub(super) mod activation;
pub(super) mod adapter;
pub(super) mod expert_map;
pub(super) mod last_dim_norms;
pub(super) mod linear;
pub(super) mod map_inits;
pub(super) mod mlp;
pub(super) mod module;
pub(super) mod moe;
pub(super) mod norm_config;
pub(super) mod norms;
pub(super) mod rotary_config;
pub(super) mod self_attention;
pub(super) mod sequences;
