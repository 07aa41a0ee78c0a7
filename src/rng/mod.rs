//! Random numbers as a pure function of `(seed, draw number, global linear index)`.
//!
//! To draw random tensors on a mesh, use [`DTensor::randn`](crate::dtensor::DTensor::randn) and the other methods of
//! `DTensor` with a [`Generator`]. This module is what they are built on; it knows no mesh and communicates nothing.
//!
//! A [`Generator`] is an explicit value that counts draws, one per random operator. Every rank runs the same program, so
//! every rank counts equally. A [`Draw`] identifies one operator's numbers. The fills ([`uniform`], [`normal`],
//! [`gamma`](gamma()), ...; [`Distribution`] and [`Init`] are the same as values) compute any range of them from the *global*
//! linear (row-major) index of the range's first element, or many ranges at once ([`IndexRanges`]). Each element gets the
//! same bits in every layout, on every CPU, vector width and CUDA device ([`Distribution::fill_tensor`]).
//!
//! The streams are frozen. [`Draw`] documents the counter that an element reads, each fill its formula, and the tests hold
//! known answers. Changing one bit is a breaking change.
//!
//! ```
//! use isoshard::rng::{Generator, normal};
//! let mut generator = Generator::new(7);
//! let draw = generator.next_draw();
//! let mut whole = [0.0f32; 10];
//! normal(draw, 0, &mut whole);
//! let mut part = [0.0f32; 4];
//! normal(draw, 3, &mut part); // elements 3..7 of the same tensor
//! assert_eq!(part, whole[3..7]);
//! ```
//!
//! A fill whose name ends in `_each` takes one parameter per element. Rejection sampling reads further attempts of the
//! element's own words, never its neighbours'.
//!
//! Missing: beta, Student's t and others. A [`Stream`] gives their implementations in other crates random words, in one
//! order, on the host.
//!
//! The [glossary](crate::glossary) defines the words used here.

mod counter;
pub(crate) mod cuda;
mod distributions;
mod init;
mod orthogonal;
mod permutation;
mod regions;
mod stream;

pub use counter::draw::Draw;
pub use counter::generator::{Generator, GeneratorState};
pub use counter::index_ranges::{IndexRanges, Indices};
pub use counter::philox;
pub use distributions::continuous::{exponential, exponential_each, log_normal, uniform_between};
pub use distributions::distribution::Distribution;
pub use distributions::fill::{RandomFloat, bits32, bits64, normal, uniform};
pub use distributions::gamma::{gamma, gamma_each};
pub use distributions::integers::{Integer, uniform_int};
pub use distributions::keep::{bernoulli, bernoulli_each, keep, keep_threshold};
pub use distributions::poisson::{Count, poisson, poisson_each};
pub use distributions::random_element::RandomElement;
pub(crate) use distributions::sample::{PIECE, PhiloxSink, drive, in_compute_type};
pub use init::{Fans, Init, InitValues};
pub use permutation::Permutation;
pub use stream::Stream;
