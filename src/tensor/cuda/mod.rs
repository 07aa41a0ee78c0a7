//! The CUDA device: memory, streams, launches, and the functions that operators build their kernels from.
//!
//! The twin of [`cpu`](super::cpu), function by function, over the sources in `kernels/`. Each thread has one
//! stream on a device; work is put on it in program order and nothing waits for it but reading a value. Everything here is
//! written over [`Driver`], of which there is one that talks to NVIDIA's library (feature `cuda`) and, in tests, one that
//! runs the same kernels on the CPU.
//!
//! Missing: tensors that move between two devices without passing through the host; CUDA graphs.

mod blas;
mod copy;
mod device;
mod driver;
pub(crate) mod fault;
mod fold;
mod gemm;
mod gpu;
mod handle;
mod launch;
mod lock;
mod map;
mod memory;
mod module;
#[cfg(feature = "cuda")]
pub mod nvidia;
mod pinned;
pub(crate) mod reduce;
mod rows;
mod side;
mod sources;
mod stream;
mod transfer;
mod walk;

pub use blas::{Blas, Matrix, Product};
pub(crate) use copy::{cast, copy_block, fill};
pub use device::{devices_len, install, is_available, unavailable_reason};
pub use driver::{CopyDirection, DeviceProperties, Driver, Grid, KernelProgram};
pub use fold::fold;
pub use gemm::{gemm, set_tf32};
pub use gpu::{Gpu, memory_stats, reset_memory_peaks, set_checked, set_memory_limit};
pub use handle::{Address, DriverError, DriverResult, Handle};
pub use launch::{Extent, KernelLaunch};
pub(crate) use map::{FormulaKernels, formula, map, map_to};
pub use memory::DeviceMemoryStats;
pub(crate) use reduce::reduce;
pub(crate) use rows::{RowEntries, RowLaunch, entries, statistic};
pub(crate) use side::{PoisonHandle, SideStream, StreamMark};
pub use sources::{KernelSource, OPTIONS, headers, programs};
pub(crate) use stream::{DeviceBlock, StreamPoison};
pub(crate) use transfer::{download, upload};
