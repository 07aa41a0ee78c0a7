//! The judge of sharding rows: an operator's rows are claims, and the judge looks for a counterexample to each.
//!
//! A row says: with operands in these placements, each rank's kernel computes its part of results in those placements
//! ([`Op::rows`]). The judge runs the operator's kernel on the shards of simulated ranks, which exchange nothing, and
//! compares with a single rank:
//!
//! - bit for bit, on ordinary values, if the row claims bits ([`Row::by_bits`]); arbitrary partial sums and the nodes
//!   of the reduction tree are tried as well;
//! - on small integers and multiples of 1/8, in f32 and f64, for every row;
//! - on one mesh axis of 1 to 5 ranks, on two axes in both nesting orders, and at extents of 0, 1, 2 and 7.
//!
//! A row that does not hold is *wrong*. A combination of placements that holds and is not listed is *missing*: such
//! an operator computes the right results, and moves more bytes than it must.
//!
//! ```
//! use isoshard::ops::{Input, Sample, Softmax};
//! use isoshard::testing::judge;
//!
//! let verdict = judge(&Sample::new(Softmax { dim: 1 }, [Input::ints([5, 3])]));
//! verdict.assert();
//! assert!(verdict.rows > 0 && verdict.missing.is_empty());
//! ```
//!
//! [`Op::rows`]: crate::ops::Op::rows

mod apart;
mod axis_rows;
mod exact;
mod fast;
mod resized;
mod sample_judge;
mod verdict;

pub use self::sample_judge::{Judge, judge};
pub use self::verdict::{Discrepancy, Verdict, WrongRow};
