//! Launches of random operators on a device: `kernels/random.cuh` says which thread makes which number.

mod per_element;
mod rows;

pub(super) use per_element::{Parameters, draw_per_element};
pub(super) use rows::{multinomial, shuffle};
