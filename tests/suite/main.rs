//! All integration tests that need no process of their own, in one program: a module for each claim, which docs/architecture.md
//! lists. `cargo test --test suite rules::` runs one of them.
//!
//! Beside this folder stand programs for what belongs to a whole process: `alloc` has the allocator, `gpu` the device's settings,
//! `nccl` and `mpi` start other processes of themselves. Tests here run at the same time: none sets what others see (some leave
//! launches unchecked, as races want it, which no other minds).

#[path = "../common/mod.rs"]
mod common;

mod bridge;
mod comm;
mod cost;
mod cuda_attention;
mod cuda_attention_fast;
mod cuda_gemm;
mod cuda_pointwise;
mod cuda_reduce;
mod cuda_rng;
mod cuda_shim;
mod cuda_streams;
mod equivalence;
mod errors;
mod exact;
mod faults;
mod faults_mesh;
mod gradients;
mod house;
mod layers;
mod nvrtc;
mod optim;
mod own_ops;
mod placement;
mod programs;
mod redistribute;
mod redistribute_async;
mod redistribute_pairs;
mod redistribute_table;
mod regressions;
mod rng;
mod rng_layouts;
mod rng_statistics;
mod rules;
mod rules_exact;
mod train;
mod work;
