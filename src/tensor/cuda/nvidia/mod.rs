//! The driver that talks to NVIDIA's libraries, found at run time through `cudarc`.
//!
//! Nothing is linked: where `libcuda` or `libnvrtc` is missing, asking for a device says so in a line.

mod blas;
mod compiler;
mod driver;

pub use compiler::{compile, compiler_version};
pub(super) use driver::{devices_len, open};
