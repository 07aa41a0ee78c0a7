//! A runner for property tests with many properties: it collects the cases that failed.
//!
//! Seeds are fixed and nothing is written to disk; `PROPTEST_CASES`, `PROPTEST_RNG_SEED` and proptest's other variables
//! override the settings.

use std::fmt::Debug;

use isoshard::testing::values::mix;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestError, TestRunner, contextualize_config};

/// The cases that failed, each shrunk to the smallest that fails; after a few failures, cases are no longer shrunk.
#[derive(Default)]
pub struct Failures(Vec<String>);

impl Failures {
    /// Runs `holds` on `cases` draws; `of` names the test, and seeds the draws.
    pub fn check<S: Strategy>(
        &mut self,
        of: &str,
        cases: u32,
        given: &S,
        holds: impl Fn(S::Value) -> Result<(), String>,
    ) where
        S::Value: Debug,
    {
        let seed = of.bytes().fold(0, |seed, byte| mix(seed ^ u64::from(byte)));
        let config = contextualize_config(Config {
            cases: cases_here(cases),
            rng_seed: RngSeed::Fixed(seed),
            failure_persistence: None,
            max_local_rejects: u32::MAX,
            max_shrink_iters: if self.0.len() < 8 { 512 } else { 0 },
            max_shrink_time: 20_000,
            ..Config::default()
        });
        let outcome = TestRunner::new(config).run(given, |case| holds(case).map_err(TestCaseError::fail));
        match outcome {
            Ok(()) => {}
            Err(TestError::Fail(why, case)) => self.0.push(format!("{of}, from {case:?}: {why}")),
            Err(TestError::Abort(why)) => self.0.push(format!("{of}: {why}")),
        }
    }

    /// # Panics
    /// If a case failed.
    pub fn report(self) {
        let shown = self.0.iter().take(60).cloned().collect::<Vec<_>>().join("\n");
        assert!(self.0.is_empty(), "{} differ:\n{shown}", self.0.len());
    }
}

/// Returns the number of cases on this device. The emulated one is slow and runs a third of them, unless
/// `tests/complete.sh` asks for all: layouts and programs are tried on the CPU, and the device for its kernels.
fn cases_here(cases: u32) -> u32 {
    if is_emulated() && !is_complete() { cases.div_ceil(3) } else { cases }
}

/// Returns true if ranks compute on the emulated device.
pub fn is_emulated() -> bool {
    std::env::var("ISOSHARD_TEST_DEVICE").is_ok_and(|name| name == "shim")
}

/// Returns true if `tests/complete.sh` asks for all cases.
pub fn is_complete() -> bool {
    std::env::var_os("ISOSHARD_TEST_COMPLETE").is_some()
}
