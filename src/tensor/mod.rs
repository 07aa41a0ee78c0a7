//! Dense tensors: shape, dtype, storage, CPU kernels. Nothing here has heard of distribution.
//!
//! A [`Tensor`] is a view (shape, strides, offset) of a shared buffer; views never copy, and writing to a buffer
//! that someone else still sees copies it first. Buffers come from a per-thread [pool](storage::pool_stats), so that
//! an eager step does not spend its time in page faults.
//!
//! Missing: negative strides.

pub mod cpu;
pub mod cuda;
mod dense;
mod device;
mod devices;
mod display;
mod dtype;
mod fold_order;
mod interop;
pub mod math;
pub mod meta;
mod reduce_op;
mod shape;
pub mod storage;
mod summation;
mod views;

pub use dense::Tensor;
pub use device::Device;
pub(crate) use dtype::for_dtype;
pub use dtype::{DType, Element, Float, Scalar};
pub use fold_order::{FoldOrder, FoldStep};
pub use reduce_op::ReduceOp;
pub use shape::{Dims, Shape};
pub use summation::{LEAF, Leaf, Split};
