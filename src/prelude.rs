//! The names that most programs use, for `use isoshard::prelude::*`.
//!
//! ```
//! use isoshard::prelude::*;
//!
//! let sum = spmd_first(4, |rank| {
//!     let mesh = DeviceMesh::parse(&rank, "dp=2,tp=2")?;
//!     let x = DTensor::ones(&mesh, DType::F32, [6, 4], "(S0, S1)")?;
//!     x.sum_all()?.item()
//! })?;
//! assert_eq!(sum, 24.0);
//! # Ok::<(), isoshard::Error>(())
//! ```
//!
//! Parts of models ([`nn`](crate::nn)), readers of data, checkpoints and proofs are imported by name. [`Result`] and
//! [`Error`] are the crate's.

#[doc(no_inline)]
pub use crate::comm::{Rank, Spmd, spmd, spmd_first};
#[doc(no_inline)]
pub use crate::dtensor::{DTensor, DeviceMesh, Gradients};
#[doc(no_inline)]
pub use crate::nn::{Forward, Module, ParamId, Params, Plan, Scope};
#[doc(no_inline)]
pub use crate::optim::{AdamW, Optimizer, Sgd, WarmupCosine};
#[doc(no_inline)]
pub use crate::placement::{Layout, Placement};
#[doc(no_inline)]
pub use crate::rng::{Generator, Init};
#[doc(no_inline)]
pub use crate::tensor::{DType, Tensor};
#[doc(no_inline)]
pub use crate::{Error, Result};
