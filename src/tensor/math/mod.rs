//! Elementary functions as fixed sequences of IEEE operations: the same bits on every CPU, vector width and device.
//!
//! Each is a branch-free polynomial in `mul_add`, so that loops over it vectorise; each file states its error bound.

pub mod erf;
pub mod exp;
pub mod log;
pub mod poisson;
pub mod trig;
