//! From one mesh to another: weights of a training mesh onto a generation mesh.
//!
//! The meshes may share ranks or none, and be of any sizes; the layouts are any two. A [`Bridge`] is planned once from
//! what all ranks of either mesh know, and used as often as wanted. Every rank receives exactly what it lacks, once, and
//! a rank of both keeps what it holds. Ranks that hold the same share the work of sending it, the one nearest to a
//! receiver first. A sum in parts is reduced on its own mesh before.
//!
//! Missing: gradients across a bridge (what arrives has no history); receivers that pass on to each other what they
//! all want.

mod batch;
mod bridge_piece;
mod bridge_plan;
mod routing;
mod transfer;

pub use bridge_plan::{Bridge, InTransit};
pub use transfer::Transfer;
