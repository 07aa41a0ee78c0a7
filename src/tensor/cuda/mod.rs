//! Runs tensor functions on NVIDIA GPUs: device memory, streams, kernel launches, and the functions that operators
//! build their kernels from.
//!
//! Programs reach a device through [`Device::Cuda`](super::Device::Cuda) and the methods of
//! [`Tensor`](super::Tensor); this module says which devices there are, reports and limits their memory, and launches
//! kernels of one's own.
//!
//! ```
//! use isoshard::tensor::{Device, Tensor, cuda};
//!
//! let device = if cuda::is_available() { Device::Cuda(0) } else { Device::Cpu };
//! let x = Tensor::from_vec(vec![1.0f32, 2.0, 3.0], [3])?.to_device(device)?;
//! assert_eq!((x.device(), x.to_vec::<f32>()?), (device, vec![1.0, 2.0, 3.0]));
//! # Ok::<(), isoshard::Error>(())
//! ```
//!
//! Each function here has a counterpart in [`cpu`](super::cpu) and runs the sources in `kernels/cuda/`. Each thread has
//! one stream per device. Work is put on the stream in program order, and the host waits only when it reads a value.
//! Everything is written against [`Driver`], which has two implementations: NVIDIA's library (feature `cuda`), and in
//! tests one that runs the same kernels on the CPU.
//!
//! Missing: copies between two devices that do not pass through the host; CUDA graphs.

mod copy;
mod fold;
mod gemm;
mod gpu;
mod launch;
mod map;
mod map_list;
mod packs;
pub(crate) mod reduce;
mod rows;
mod side;
mod transfer;
mod walk;

use super::cuda_device::sources;

pub use super::cuda_device::blas::{Blas, Matrix, Product};
pub use super::cuda_device::devices::{devices_len, install, is_available, unavailable_reason};
pub use super::cuda_device::driver::{CopyDirection, DeviceProperties, Driver, Grid, KernelProgram};
pub(crate) use super::cuda_device::fault;
pub use super::cuda_device::handle::{Address, DriverError, DriverResult, Handle};
pub use super::cuda_device::memory::DeviceMemoryStats;
pub use super::cuda_device::module::compile_ahead;
#[cfg(feature = "cuda")]
pub use super::cuda_device::nvidia;
pub(crate) use super::cuda_device::stream::StreamPoison;
pub(crate) use copy::{cast, copy_block, fill};
pub use fold::fold;
pub use gemm::{gemm, set_tf32};
pub use gpu::{Gpu, memory_stats, reset_memory_peaks, set_checked, set_memory_limit};
pub use launch::{Extent, KernelLaunch};
pub(crate) use map::{FormulaKernels, formula, map, map_to};
pub(crate) use map_list::{ListKernels, map_list};
pub(crate) use packs::{is_aligned, pack_len};
pub(crate) use reduce::reduce;
pub(crate) use rows::{RowEntries, RowLaunch, entries, statistic};
pub(crate) use side::{PoisonHandle, SideStream, StreamMark};
pub use sources::{KernelSource, OPTIONS, headers, programs};
pub(crate) use transfer::{download, upload};
