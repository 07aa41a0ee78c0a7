//! Who holds which elements: mesh, placements, layout, index arithmetic. Pure facts: no data, no talking.
//!
//! A [`Mesh`] is a grid of ranks with named axes. A [`Layout`] gives one [`Placement`] for each axis, and the order
//! in which axes split a dim. A [`Spec`] joins them with a dtype and a global shape; from it every rank computes,
//! without asking anyone, the [`Region`] of global indices that it, or any other rank, holds.
//!
//! ```text
//! f32[5, 3]@(dp:S0, tp:S0)        on the mesh (dp=2, tp=2): dp cuts the 5 rows into 3 + 2,
//!                                 then tp cuts what is left into 2 + 1 and 1 + 1
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
//! // The same two axes, tp outermost: now tp cuts 3 + 2, and rank 1 (dp 0, tp 1) holds row 3.
//! let other = Spec::parse("f32[5, 3]@(dp:S0^1, tp:S0^0)", &mesh)?;
//! assert_eq!(other.region().start(0), Some(3));
//!
//! // Five equal blocks of the flattened 5 x 3 elements; dp 0 takes two of them, dp 1 three.
//! let ragged = Spec::parse("f32[5, 3]@(dp:RS(0..2; 2,3), tp:R)", &mesh)?;
//! assert_eq!(ragged.local_shape(), [6].into());
//! # Ok(())
//! # }
//! ```
//!
//! Missing: more than one ragged axis, and a split inside a ragged prefix.

mod axis;
mod grid;
mod layout;
mod mesh;
mod notation;
mod picture;
mod piece;
mod reduction_tree;
mod region;
mod runs;
pub mod short;
mod spec;

pub use axis::{Placement, chunk};
pub use layout::Layout;
pub use mesh::Mesh;
pub use reduction_tree::{ReductionTree, TreeNode};
pub use region::{Block, Overlap, Region};
pub use spec::Spec;

pub use crate::tensor::{LEAF, Leaf};
