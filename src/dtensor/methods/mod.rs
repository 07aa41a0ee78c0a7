//! Operators as methods of `DTensor`, a file per family, related families in a folder.
//!
//! A method communicates nothing if a sharding rule of its operator fits the operands' layouts; otherwise operands are
//! redistributed to the layouts that cost least. A negative dim counts from the last.

mod attention;
mod attention_options;
mod create;
mod index;
mod losses;
mod order;
mod pointwise;
mod products;
mod random;
mod reductions;
mod rotary;
mod sampling;
mod shape;

pub use attention_options::AttentionOptions;
pub use losses::binary_losses::BinaryLossOptions;
pub use losses::class_losses::CrossEntropyOptions;
pub use losses::loss_reduction::LossReduction;
pub(crate) use products::linear::product_over_last;
pub use reductions::group_norm::BatchStatistics;
