//! Distributed tensors: computes with one tensor that is sharded over the ranks of a mesh.
//!
//! ```
//! use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, rng::Generator, tensor::DType};
//! // The same program on one rank and on three: each rank holds its rows of x, and the losses have equal bits.
//! let losses = |ranks| spmd(ranks, move |rank| {
//!     let mesh = DeviceMesh::new(&rank, &[("dp", ranks)])?;
//!     let mut generator = Generator::new(7);
//!     let x = DTensor::randn(&mesh, DType::F32, [5, 4], "(S0)", &mut generator)?;
//!     let w = DTensor::randn(&mesh, DType::F32, [4, 2], "(R)", &mut generator)?.requires_grad()?;
//!     let mut loss = x.matmul(&w)?.tanh()?.mean_all()?;
//!     let gradient = loss.backward()?.take(&w).expect("w is a leaf");
//!     isoshard::Result::Ok((loss.full_tensor()?.to_vec::<f32>()?, gradient.full_tensor()?.to_vec::<f32>()?))
//! });
//! assert_eq!(losses(1)?[0], losses(3)?[0]);
//! # Ok::<(), isoshard::Error>(())
//! ```
//!
//! A [`DTensor`] behaves as the whole tensor. When an operator is applied, it looks up a plan by its attributes and
//! its operands' metadata. The plan redistributes operands if necessary, runs the local kernel on each rank, and
//! gives the layout of the results. A node of the tape is recorded if a gradient is wanted. Layouts never change
//! values: redistribution is the identity, and so is its derivative.
//!
//! A [`DeviceMesh`] is the grid of ranks, [`Redistribution`] explains what a change of layout costs, and a [`Bridge`]
//! moves tensors between different meshes. The [glossary](crate::glossary) defines the words used here.

mod autograd;
mod bridge;
mod call;
mod mesh;
mod methods;
mod plan;
mod redistribute;
mod tensor;

pub use autograd::gradients::Gradients;
pub(crate) use autograd::recompute::FirstRun;
pub use autograd::scopes::{KeepLayouts, NoGrad, NoSync};
pub use bridge::{Bridge, PendingTransfer, Transfer};
pub use call::local_map::LocalMap;
pub use call::recompute_cheap::RecomputeCheap;
pub use call::work_tally::{OperatorWork, WorkTally, WorkTotal};
#[cfg(test)]
pub(crate) use mesh::counted_list::visits;
pub(crate) use mesh::counted_list::{CountedList, visit};
pub use mesh::device_mesh::DeviceMesh;
pub use mesh::into_draw::IntoDraw;
pub(crate) use mesh::rank_reports::{ListOnRanks, SameOnRanks};
pub use mesh::reduction::Reduction;
pub use mesh::tensor_meta::TensorMeta;
pub(crate) use methods::product_over_last;
pub use methods::{AttentionOptions, BatchStatistics, BinaryLossOptions, CrossEntropyOptions, LossReduction};
pub use plan::explain::{ExplainedMove, ExplainedPlan, Explanation};
pub use redistribute::Redistribution;
pub(crate) use redistribute::may_be_padding;
pub use tensor::check::{check_finite, check_replicas};
pub use tensor::dtensor::DTensor;
pub use tensor::layout_methods::PendingRedistribution;
pub use tensor::list::{DTensors, DTensorsIntoIter};
pub(crate) use tensor::saved::UnitGathers;
pub(crate) use tensor::tape::{GradientUnit, RecomputeInput};
