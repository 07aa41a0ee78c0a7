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
//! moves tensors between different meshes. The [glossary](crate::glossary) defines the words.
//!
//! The [glossary](crate::glossary) defines the words used here.

mod backward;
mod backward_pass;
mod blocks;
mod bridge;
mod call_cost;
mod call_plan;
mod check;
mod check_own_code;
mod choose_rows;
mod copied_bytes;
mod counted_list;
mod custom_vjp;
mod derivative;
mod derivative_program;
mod device_mesh;
mod dispatch;
mod exchange_piece;
#[cfg(test)]
mod exhaustive_rows;
mod explain;
mod from_local;
mod grad;
mod gradient_needs;
mod gradient_places;
mod gradient_queue;
mod gradient_sum;
mod gradients;
mod grouped_calls;
mod interned;
mod into_draw;
mod kept_parts;
mod layout_methods;
mod leaf_dtypes;
mod lineage;
mod list;
mod local_map;
mod measure;
mod methods;
mod module_watch;
mod move_cost;
mod node_calls;
mod node_windows;
mod offloaded;
mod operator_span;
mod peak_memory;
mod rank_reports;
mod reached_nodes;
mod recompute;
mod recompute_cheap;
mod redistribute;
mod reduce_partials;
mod reduction;
mod reduction_modes;
mod regather;
mod row_product;
mod scopes;
mod start_moves;
mod step_plans;
mod tape;
mod tensor;
mod tensor_meta;
mod unit_gradients;
mod unoptimised;
mod waiting_gradients;
mod wanted_gradients;
mod work_share;
mod work_tally;

pub use bridge::{Bridge, PendingTransfer, Transfer};
pub use check::{check_finite, check_replicas};
#[cfg(test)]
pub(crate) use counted_list::visits;
pub(crate) use counted_list::{CountedList, visit};
pub use device_mesh::DeviceMesh;
pub use explain::{ExplainedMove, ExplainedPlan, Explanation};
pub use gradients::Gradients;
pub use into_draw::IntoDraw;
pub use layout_methods::PendingRedistribution;
pub use list::{DTensors, DTensorsIntoIter};
pub use local_map::LocalMap;
pub(crate) use methods::product_over_last;
pub use methods::{AttentionOptions, BatchStatistics, BinaryLossOptions, CrossEntropyOptions, LossReduction};
pub(crate) use rank_reports::{ListOnRanks, SameOnRanks};
pub(crate) use recompute::FirstRun;
pub use recompute_cheap::RecomputeCheap;
pub use redistribute::Redistribution;
pub(crate) use redistribute::may_be_padding;
pub use reduction::Reduction;
pub use scopes::{KeepLayouts, NoGrad, NoSync};
pub use tensor::DTensor;
pub(crate) use tensor::{GradientUnit, RecomputeInput, UnitGathers};
pub use tensor_meta::TensorMeta;
pub use work_tally::{OperatorWork, WorkTally, WorkTotal};
