//! A CUDA device below tensors: its driver, memory, streams and compiled kernels. [`cuda`](super::cuda) has the functions of
//! tensors, and hands on the public names.

pub(super) mod blas;
pub(super) mod devices;
pub(super) mod driver;
pub(crate) mod fault;
pub(super) mod handle;
pub(super) mod images;
pub(super) mod memory;
pub(super) mod module;
#[cfg(feature = "cuda")]
pub mod nvidia;
pub(super) mod pinned;
pub(super) mod sources;
pub(super) mod stream;
