//! The judge of sharding rows: an operator's rows are claims, and the judge looks for a counterexample to each.
//!
//! [`judge`] says what is compared; `fast` compares values, `exact` compares bits.

mod axis_rows;
mod exact;
mod fast;
mod local_evaluation;
mod resized;
mod sample_judge;
mod verdict;

pub use self::sample_judge::{Judge, judge};
pub use self::verdict::{Discrepancy, Verdict, WrongRow};
