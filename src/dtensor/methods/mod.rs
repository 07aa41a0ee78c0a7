//! Operators as methods of `DTensor`, a file per family.
//!
//! A method communicates nothing if a sharding rule of its operator fits the operands' layouts; otherwise operands are
//! redistributed to the layouts that cost least. A negative dim counts from the last.

mod activations;
mod attention;
mod attention_options;
mod binary_losses;
mod create;
mod element_losses;
mod foreach;
mod group_norm;
mod index;
mod joint_linear;
mod linear;
mod logic;
mod loss_reduction;
mod losses;
mod moe;
mod norm;
mod order;
mod pointwise;
mod product;
mod random;
mod reduce;
mod rotary;
mod sampling;
mod shape;
mod statistics;

pub use attention_options::AttentionOptions;
pub use binary_losses::BinaryLossOptions;
pub use group_norm::BatchStatistics;
pub(crate) use linear::product_over_last;
pub use loss_reduction::LossReduction;
pub use losses::CrossEntropyOptions;
