//! The driver over NVIDIA's libraries, which `cudarc` loads at run time.
//!
//! Nothing is linked: if `libcuda` or `libnvrtc` is missing, asking for a device returns an error that says so.
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
