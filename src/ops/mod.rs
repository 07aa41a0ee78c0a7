//! Write an operator of your own, or look up what a built-in one computes.
//!
//! Programs call the built-in operators as methods of [`DTensor`](crate::dtensor::DTensor); this module holds their
//! records. A record is a small value, the operator's attributes, that implements [`Op`]. It states everything that the
//! crate knows about the operator: result shapes, sharding [rows](Row), kernels, [work](Work) and derivative ([`Vjp`]).
//! The [glossary](crate::glossary) defines words such as row, partial and reduction tree.
//!
//! # How to write an operator of your own
//!
//! The operator below multiplies row `i` of a matrix by `factor` to the power `i`. Its record has seven short methods.
//!
//! ```
//! use isoshard::comm::spmd;
//! use isoshard::dtensor::{DTensor, DeviceMesh};
//! use isoshard::ops::{AxisPlacement, Bits, MeshAxis, Meta, Metas, Op, Row, Tensors, Vjp, Windows, Work};
//! use isoshard::ops::{arity, no_cuda_kernel};
//! use isoshard::tensor::{DType, Tensor};
//! use isoshard::{Error, Result};
//!
//! #[derive(Clone, Debug, PartialEq, Eq, Hash)]
//! struct DecayRows {
//!     factor: Bits, // an f64 that is compared by its bits
//! }
//!
//! impl Op for DecayRows {
//!     fn name(&self) -> &'static str {
//!         "decay_rows"
//!     }
//!
//!     // Dtypes and global shapes of the results, from those of the operands.
//!     fn infer(&self, ins: &[Meta]) -> Result<Metas> {
//!         let [x] = arity("decay_rows", ins)?;
//!         if x.dtype != DType::F64 || x.shape.len() != 2 {
//!             return Err(Error::invalid("decay_rows", "wants an f64 matrix", x.to_string(), "cast it"));
//!         }
//!         Ok([x.clone()].into_iter().collect())
//!     }
//!
//!     // The sharding rules for one mesh axis: `S0 -> S0` and `S1 -> S1`.
//!     fn rows(&self, _: &[Meta], _: MeshAxis) -> Vec<Row> {
//!         vec![Row::same(AxisPlacement::S(0), 1), Row::same(AxisPlacement::S(1), 1)]
//!     }
//!
//!     // The kernel. It computes this rank's shard; `at` says which global indices the shard has.
//!     fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
//!         let (first_row, columns) = (at.outs[0].start(0), ins[0].shape()[1]);
//!         let mut y = ins[0].to_vec::<f64>()?;
//!         for (i, row) in y.chunks_mut(columns.max(1)).enumerate() {
//!             let factor = self.factor.0.powi((first_row + i) as i32);
//!             row.iter_mut().for_each(|y| *y *= factor);
//!         }
//!         Ok([Tensor::from_vec(y, ins[0].shape())?].into_iter().collect())
//!     }
//!
//!     // The kernel on a CUDA device; this operator has none, and refuses by name.
//!     fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
//!         no_cuda_kernel(self, ins)
//!     }
//!
//!     // One multiplication per element.
//!     fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
//!         Work::elementwise(1, ins, outs)
//!     }
//!
//!     // The derivative, written with other operators. This operator is linear, so it is its own derivative.
//!     fn vjp(&self, g: &mut Vjp) -> Result<()> {
//!         let dy = g.grad(0);
//!         let dx = g.apply(self.clone(), &[dy])?;
//!         g.set(0, dx);
//!         Ok(())
//!     }
//! }
//!
//! for ranks in [1, 2, 3] {
//!     spmd(ranks, move |rank| {
//!         let mesh = DeviceMesh::new(&rank, &[("dp", ranks)])?;
//!         let x = Tensor::full(DType::F64, [3, 2], 8.0);
//!         let x = DTensor::distribute(&mesh, &x, "(S0)")?.requires_grad()?;
//!         let y = DTensor::apply_one(&DecayRows { factor: Bits(0.5) }, &[&x])?;
//!         assert_eq!(y.spec().to_string(), "f64[3, 2]@(dp:S0)"); // no rank sent anything
//!         assert_eq!(y.full_tensor()?.to_f64_vec(), [8.0, 8.0, 4.0, 4.0, 2.0, 2.0]);
//!         let dx = y.sum_all()?.backward()?.take(&x).expect("x is a leaf");
//!         assert_eq!(dx.full_tensor()?.to_f64_vec(), [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]);
//!         Ok(())
//!     })?;
//! }
//! # Ok::<(), isoshard::Error>(())
//! ```
//!
//! Rules that the methods must keep:
//!
//! - **Attributes** decide which calls share a plan: the record is compared and hashed. A float is a [`Bits`]. An
//!   attribute that changes from call to call but not the plan, for example a learning rate, is an [`Unkeyed`].
//! - **[`Op::rows`]** speaks about one mesh axis. The dispatcher combines one row per axis. If no row fits the
//!   operands' layouts, the dispatcher redistributes operands to the layout that costs least; it never guesses a row. A
//!   missing row therefore costs bytes, and a wrong row gives wrong results. [`Algebra`] gives the rows for partial
//!   sums. A row that shards a dim over which the operator sums gives [`AxisPlacement::TreeSum`].
//! - **[`Op::eval`]** must give an element the same bits on every rank that could compute it. Compute from global
//!   indices ([`Window::start`], [`Region::runs`](crate::placement::Region::runs)), never from the number of ranks; add
//!   elements in the order of the reduction tree ([`tensor::cpu::reduce`](crate::tensor::cpu::reduce)). An operand may
//!   be strided or empty: [`Tensor::to_vec`](crate::tensor::Tensor::to_vec) and
//!   [`Tensor::make_mut`](crate::tensor::Tensor::make_mut) give its elements in row-major order. The loops of
//!   [`tensor::cpu`](crate::tensor::cpu) are those of the built-in operators.
//! - **[`Op::vjp`]** runs on shapes, once per plan, or once per call if the operator has an [`Unkeyed`] attribute. The
//!   program that it writes runs on every mesh and device.
//!
//! `examples/09_own_operator.rs` is a scan along a dim, and the book's chapter on operators adds one that sums. An
//! optimizer is an operator as well: see [`Batched`], [`each_chunk`] and `examples/07_own_optimizer.rs`. An operator
//! that computes each element by itself can implement [`Pointwise`] instead, which derives the rows. Code that no row
//! describes can run on local tensors: see [`LocalMap`](crate::dtensor::LocalMap).
//!
//! `testing::judge` (feature `testing`) looks for a counterexample to each row, and `testing::gradients` compares
//! derivatives with differences. The book's chapter "Prove your own program" shows both.
//!
//! # How the built-in operators are filed
//!
//! Each family is a folder: `pointwise`, `shape`, `index`, `order`, `reduce`, `moe` and so on. An operator that is a
//! formula of elements is a row of a table (`pointwise/table`); any other one is a file that holds its record, or a
//! folder if its kernels are large. The kernels of a family stand in its `cpu.rs` and `cuda.rs`; the modules [`cpu`] and
//! [`cuda`] export those that can be called directly. A family's `mod.rs` lists its operators and gathers their
//! [samples](Sample), which [`catalog`] hands to the tests; these run them under all placements. `record` has the trait
//! and the types of its methods.

