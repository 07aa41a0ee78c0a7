//! CUDA launches of random operators. `kernels/cuda/random.cuh` defines which thread draws which number.

mod per_element;
mod rows;

pub(super) use per_element::{Parameters, draw_per_element};
pub(super) use rows::{multinomial, shuffle};
