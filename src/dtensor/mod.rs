//! Distributed tensors: one tensor, stored in pieces on a mesh of ranks.
//!
//! A [`DTensor`] behaves as the whole. An operator on DTensors looks up a plan by its attributes and its operands'
//! facts; the plan says which operands move, runs the local kernel and lays out the result; a tape node is kept where
//! a gradient is wanted. Layouts never change values: redistribution is the identity, and so is its derivative.
//!
//! A [`Bridge`] moves tensors between different meshes.

mod again;
mod agree;
mod backward;
mod bridge;
mod check;
mod choose;
mod device_mesh;
mod dispatch;
mod draws;
mod exchange;
mod facts;
mod from_local;
mod methods;
mod nodes;
mod plan;
mod price;
mod random;
mod redistribute;
mod reduction;
mod sampling;
mod shapes;
mod tape;
mod tensor;
mod together;
mod unoptimised;

pub(crate) use again::Again;
pub use backward::Gradients;
pub use bridge::{Bridge, InTransit, Transfer};
pub use check::{check_finite, check_replicas};
pub use device_mesh::{DeviceMesh, NoGrad};
pub use draws::IntoDraw;
pub use facts::Facts;
pub use redistribute::Redistribution;
pub use reduction::Reduction;
pub use tensor::{DTensor, DTensors, PendingRedistribution};
