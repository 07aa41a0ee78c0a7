//! Elementary functions that return the same bits on every CPU, vector width and device.
//!
//! ```
//! use isoshard_kernels::math::{erf::erf_f64, exp::exp_f32, log::ln_f64, trig::sin_cos_2pi_f32};
//! assert_eq!(exp_f32(1.0), 2.7182817);
//! assert_eq!(ln_f64(0.0), f64::NEG_INFINITY);
//! assert!((erf_f64(1.0) - 0.8427007929497149).abs() < 2.3e-16);
//! assert_eq!(sin_cos_2pi_f32(0.25), (1.0, 0.0)); // a quarter turn
//! ```
//!
//! Each function is a fixed sequence of IEEE 754 operations, without branches, so that loops that call it vectorise; a
//! few have a second, branching version for rare arguments. The largest errors in units in the last place (ulp) are
//! stated by each module or in docs/functions.md.

#![allow(clippy::approx_constant, clippy::excessive_precision)]

#[macro_use]
mod pair;

pub mod circular;
pub mod erf;
pub mod erfc;
pub mod exp;
pub mod exponential;
pub mod gamma;
pub mod hyperbolic;
pub mod inverse_trig;
pub mod log;
pub mod logarithm;
pub mod normal;
pub mod poisson;
pub mod power;
pub mod short;
pub mod trig;
