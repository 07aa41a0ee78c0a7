//! The integration tests that can share a process, in one program with a module per claim. tests/README.md lists
//! the claims; `cargo test --test suite rules::` runs one module.
//!
//! The other folders of `tests` are programs that need a process of their own: `alloc` replaces the allocator, `gpu`
//! changes the device's settings, `nccl`, `mpi` and `package` start processes. Tests of this program run at the same
//! time, so none changes state that another test reads. (Some leave kernel launches unchecked to provoke races, which
//! affects no other test.)

#[path = "../common/mod.rs"]
mod common;

mod accumulate;
mod attention;
mod bridge;
mod checkpoint;
mod checkpoint_damage;
mod comm;
mod contract;
mod cost;
mod cuda_attention;
mod cuda_attention_fast;
mod cuda_attention_masks;
mod cuda_create;
mod cuda_experts;
mod cuda_gemm;
mod cuda_index;
mod cuda_losses;
mod cuda_pointwise;
mod cuda_ptx;
mod cuda_reduce;
mod cuda_rng;
mod cuda_rows;
mod cuda_shim;
mod cuda_streams;
mod data;
mod decoder;
mod equivalence;
mod errors;
mod exact;
mod extremes;
mod faults;
mod faults_mesh;
mod frozen;
mod fsdp_bytes;
mod fsdp_modes;
mod fsdp_order;
mod fsdp_training;
mod fully_shard;
mod functions;
mod fused_operators;
mod gradients;
mod groups;
mod house;
mod hugging_face;
mod index_maps;
mod joint;
mod judge_own;
mod layers;
mod limits;
mod local_map;
mod losses;
mod models;
mod module_paths;
mod operator_table;
mod optim;
mod own_code;
mod own_ops;
mod packed_documents;
mod pictures;
mod placement;
mod plan_warnings;
mod plans;
mod pointwise;
mod programs;
mod ragged;
mod recompute;
mod recompute_cheap;
mod redistribute;
mod redistribute_async;
mod redistribute_pairs;
mod redistribute_table;
mod reductions;
mod regressions;
mod reused_params;
mod rng;
mod rng_layouts;
mod rng_statistics;
mod rotary;
mod rounded_params;
mod rules;
mod rules_exact;
mod runs;
mod second_derivatives;
mod shard_plans;
mod spans;
mod testing;
mod torch_fixtures;
mod train;
mod work;
mod work_shares;
