//! Fully sharded data parallelism: units of parameters, their positions in one buffer that ranks share equally.
//!
//! A *unit* is the parameters that are gathered together, such as those of a transformer block. Its buffer holds the
//! same number of elements on every rank. The planner decides where in the buffer each parameter lies, so that no rank
//! holds part of a *block*: a row, a tile that is quantised together, or a matrix that an optimizer needs whole.
//!
//! ```
//! use isoshard::fsdp::{BlockedTensor, ShardPlanner};
//! // A layer of a transformer of width 64 on 4 ranks, by rows of 64 and of 256 elements.
//! let shapes = [[192, 64], [64, 64], [256, 64], [64, 256], [1, 64]];
//! let tensors = shapes.map(|[rows, columns]| BlockedTensor { len: rows * columns, block: columns });
//! let plan = ShardPlanner::new(4).plan(&tensors)?;
//! assert!(plan.shard_len() < ShardPlanner::new(4).lower_bound(&tensors)? + 64);
//! assert!(plan.padding() * 100 < plan.buffer_len()); // below 1%
//! # Ok::<(), isoshard::Error>(())
//! ```
//!
//! [`fully_shard()`] places a model's parameters so, and says over which axes parameters, gradients and the optimizer's
//! states are sharded ([`Sharding`]), and which blocks stay whole ([`BlockPolicy`]).
//!
//! Missing: optimizers that use whole blocks. The guide `docs/fsdp.md` says what else is, and what is still copied.

mod block_policy;
mod draw;
mod fully_shard;
mod packing;
mod planner;
mod same_on_ranks;
mod shard_plan;
mod sharded_bytes;
mod sharding;

pub use block_policy::{Block, BlockPolicy};
pub use fully_shard::{ShardedUnit, ShardedUnits, fully_shard};
pub use planner::ShardPlanner;
pub use shard_plan::{BlockedTensor, ShardPlan};
pub use sharded_bytes::ShardedBytes;
pub use sharding::Sharding;
