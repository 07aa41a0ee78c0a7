//! A call as a member brings it: who sends what to whom, by which sequence, for which operator, in which group.

mod call;
mod group_name;
mod operator;
mod sequence;

pub(super) use call::Brief;
pub use call::{Call, Route};
pub(super) use group_name::{NAME_BYTES, label};
pub(crate) use operator::{current_operator, during, during_at_least};
pub use sequence::Sequence;
