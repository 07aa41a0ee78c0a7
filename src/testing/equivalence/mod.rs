//! Equivalence: a program gives on every mesh, from random layouts, the bits that a single rank gives.

mod check;
mod counterexample;
mod faults;
mod scenario;
mod shrinking;
mod trace;
mod trial;

pub use self::check::{Equivalence, EquivalenceReport, equivalent};
pub use self::counterexample::{Counterexample, Finding};
pub use self::faults::{FaultRun, RankFault};
pub use self::scenario::Scenario;
pub use self::trial::{Outcomes, Trial};
