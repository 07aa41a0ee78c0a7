//! The driver over NVIDIA's libraries, which `cudarc` loads at run time.
//!
//! Nothing is linked: if `libcuda` is missing, asking for a device returns an error that says so. `libnvrtc` is loaded at the
//! first kernel that has no packed image; if it is missing, the error names the kernel and the folders.
//!
//! ```
//! use isoshard::tensor::cuda::nvidia;
//! match nvidia::compiler_version() {
//!     Ok(version) => println!("kernels are compiled by {version}"),
//!     Err(reason) => println!("{reason}"),
//! }
//! ```

mod blas;
mod compiler;
mod driver;

pub use compiler::{compile, compile_into, compiler_version};
pub(super) use driver::{devices_len, open};
