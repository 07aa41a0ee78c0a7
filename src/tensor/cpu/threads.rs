//! The number of threads per kernel, from the environment.

use std::thread;

use isoshard_kernels::threads::{MOST_THREADS, chosen_threads, given_threads};

use crate::error::{Error, Result};

/// Returns the number of threads for each of `callers` that compute at the same time: the environment variable
/// `ISOSHARD_THREADS`, or the machine's cores divided by the callers, at least 1. Inside of [`with_threads`](super::with_threads), callers
/// divide the threads that it has set.
///
/// ```
/// use isoshard::tensor::cpu;
/// assert!(cpu::threads_each(1)? >= cpu::threads_each(1000)?);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Refuses a value of `ISOSHARD_THREADS` that is not a number from 1 to 1024.
pub fn threads_each(callers: usize) -> Result<usize> {
    let cores = || thread::available_parallelism().map_or(1, usize::from);
    let shared = || chosen_threads().unwrap_or_else(cores) / callers.max(1);
    Ok(given()?.unwrap_or_else(shared).clamp(1, MOST_THREADS))
}

fn given() -> Result<Option<usize>> {
    given_threads().map_err(|given| refused(&given))
}

fn refused(given: &str) -> Error {
    let rule = format!("ISOSHARD_THREADS is a number from 1 to {MOST_THREADS}");
    Error::invalid("threads", rule, format!("{given:?}"), "unset it for the cores divided by the ranks")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::cpu::with_threads;

    #[test]
    fn callers_divide_the_threads_that_are_set() {
        if std::env::var_os("ISOSHARD_THREADS").is_none() {
            let each = |callers| with_threads(6, || threads_each(callers).unwrap());
            assert_eq!([1, 2, 4, 6, 100].map(each), [6, 3, 1, 1, 1]);
        }
        assert_eq!(chosen_threads(), None, "the choice ends with the call");
    }

    #[test]
    fn a_bad_number_is_refused_with_its_rule() {
        let e = refused("0").to_string();
        assert!(e.starts_with("threads: ISOSHARD_THREADS is a number from 1 to 1024; got \"0\""), "{e}");
    }
}
