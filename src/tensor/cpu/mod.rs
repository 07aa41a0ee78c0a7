//! Loops over CPU memory that operators build their kernels from.

mod copy;
pub mod simd;

pub(crate) use copy::{as_elements_mut, copy_strided};
