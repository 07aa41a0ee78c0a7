//! The program of one rank that is a thread, and the failures of all ranks.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

use super::caught::take_message;
use super::local_world::LocalWorld;
use super::rank::Rank;
use crate::base::lock;
use crate::error::{Failure, Result};
use crate::tensor::catch_no_room;

/// The failures in the order in which they happened.
pub(super) type Failures = Mutex<Vec<(usize, Failure)>>;

/// Runs one rank's program. Returns its result, or records its failure and returns `None`.
pub(super) fn run_rank<T>(
    f: &(impl Fn(Rank) -> Result<T> + ?Sized),
    rank: usize,
    world: &LocalWorld,
    failures: &Failures,
) -> Option<T> {
    let life = || f(world.rank(rank)?).and_then(|result| world.end(rank).map(|()| result));
    let failure = match catch_unwind(AssertUnwindSafe(|| catch_no_room("", life))) {
        Ok(Ok(result)) => return Some(result),
        Ok(Err(error)) => Failure::Error(error),
        Err(payload) => Failure::Panic(take_message(payload)),
    };
    record_failure(failure, rank, world, failures);
    None
}

/// Records the failure of a rank and tells the other ranks.
pub(super) fn record_failure(failure: Failure, rank: usize, world: &LocalWorld, failures: &Failures) {
    // Both happen under one lock, so that the first recorded failure is also the one that other ranks report.
    let mut failures = lock(failures);
    world.fail(rank, failure.to_string(), is_echo(&failure));
    failures.push((rank, failure));
}

/// Returns the failure of a rank whose program's captured values panic when they are dropped.
pub(super) fn panic_of_drop(text: &str) -> Failure {
    Failure::Panic(format!("while a captured value was dropped: {text}"))
}

/// Returns true if the failure only reports that another rank failed.
pub(super) fn is_echo(failure: &Failure) -> bool {
    matches!(failure, Failure::Error(error) if error.is_echo())
}

#[cfg(test)]
pub(super) mod tests {
    use std::cell::Cell;
    use std::panic::resume_unwind;
    use std::time::Duration;

    use super::*;
    use crate::comm::api::spmd::Spmd;

    // The time for which this thread keeps the program of the ranks that it starts, so that they end first.
    thread_local!(pub static LETS_GO_AFTER: Cell<Duration> = const { Cell::new(Duration::ZERO) });

    #[test]
    fn a_panic_of_captured_values_that_the_caller_drops_last_is_a_ranks() {
        struct Explosive;
        impl Drop for Explosive {
            fn drop(&mut self) {
                resume_unwind(Box::new("the file is gone"));
            }
        }
        LETS_GO_AFTER.set(Duration::from_millis(300));
        let captured = Explosive;
        let ends = Spmd::new(2).run_each(move |_| {
            let _captured = &captured;
            Ok(())
        });
        LETS_GO_AFTER.set(Duration::ZERO);
        assert_eq!(ends, Ok(vec![Ok(()), Err(panic_of_drop("the file is gone"))]));
    }
}
