//! Launches of random operators on a device: `kernels/random.cuh` says which thread makes which number.

mod each;
mod rows;

pub(super) use each::{Parameters, draw_each};
pub(super) use rows::{multinomial, shuffle};
