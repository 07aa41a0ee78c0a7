//! Proofs of a program: the same bits on every mesh.
//!
//! For development dependencies: `isoshard = { version = "0.1", features = ["testing"] }`. The book's chapter "Prove your
//! own program" (`docs/book/src/prove.md`) starts from an empty test file.
//!
//! | to prove | use |
//! |---|---|
//! | a function of tensors gives the same bits on every mesh, and so do its gradients | [`equivalent`] |
//! | the same with own meshes, more runs, another device, or within a bound in fast mode | [`Equivalence`] |
//! | a training program has one loss curve and the same parameters | [`Trial::record`], [`Trial::record_params`], [`Trial::next_step`] |
//! | a run receives no more bytes than expected | [`Equivalence::at_most`]; an expression: [`assert_comm!`](crate::assert_comm) |
//! | no rank idles | [`Equivalence::least_work`] |
//! | the sharding rows of an operator hold | [`judge`] |
//! | gradients are derivatives | [`gradients`] |
//! | a rank that dies, stalls or differs is named by the others, in time | [`Equivalence::with_fault`] |
//! | a property of any layout, by proptest | [`strategies`], [`shards`], [`values`] |
//!
//! # A program
//!
//! The harness runs the closure on a single rank and on meshes of several ranks, and compares all tensors that it
//! returns or records. Sizes, layouts and values are drawn by name. A failure is shrunk, and prints a [`Counterexample`]: the
//! step, the tensor's path, the element, both values with their bits, the layout as a picture, and a [`Scenario`] that
//! [`Equivalence::replay`] runs again.
//!
//! ```
//! use isoshard::tensor::DType;
//! use isoshard::testing::{Equivalence, Finding, equivalent};
//!
//! equivalent(|mesh| {
//!     let x = mesh.leaf("x", DType::F32, [mesh.size("rows", 0..=7), 4])?;
//!     x.softmax(1)?.sum(&[0], false)
//! });
//!
//! // A length of the shard in place of the tensor's.
//! let failed = Equivalence::new(|mesh| {
//!     let x = mesh.input("x", DType::F32, [6])?;
//!     mesh.record_value("length", x.local().shape()[0] as f64)
//! });
//! assert!(matches!(failed.check().unwrap_err().finding, Finding::Differs { .. }));
//! ```
//!
//! # An operator
//!
//! [`judge`] runs an operator's kernel on the shards of simulated ranks, under each of its rows:
//!
//! ```
//! use isoshard::ops::{Input, Neg, Sample};
//! isoshard::testing::judge(&Sample::new(Neg, [Input::ints([5, 3])])).assert();
//! ```
//!
//! # A derivative
//!
//! ```
//! use isoshard::tensor::Tensor;
//! let x = Tensor::from_vec(vec![0.25f64, -1.5], [2])?;
//! isoshard::testing::gradients(&[x], |x| x[0].exp()?.mul(&x[0].sin()?));
//! # Ok::<(), isoshard::Error>(())
//! ```
//!
//! # Limits
//!
//! The checks try a finite number of meshes, layouts, sizes and values. Ranks are threads. Tensors that a program
//! neither returns nor records are not compared. The single rank is the reference: its results need tests of their own.

mod comm;
mod equivalence;
mod expected_panics;
mod gradients;
mod judge;
pub mod shards;
pub mod strategies;
pub mod values;

pub use equivalence::{
    Counterexample, Equivalence, EquivalenceReport, FaultRun, Finding, Outcomes, RankFault, Scenario, Trial,
    equivalent,
};
pub use gradients::{gradients, wrong_gradients};
pub use judge::{Discrepancy, Judge, Verdict, WrongRow, judge};
