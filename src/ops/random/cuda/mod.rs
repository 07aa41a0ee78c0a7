//! What random operators launch on a device: `kernels/random.cuh` says which thread makes which number.

mod each;
mod rows;

pub(in crate::ops) use each::{Parameters, draw_each, dropout};
pub(super) use rows::{multinomial, shuffle};
