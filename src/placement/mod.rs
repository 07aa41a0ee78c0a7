//! Layouts: describes how a tensor is split among the ranks of a mesh, and computes which elements each rank holds.
//!
//! This module holds metadata and index arithmetic only: no tensor data and no communication. A [`Mesh`] is a grid of
//! ranks with named axes. A [`Layout`] gives one [`Placement`] per mesh axis, and the order in which the axes split a
//! dim. A [`Spec`] joins mesh and layout with a dtype and a global shape. From a `Spec` each rank computes, without
//! communication, the [`Region`] of global indices that any rank holds. The [glossary](crate::glossary) defines the words.
//!
//! ```text
//! f32[5, 3]@(dp:S0, tp:S0)        on the mesh (dp=2, tp=2): dp splits the 5 rows into 3 + 2,
//!                                 then tp splits each part, into 2 + 1 and 1 + 1
//!   row 0  ■ ■ ■ ┐ rank 0 (dp 0, tp 0)
//!   row 1  ■ ■ ■ ┘
//!   row 2  ■ ■ ■ ─ rank 1 (dp 0, tp 1)
//!   row 3  ■ ■ ■ ─ rank 2 (dp 1, tp 0)
//!   row 4  ■ ■ ■ ─ rank 3 (dp 1, tp 1)
//! ```
//!
//! ```
//! # fn main() -> isoshard::Result<()> {
//! use isoshard::placement::{Mesh, Spec};
//!
//! let mesh = Mesh::parse("dp=2,tp=2", 1)?;
//! let rows = Spec::parse("f32[5, 3]@(dp:S0, tp:S0)", &mesh)?;
//! assert_eq!(rows.local_shape(), [1, 3].into());
//! assert_eq!(rows.region().start(0), Some(2));
//!
//! // The same two axes with tp outermost: tp splits into 3 + 2, and rank 1 (dp 0, tp 1) holds row 3.
//! let other = Spec::parse("f32[5, 3]@(dp:S0^1, tp:S0^0)", &mesh)?;
//! assert_eq!(other.region().start(0), Some(3));
//!
//! // Five equal blocks of the flattened 5 x 3 elements: dp 0 holds two of them, dp 1 three.
//! let ragged = Spec::parse("f32[5, 3]@(dp:RS(0..2; 2,3), tp:R)", &mesh)?;
//! assert_eq!(ragged.local_shape(), [6].into());
//! # Ok(())
//! # }
//! ```
//!
//! Axes nest in any order, ragged ones too: each cuts the part that the axes outside leave. Missing: an axis that splits
//! dims which a ragged shard flattens, from inside; such a part would be no run of indices.
//!
//! The [glossary](crate::glossary) defines the words used here.

mod axis;
mod grid;
mod layout;
mod members;
mod mesh;
mod notation;
mod picture;
mod ragged_units;
mod reduction_tree;
mod region;
mod runs;
mod shard_bounds;
pub mod short;
mod spec;
mod sum_groups;
mod tree_cut;
mod tree_node;
mod tree_parts;

pub use axis::{Placement, chunk};
pub use layout::{IntoLayout, Layout};
pub use mesh::Mesh;
pub(crate) use picture::{colour, write_label};
pub use ragged_units::RaggedUnits;
pub use reduction_tree::ReductionTree;
pub use region::{IndexBox, Overlap, Region};
pub(crate) use shard_bounds::ShardBounds;
pub use spec::Spec;
pub use sum_groups::SumGroups;
pub(crate) use tree_node::TreeNode;

pub use crate::tensor::Leaf;
