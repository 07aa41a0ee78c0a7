//! Distributed tensors: one tensor, stored in pieces on a mesh of ranks.
//!
//! A [`DTensor`] behaves as the whole. An operator on DTensors looks up a plan by its attributes and its operands'
//! facts; the plan says which operands move, runs the local kernel and lays out the result; a tape node is kept where
//! a gradient is wanted. Layouts never change values: redistribution is the identity, and so is its derivative.
//!
//! A [`Bridge`] moves tensors between different meshes.

mod agree;
mod backward;
mod bridge;
mod check;
mod choose;
mod device_mesh;
mod dispatch;
mod exchange;
mod from_local;
mod into_draw;
mod list;
mod methods;
mod node_calls;
mod plan;
mod price;
mod random;
mod redistribute;
mod reduce_partials;
mod reduction;
mod regather;
mod sampling;
mod shapes;
mod tape;
mod tensor;
mod tensor_meta;
mod unoptimised;

pub use backward::Gradients;
pub use bridge::{Bridge, InTransit, Transfer};
pub use check::{check_finite, check_replicas};
pub use device_mesh::{DeviceMesh, NoGrad};
pub use into_draw::IntoDraw;
pub use list::{DTensors, DTensorsIntoIter};
pub use redistribute::Redistribution;
pub use reduction::Reduction;
pub(crate) use regather::Regather;
pub use tensor::{DTensor, PendingRedistribution};
pub use tensor_meta::TensorMeta;
