//! Eager SPMD distributed tensors: every shard computes what the whole would.
//!
//! Each rank runs the same program on [`DTensor`](dtensor::DTensor)s, which behave as one tensor and are stored in pieces
//! on a mesh of ranks. Random numbers and reductions belong to global indices, so a program means the same on every
//! mesh. Four ranks, as threads of one process:
//!
//! ```
//! use isoshard::comm::spmd;
//! use isoshard::dtensor::{DTensor, DeviceMesh};
//! use isoshard::placement::{Layout, short::{R, shard}};
//! use isoshard::rng::{Draw, Init};
//! use isoshard::tensor::DType;
//!
//! spmd(4, |rank| {
//!     let mesh = DeviceMesh::new(&rank, &[("dp", 2), ("tp", 2)])?;
//!     let normal = |shape: [usize; 2], layout, number| {
//!         let init = Init::Normal { mean: 0.0, std: 1.0 };
//!         DTensor::init(&mesh, DType::F32, shape, layout, init, Draw { seed: 7, number })
//!     };
//!     let x = normal([5, 64], Layout::new([shard(0), R]), 0)?;
//!     let w = normal([64, 32], Layout::new([R, shard(1)]), 1)?.requires_grad()?;
//!     let y = x.matmul(&w)?;
//!     assert_eq!(y.spec().to_string(), "f32[5, 32]@(dp:S0, tp:S1)"); // nothing has moved
//!     let gradients = y.gelu()?.mean_all()?.backward()?;
//!     assert_eq!(gradients.get(&w).expect("w is a leaf").layout(), w.layout());
//!     Ok(())
//! })?;
//! # Ok::<(), isoshard::Error>(())
//! ```
//!
//! Dev builds run tens of times slower unless Cargo optimises this crate in them too, which a dependency cannot ask for. Add
//! two lines to your `Cargo.toml`; a build without them says so once per process, on stderr, unless
//! `ISOSHARD_NO_BUILD_WARNING=1` is set:
//!
//! ```toml
//! [profile.dev.package.isoshard]
//! opt-level = 3
//! ```
//!
//! Start at [`dtensor`] for tensors, [`nn::Plan`] for training, [`ops`] to add an operator, [`comm::Engine`] to add an
//! engine. The decisions are in `docs/architecture.md`.

// On docs.rs items say which feature they need.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(
    any(loom, shuttle),
    allow(dead_code, unused_imports, unused_macros, reason = "what the rooms above use")
)]

pub mod comm;
mod error;
pub mod tensor;

// Builds for a model checker have what the thread engine stands on, and nothing above it.
#[cfg(not(any(loom, shuttle)))]
pub mod dtensor;
#[cfg(not(any(loom, shuttle)))]
pub mod nn;
#[cfg(not(any(loom, shuttle)))]
pub mod ops;
#[cfg(not(any(loom, shuttle)))]
pub mod optim;
#[cfg(not(any(loom, shuttle)))]
pub mod placement;
#[cfg(not(any(loom, shuttle)))]
pub mod rng;

pub use error::{
    CallId, CommFault, Divergence, Error, Failure, LastCall, MemoryFault, NotFinite, Refusal, Result,
    SharedError, Wait,
};

#[doc = include_str!("../docs/glossary.md")]
pub mod glossary {}

/// Compiles and runs the programs of the README and of the guides with the other documentation tests.
#[cfg(doctest)]
mod guides {
    macro_rules! pages {
        ($($name:ident $file:literal)*) => {$(
            #[doc = include_str!(concat!("../", $file))]
            struct $name;
        )*};
    }

    pages! {
        Readme "README.md"
        Introduction "docs/book/src/introduction.md"
        Layouts "docs/book/src/layouts.md"
        OwnModel "docs/book/src/own-model.md"
        OwnData "docs/book/src/own-data.md"
        Communication "docs/book/src/communication.md"
        Errors "docs/book/src/errors.md"
        Cluster "docs/book/src/cluster.md"
        FromPyTorch "docs/book/src/from-pytorch.md"
        FromCandleOrBurn "docs/book/src/from-candle-or-burn.md"
        Clusters "docs/clusters.md"
    }
}
