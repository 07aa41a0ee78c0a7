//! Distributed tensors for Rust with the same bits on every mesh.
//!
//! A program runs on several *ranks*: threads, processes of a cluster, or GPUs. Each rank runs the same code on
//! [`DTensor`](dtensor::DTensor)s, which behave as one tensor each and are stored in shards on a *mesh* of ranks. The library
//! plans the communication. Losses, gradients, parameters and random numbers have the bits that a single rank gives.
//!
//! Four ranks, as threads of this process, multiply two sharded matrices and compute a gradient:
//!
//! ```
//! use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, rng::Generator, tensor::DType};
//!
//! spmd(4, |rank| {
//!     // A grid of 2 x 2 ranks with named axes.
//!     let mesh = DeviceMesh::new(&rank, &[("dp", 2), ("tp", 2)])?;
//!     let mut g = Generator::new(7);
//!     // The axis dp shards the rows of x (S0), the axis tp the columns of w (S1); R is replicated.
//!     let x = DTensor::randn(&mesh, DType::F32, [5, 64], "(S0, R)", &mut g)?;
//!     let w = DTensor::randn(&mesh, DType::F32, [64, 32], "(R, S1)", &mut g)?.requires_grad()?;
//!     let y = x.matmul(&w)?; // nothing moves
//!     assert_eq!(y.spec().to_string(), "f32[5, 32]@(dp:S0, tp:S1)");
//!     let gradients = y.gelu()?.mean_all()?.backward()?; // the gradient of w is all-reduced over dp
//!     assert_eq!(gradients.get(&w).expect("w is a leaf tensor").layout(), w.layout());
//!     Ok(())
//! })?;
//! # Ok::<(), isoshard::Error>(())
//! ```
//!
//! # Where to start
//!
//! | to | read |
//! |---|---|
//! | look up a word | [`glossary`] |
//! | compute with distributed tensors | [`dtensor`], [`placement`] |
//! | write a model and train it | [`nn`], [`optim`], and the book in `docs/book` |
//! | read token files in batches | [`data`] |
//! | save a program's state, and go on from it on any mesh | [`checkpoint`] |
//! | load and save models of Hugging Face | [`hugging_face`] |
//! | run on threads, processes or GPUs | [`comm`] |
//! | draw random numbers | [`rng`] |
//! | add an operator | [`ops`] |
//! | prove that a program means the same on every mesh | `testing` (feature `testing`) |
//! | work with one rank's dense tensors | [`tensor`] |
//!
//! # Debug builds
//!
//! A debug build runs tens of times slower unless Cargo optimises this crate in it. A dependency cannot ask for that, so add two
//! lines to your `Cargo.toml`. A build without them prints a warning once per process, unless `ISOSHARD_NO_BUILD_WARNING=1` is set.
//!
//! ```toml
//! [profile.dev.package.isoshard]
//! opt-level = 3
//! ```

// On docs.rs items say which feature they need.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(
    any(loom, shuttle),
    allow(dead_code, unused_imports, unused_macros, reason = "used by modules that this build omits")
)]

mod base;
pub mod comm;
mod error;
mod files;
mod module_path;
pub mod tensor;

// Builds for a model checker have what the thread engine stands on, and nothing above it.
#[cfg(not(any(loom, shuttle)))]
pub mod checkpoint;
#[cfg(not(any(loom, shuttle)))]
pub mod data;
#[cfg(not(any(loom, shuttle)))]
pub mod dtensor;
#[cfg(not(any(loom, shuttle)))]
pub mod fsdp;
#[cfg(not(any(loom, shuttle)))]
pub mod hugging_face;
#[cfg(not(any(loom, shuttle)))]
pub mod nn;
#[cfg(not(any(loom, shuttle)))]
pub mod ops;
#[cfg(not(any(loom, shuttle)))]
pub mod optim;
#[cfg(not(any(loom, shuttle)))]
pub mod placement;
#[cfg(not(any(loom, shuttle)))]
pub mod prelude;
#[cfg(not(any(loom, shuttle)))]
pub mod rng;
#[cfg(all(feature = "testing", not(any(loom, shuttle))))]
pub mod testing;

pub use error::{
    BusyRank, CallId, CommFault, Divergence, Error, Failure, LastCall, MemoryFault, NotFinite, Refusal,
    Result, SharedError, Wait,
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
        WhichSharding "docs/book/src/which-sharding.md"
        WillItFit "docs/book/src/will-it-fit.md"
        LongSequences "docs/book/src/long-sequences.md"
        OwnOptimizer "docs/book/src/own-optimizer.md"
        ReinforcementLearning "docs/book/src/reinforcement-learning.md"
        Survive "docs/book/src/survive.md"
        OwnData "docs/book/src/own-data.md"
        GradientsOfGradients "docs/book/src/gradients.md"
        OwnOperator "docs/book/src/own-operator.md"
        Prove "docs/book/src/prove.md"
        Communication "docs/book/src/communication.md"
        Errors "docs/book/src/errors.md"
        Cluster "docs/book/src/cluster.md"
        FromPyTorch "docs/book/src/from-pytorch.md"
        FromCandleOrBurn "docs/book/src/from-candle-or-burn.md"
        Checkpoints "docs/checkpoints.md"
        Models "docs/models.md"
        Plans "docs/plans.md"
        Clusters "docs/clusters.md"
        Cuda "docs/cuda.md"
        Fsdp "docs/fsdp.md"
    }
}
