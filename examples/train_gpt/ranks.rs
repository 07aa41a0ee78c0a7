//! Runs the ranks: threads of this process, or processes that a launcher starts.
//!
//! Each process ends by itself. An error is printed once, by the rank that failed. A refusal before training begins
//! is printed by each process that has it, because it does not know of the others'.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use isoshard::comm::nccl::Library;
use isoshard::comm::{Launch, Process, Rank, Spmd};
use isoshard::tensor::storage;
use isoshard::{CommFault, Error, Failure, Result};

use crate::args::EngineName;
use crate::dry;
use crate::room;
use crate::train::{Job, train};

/// The exit code if the caller has to change something, such as an option.
const USAGE: u8 = 2;

/// The end of this process.
pub struct Outcome {
    pub code: u8,
    /// The error to print, unless another process prints it.
    pub says: Option<String>,
}

impl Outcome {
    /// Returns the end by an error that the caller can mend. A process that a launcher started adds its rank.
    pub fn refused(error: Error) -> Outcome {
        let says = match Launch::from_env() {
            Ok(Some(launch)) => format!("rank {}: {error}", launch.rank()),
            _ => error.to_string(),
        };
        Outcome { code: USAGE, says: Some(says) }
    }
}

/// Trains on the ranks that `--engine` names.
pub fn run(job: &Arc<Job>) -> Outcome {
    let launch = match Launch::from_env() {
        Ok(launch) => launch,
        Err(refused) => return Outcome::refused(refused),
    };
    let engine = job.args().engine;
    let nowhere = |rule: &str, remedy: &str| {
        Outcome::refused(Error::unsupported(
            "engine",
            rule,
            format!("--engine {engine:?}").to_lowercase(),
            remedy,
        ))
    };
    match (engine, launch) {
        (EngineName::Threads, _) => {
            let (shared, device) = (job.clone(), job.args().device);
            // A rank without room says so, before the system ends the process.
            let ranks = Spmd::new(job.ranks).memory_limit(room::bytes_each(job.ranks));
            let ranks = job.args().threads.into_iter().fold(ranks, Spmd::threads_per_rank);
            threads(job, ranks.run(move |rank| train(&rank.on(device), &shared)))
        }
        (EngineName::Nccl, None) => {
            let shared = job.clone();
            match Library::load() {
                Ok(library) => {
                    let ranks = Spmd::new(job.ranks).nccl(library);
                    threads(job, ranks.run(move |rank| train(&rank, &shared)))
                }
                Err(refused) => Outcome::refused(refused),
            }
        }
        (EngineName::Nccl, Some(launch)) => process(job, launch, Process::new),
        (EngineName::Mpi, Some(launch)) => process(job, launch, |launch| Process::new(launch).mpi()),
        (EngineName::Mpi, None) => {
            nowhere("no launcher has started this process", "start it by mpirun -n N, or by srun --mpi=pmix")
        }
        (EngineName::Dry, _) => match dry::run(job.args(), job.sizes(), job.args().world, job.args().rank) {
            Ok(()) => Outcome { code: 0, says: None },
            Err(refused) => Outcome::refused(refused),
        },
    }
}

/// Returns the end of ranks that are threads.
fn threads(job: &Job, result: Result<Vec<()>>) -> Outcome {
    match result {
        Ok(_) => Outcome { code: 0, says: None },
        // Before the first step the model or the plan refuses on every rank alike, so no rank is to blame.
        Err(Error::Rank { cause, .. }) if !job.has_begun() && is_refusal(&cause) => {
            Outcome { code: USAGE, says: Some(cause.to_string()) }
        }
        Err(error) => Outcome { code: 1, says: Some(error.to_string()) },
    }
}

/// Returns the end of a process that is a rank.
fn process(job: &Job, launch: Launch, over: impl FnOnce(Launch) -> Process) -> Outcome {
    let (rank, world_len) = (launch.rank(), launch.world_len());
    if world_len != job.ranks {
        let given = format!("{} of {} rank(s), {world_len} process(es)", job.args().mesh, job.ranks);
        let remedy = "start as many processes as the mesh has ranks";
        return Outcome::refused(Error::invalid("mesh", "it does not fit the processes", given, remedy));
    }
    let limit = room::bytes_each(launch.local_len().unwrap_or(1));
    let process = over(launch);
    let process = if job.args().insecure_rendezvous { process.insecure_rendezvous() } else { process };
    let process = job.args().threads.into_iter().fold(process, Process::threads_per_rank);
    let run = |rank: Rank| {
        storage::set_memory_limit(limit);
        train(&rank, job)
    };
    let program = AssertUnwindSafe(|| process.run(run));
    let cause = match catch_unwind(program) {
        Ok(Ok(())) => return Outcome { code: 0, says: None },
        Ok(Err(error)) => Failure::Error(error),
        Err(payload) => Failure::Panic(message(&*payload)),
    };
    // A rank that was told of another one's refusal leaves the telling to that one.
    let repeats = matches!(&cause, Failure::Error(error @ Error::Other(_)) if error.is_echo());
    if !job.has_begun() && (repeats || is_refusal(&cause)) {
        return Outcome { code: USAGE, says: (!repeats).then(|| format!("rank {rank}: {cause}")) };
    }
    let says = (!repeats && is_told_by(rank, &cause)).then(|| format!("rank {rank}: {cause}"));
    Outcome { code: 1, says }
}

/// True for the rank that reports a failure: the rank that failed or, if that one cannot report any more, its
/// neighbour.
fn is_told_by(rank: usize, cause: &Failure) -> bool {
    let Failure::Error(Error::Comm(fault)) = cause else { return true };
    match &**fault {
        CommFault::PeerFailed { rank: failed, cause, .. } => {
            cause.contains("without a word") && rank == usize::from(*failed == 0)
        }
        CommFault::Mismatch { rank: first, .. }
        | CommFault::Missing { rank: first, .. }
        | CommFault::Cycle { rank: first, .. }
        | CommFault::Unreceived { rank: first, .. }
        | CommFault::Transport { rank: first, .. } => rank == *first,
    }
}

fn is_refusal(cause: &Failure) -> bool {
    matches!(cause, Failure::Error(Error::Invalid(_) | Error::Sharding(_) | Error::Unsupported(_)))
}

fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|s| s.to_string());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default()
}
