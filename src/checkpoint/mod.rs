//! Checkpoints: named tensors and values, saved on one mesh and loaded on any other.
//!
//! A checkpoint is a folder of [safetensors](https://github.com/huggingface/safetensors) files, one per writer, with an
//! index in JSON. It is whole or absent. The same elements have the same bits in every layout.
//!
//! ```
//! use isoshard::{checkpoint::{Checkpoint, CheckpointTree}, comm::spmd, dtensor::{DTensor, DeviceMesh}};
//! use isoshard::{rng::Generator, tensor::DType};
//! let dir = std::env::temp_dir().join(format!("isoshard-{}", std::process::id()));
//! let folder = dir.join("step-12");
//! # std::fs::create_dir_all(&dir)?;
//! let at = folder.clone();
//! let saved = spmd(3, move |rank| {
//!     let mesh = DeviceMesh::new(&rank, &[("fsdp", 3)])?;
//!     let x = DTensor::randn(&mesh, DType::F32, [5, 4], "(S0)".parse()?, &mut Generator::new(7))?;
//!     let mut tree = CheckpointTree::new();
//!     tree.insert("x", x.clone())?;
//!     tree.insert_value("step", 12)?;
//!     tree.save(&mesh, &at)?;
//!     x.full_tensor()?.to_vec::<f32>()
//! })?;
//! let loaded = spmd(2, move |rank| {
//!     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
//!     let checkpoint = Checkpoint::open(&folder)?;
//!     assert_eq!(checkpoint.value("step").unwrap(), 12);
//!     checkpoint.tensor(&mesh, "x", "(S1)".parse()?)?.full_tensor()?.to_vec::<f32>()
//! })?;
//! assert_eq!(saved[0], loaded[0]);
//! # std::fs::remove_dir_all(dir)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Not built yet: asynchronous saves, reading with each byte once per group of replicas, checksums on load.

mod copy;
mod index;
mod load;
mod save;
mod tree;
mod writers;

pub use load::Checkpoint;
pub use tree::CheckpointTree;
