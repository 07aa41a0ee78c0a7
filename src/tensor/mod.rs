//! Dense tensors in one process: make them, view them, convert them, compute with them.
//!
//! ```
//! use isoshard::tensor::{DType, ReduceOp, Tensor, cpu};
//!
//! let scores = Tensor::from_vec(vec![1.0f32, 4.0, 2.0, 8.0, 5.0, 7.0], [2, 3])?;
//! let best = cpu::reduce("max", &scores, &[1], ReduceOp::Max, false)?;
//! assert_eq!(best.to_vec::<f32>()?, [4.0, 8.0]);
//!
//! let by_column = scores.transpose(0, 1)?; // a view: no elements are copied
//! assert_eq!(by_column.shape()[..], [3, 2]);
//! assert_eq!(by_column.cast(DType::I32)?.to_vec::<i32>()?, [1, 8, 4, 5, 2, 7]);
//! # Ok::<(), isoshard::Error>(())
//! ```
//!
//! A [`Tensor`] is a view (shape, strides and offset) of a shared buffer. Views do not copy elements. Writing to a
//! buffer that another tensor shares copies the elements first. Buffers come from a [pool](storage) per thread, since
//! fresh memory from the system costs page faults at every step.
//!
//! A tensor is in the CPU's memory, on a CUDA device, or on [`Device::Meta`] (without elements). [`cpu`] and
//! [`cuda`] hold the kernels.
//!
//! Missing: negative strides.

mod byte_hash;
pub mod cpu;
pub mod cuda;
mod cuda_device;
mod dense;
mod device;
mod devices;
mod dtype;
mod elements;
mod fold_order;
mod lists;
mod mapped;
pub mod meta;
mod no_room;
mod reduce_op;
mod regular_file;
mod result_places;
mod shape;
pub mod storage;

pub(crate) use isoshard_kernels::math;
pub(crate) use isoshard_kernels::memory::KernelList;
#[doc(inline)]
pub use isoshard_kernels::{DType, Dims, Element, Float, LEAF, Leaf, SplitRule};

pub(crate) use byte_hash::{hash_all, hash_samples, hash_words};
pub(crate) use dense::parts::{CutBlock, with_places};
pub use dense::tensor::Tensor;
pub use device::Device;
pub use dtype::Scalar;
pub(crate) use dtype::{for_dtype, safetensors_dtype};
pub use fold_order::{FoldOrder, FoldStep};
pub(crate) use lists::short_lists::{short_list, sort_by, sort_by_key};
pub(crate) use lists::sized_lists::{expect_room, try_filled, try_push};
pub use mapped::MappedFile;
pub(crate) use no_room::{catch_no_room, no_room};
pub use reduce_op::ReduceOp;
pub(crate) use regular_file::open_regular;
pub use shape::Shape;
pub(crate) use shape::stacked;
