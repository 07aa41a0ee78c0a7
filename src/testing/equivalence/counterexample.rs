//! Counterexamples: runs that differ from a single rank's, and the texts of their failures.

use std::fmt;

use super::scenario::Scenario;
use crate::placement::Spec;

/// A run of a program that is not equivalent to a single rank's: the smallest that was found.
///
/// `Display` writes the first difference, with the tensor's layout drawn, and the scenario as a line to paste.
///
/// ```
/// use isoshard::testing::Equivalence;
/// let failed = Equivalence::new(|mesh| {
///     mesh.record_value("ranks", mesh.mesh().rank_len() as f64)
/// })
/// .check()
/// .unwrap_err();
/// let text = failed.to_string();
/// assert!(text.contains("step 0, ranks: element [] is 2e0 (0x4000000000000000) on rank 0"), "{text}");
/// assert!(text.contains(r#"replay("a=2 | seed 1")"#), "{text}");
/// ```
#[derive(Clone, Debug)]
pub struct Counterexample {
    /// The run's mesh, seed, sizes and layouts.
    pub scenario: Scenario,
    /// The difference.
    pub finding: Finding,
    /// The path of the first module of [`nn`](crate::nn), or block of a program's own model, whose result differs. `None` if no
    /// module's does, as with a difference that begins in the backward pass.
    pub module: Option<String>,
    /// The number of runs that shrinking took.
    pub shrinking_runs: usize,
}

/// The first difference between a run and a single rank's, or a limit that the run exceeds.
#[derive(Clone, Debug)]
pub enum Finding {
    /// An element of a recorded tensor differs.
    Differs {
        /// The step and the tensor's path.
        place: String,
        /// The element's global index.
        index: Vec<usize>,
        /// The rank that stores it.
        rank: usize,
        /// The element with its bits on this rank.
        got: String,
        /// The element with its bits on a single rank.
        want: String,
        /// The number of elements of this rank that differ.
        differing: usize,
        /// The number of elements of this rank.
        stored: usize,
        /// The spec of the program's tensor.
        given: String,
        /// The spec that was compared.
        spec: Box<Spec>,
    },
    /// A recorded tensor has another dtype or shape.
    OtherShape {
        /// The step and the tensor's path.
        place: String,
        /// The rank.
        rank: usize,
        /// The dtype and shape on this rank.
        got: String,
        /// The dtype and shape due.
        want: String,
    },
    /// The ranks record other tensors, or in another order.
    OtherRecords {
        /// The rank.
        rank: usize,
        /// The number of the record.
        at: usize,
        /// The record on this rank.
        got: String,
        /// The record on a single rank.
        want: String,
    },
    /// The program fails, which it does not on a single rank.
    Fails(String),
    /// The program returns and records nothing, so there is nothing to compare. A check of bytes or of work may.
    NothingRecorded,
    /// The program fails on a single rank.
    FailsAlone(String),
    /// A rank receives more bytes than allowed.
    TooManyBytes {
        /// The rank that receives most.
        rank: usize,
        /// The bytes that it receives.
        received: u64,
        /// The limit.
        at_most: u64,
        /// The table of its calls.
        calls: String,
    },
    /// A rank computes too little.
    Idles {
        /// The rank that computes least.
        rank: usize,
        /// Its share of the operators' operations.
        flops: u64,
        /// The largest share.
        busiest: u64,
        /// The fraction of the largest share that is due.
        fraction: f64,
    },
}

impl Finding {
    /// Returns true if both are of one kind, so that one may stand for the other while a scenario shrinks.
    pub(super) fn is_like(&self, other: &Finding) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Finding::Differs { place, index, rank, got, want, differing, stored, given, spec } => {
                writeln!(
                    f,
                    "{place}: element {index:?} is {got} on rank {rank}, and {want} on a single rank"
                )?;
                writeln!(
                    f,
                    "{differing} of the rank's {stored} elements differ; the program's tensor is {given}"
                )?;
                write!(f, "{}", spec.draw())
            }
            Finding::OtherShape { place, rank, got, want } => {
                writeln!(f, "{place}: rank {rank} has {got} instead of {want}")
            }
            Finding::OtherRecords { rank, at, got, want } => {
                writeln!(f, "record {at} is {got} on rank {rank}, and {want} on a single rank")
            }
            Finding::Fails(error) => {
                writeln!(f, "the program fails, which it does not on a single rank: {error}")
            }
            Finding::NothingRecorded => {
                writeln!(f, "the program returns and records nothing; return a tensor")
            }
            Finding::FailsAlone(error) => writeln!(f, "the program fails on a single rank: {error}"),
            Finding::TooManyBytes { rank, received, at_most, calls } => {
                writeln!(f, "rank {rank} receives {received} bytes; at most {at_most} are allowed")?;
                write!(f, "{calls}")
            }
            Finding::Idles { rank, flops, busiest, fraction } => {
                let most =
                    format!("the busiest rank's {busiest} operations; at least {fraction} of them are due");
                writeln!(f, "rank {rank} does {flops} of {most}")
            }
        }
    }
}

impl fmt::Display for Counterexample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Counterexample { scenario, finding, module, shrinking_runs } = self;
        write!(f, "not equivalent to a single rank: {finding}")?;
        if let Some(module) = module {
            writeln!(f, "the first module whose result differs is {module}")?;
        }
        writeln!(f, "the smallest run found, after {shrinking_runs} more runs; to repeat it:")?;
        writeln!(f, "    Equivalence::new(program).replay(\"{scenario}\")")
    }
}

impl std::error::Error for Counterexample {}
