//! The results and failures of all ranks of a program. A result may have any type here, so that the code that runs ranks is
//! compiled once, and not for each program.

use std::any::Any;
use std::sync::Arc;

use super::rank::Rank;
use super::rank_failures::is_echo;
use crate::error::{Error, Failure, Result};

/// A program of ranks.
pub(super) type Program = Arc<dyn Fn(Rank) -> Result<AnyResult> + Send + Sync>;
/// A rank's result.
pub(super) type AnyResult = Box<dyn Any + Send>;

/// Returns a program whose results have any type.
pub(super) fn program_of<T, F>(f: F) -> Program
where
    T: Send + 'static,
    F: Fn(Rank) -> Result<T> + Send + Sync + 'static,
{
    Arc::new(move |rank| f(rank).map(|result| Box::new(result) as AnyResult))
}

/// Returns a rank's result as the type that its program returns.
pub(super) fn result_of<T: 'static>(result: AnyResult) -> T {
    *result.downcast().expect("the type that the program returns")
}

/// The end of one rank's program.
pub(super) enum RankEnd {
    Result(AnyResult),
    /// The rank's failure is in the list of all.
    Failed,
    /// The rank did not end in time.
    Abandoned,
}

/// The outcomes of all ranks.
pub(super) struct RankOutcomes {
    /// By rank.
    pub(super) ends: Vec<RankEnd>,
    pub(super) failures: Vec<(usize, Failure)>,
    /// The seconds since the last rank ended.
    pub(super) waited_s: f64,
    /// The message of a panic in the function that reports slow ranks.
    pub(super) report_panic: Option<String>,
}

impl RankOutcomes {
    /// Returns all results, or the failure that came first.
    pub(super) fn results(self) -> Result<Vec<AnyResult>> {
        let RankOutcomes { ends, mut failures, waited_s, .. } = self;
        let real = failures.iter().position(|(_, cause)| !is_echo(cause));
        if !failures.is_empty() {
            let stuck = ends.iter().position(|end| matches!(end, RankEnd::Abandoned));
            let (rank, cause) = match stuck {
                Some(stuck) if real.is_none() => (stuck, Failure::Stuck(waited_s)),
                _ => failures.swap_remove(real.unwrap_or(0)),
            };
            return Err(Error::Rank { rank, cause: Box::new(cause) });
        }
        let result = |end| match end {
            RankEnd::Result(result) => result,
            RankEnd::Failed | RankEnd::Abandoned => unreachable!("a rank without failure has a result"),
        };
        Ok(ends.into_iter().map(result).collect())
    }

    /// Returns each rank's result or failure.
    pub(super) fn ends(self) -> Vec<Result<AnyResult, Failure>> {
        let RankOutcomes { ends, mut failures, waited_s, .. } = self;
        let outcome = |(rank, end)| match end {
            RankEnd::Result(result) => Ok(result),
            RankEnd::Failed | RankEnd::Abandoned => {
                let own = failures.iter().position(|(failed, _)| *failed == rank);
                Err(own.map_or(Failure::Stuck(waited_s), |own| failures.swap_remove(own).1))
            }
        };
        ends.into_iter().enumerate().map(outcome).collect()
    }
}
