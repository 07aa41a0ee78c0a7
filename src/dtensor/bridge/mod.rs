//! Moving tensors from one mesh to another, such as weights from a training mesh to a generation mesh.
//!
//! The meshes may share any ranks or none, and have any sizes and layouts. A [`Bridge`] is planned once from metadata
//! that all ranks of both meshes have, and used any number of times. Every rank receives exactly the elements that it
//! lacks, once, and a rank of both meshes keeps what it holds. Ranks that hold the same shard share the work of
//! sending it; the replica nearest to a receiver is preferred. Partial sums are reduced on their own mesh first.
//!
//! Missing: gradients across a bridge (tensors arrive without history), and receivers that forward elements to each
//! other.

mod batch;
mod bridge_piece;
mod bridge_plan;
mod routing;
mod transfer;

pub use bridge_plan::{Bridge, PendingTransfer};
pub use transfer::Transfer;
