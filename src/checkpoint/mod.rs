//! Checkpoints: named tensors and values, saved on one mesh and loaded on any other, equal by bits.
//!
//! A checkpoint is a folder of [safetensors](https://github.com/huggingface/safetensors) files, one per rank that writes,
//! and an index in JSON, written last. It is whole or absent, whenever the program ends.
//!
//! ```
//! use isoshard::{checkpoint::{self, Checkpoint, StateTree}, comm::spmd, dtensor::{DTensor, DeviceMesh}};
//! use isoshard::{rng::Generator, tensor::DType};
//! let dir = std::env::temp_dir().join(format!("isoshard-{}", std::process::id()));
//! let (to, from) = (dir.clone(), dir.clone());
//! let saved = spmd(3, move |rank| {
//!     let mesh = DeviceMesh::new(&rank, &[("fsdp", 3)])?;
//!     let x = DTensor::randn(&mesh, DType::F32, [5, 4], "(S0)", &mut Generator::new(7))?;
//!     let mut state = StateTree::new();
//!     state.insert("x", x.clone())?;
//!     state.insert_value("step", 12)?;
//!     checkpoint::save(&mesh, &to, &state)?;
//!     x.full_tensor()?.to_vec::<f32>()
//! })?;
//! let loaded = spmd(2, move |rank| {
//!     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
//!     let checkpoint = Checkpoint::open(&from)?;
//!     assert_eq!(checkpoint.value("step").expect("saved"), 12);
//!     checkpoint.tensor(&mesh, "x", "(S1)")?.full_tensor()?.to_vec::<f32>()
//! })?;
//! assert_eq!(saved[0], loaded[0]);
//! # std::fs::remove_dir_all(dir).unwrap();
//! # Ok::<(), isoshard::Error>(())
//! ```
//!
//! [`StateTree`] gathers what is saved; [`CheckpointFolder`] numbers checkpoints, saves them while training goes on,
//! keeps the last ones of a run and finds the newest.
//!
//! Not built: stores other than a file system.

mod format;
mod loading;
mod saving;
mod series;
mod state_tree;

pub use loading::checkpoint::Checkpoint;
pub use saving::save::save;
pub use series::folder::{CheckpointFolder, WhileSaving};
pub use series::newest::WholeCheck;
pub use state_tree::StateTree;