// Without the feature `testing` there is no catalog, so nothing calls the samples in the operators' files, and no code is
// generated for them.
#![cfg_attr(not(any(test, feature = "testing")), allow(dead_code))]

mod attention;
#[cfg(any(test, feature = "testing"))]
mod catalog;
pub mod cpu;
mod create;
mod cross_entropy;
pub mod cuda;
mod dropout;
mod index;
mod moe;
mod norm;
mod order;
mod pointwise;
mod prod;
pub(crate) mod product;
mod programs;
mod ragged;
mod random;
mod record;
mod reduce;
mod rotary;
mod shape;
mod softmax;
mod step;
mod unfused;

// A family's list of operators stands in its `mod.rs`.
pub use attention::*;
#[cfg(any(test, feature = "testing"))]
pub use catalog::{catalog, formulas};
pub use create::*;
pub use cross_entropy::*;
pub use dropout::*;
pub use index::*;
pub use moe::*;
pub use norm::*;
pub use order::*;
pub use pointwise::*;
pub use prod::*;
pub use product::*;
pub use programs::cuda_programs;
pub use random::*;
pub use record::*;
pub use reduce::*;
pub use rotary::*;
pub use shape::*;
pub use softmax::*;
pub use step::*;

pub(crate) use pointwise::{
    activations_table, arithmetic_table, bits_table, elementary_table, logarithmic_table, piecewise_table,
    rounding_table, smooth_activations_table, special_table, trigonometric_table,
};
pub(crate) use ragged::*;
