//! Proofs of a program: the same bits on every mesh.
//!
//! ```
//! isoshard::testing::judge(&isoshard::ops::Sample::new(isoshard::ops::Neg, [isoshard::ops::Input::ints([5])])).assert();
//! ```

mod comm;
mod equivalence;
mod gradients;
mod judge;
mod quiet;
pub mod shards;
pub mod strategies;
pub mod values;

pub use equivalence::{
    Counterexample, Equivalence, EquivalenceReport, FaultRun, Finding, Outcomes, RankFault, Scenario, Trial,
    equivalent,
};
pub use gradients::{gradients, wrong_gradients};
pub use judge::{Discrepancy, Judge, Verdict, WrongRow, judge};
