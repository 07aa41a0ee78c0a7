//! Trains a small GPT on text, character by character, on any mesh of ranks.
//!
//! With no arguments: this repository's own text, two ranks under FSDP, about a minute. `--mesh fsdp=4`, `--mesh dp=2,tp=2`
//! and `--mesh 1` train the same model: same initial values, same batches, same dropout. `--help` names everything,
//! `--json` prints JSON lines for programs to read. `--device cuda` trains on a GPU, which the ranks share. `--model llama` trains a Llama instead, `--config odd` one whose
//! sizes divide by nothing.
//!
//! `args` is what the user says, `data` the text and its batches, `model` what is trained, `train` the program of one rank, `sample` what the
//! model writes, `report` what the user sees.

mod args;
mod data;
mod model;
mod report;
mod sample;
mod train;

use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use isoshard::comm::spmd;
use isoshard::{Error, Failure};

use crate::args::Args;
use crate::train::{Job, train};

/// What the caller has to change, as for a wrong option.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let args = Args::parse();
    let job = match Job::new(args) {
        Ok(job) => Arc::new(job),
        Err(refused) => return end(USAGE, &refused),
    };
    let shared = job.clone();
    match spmd(job.ranks, move |rank| train(&rank.on(shared.device()), &shared)) {
        Ok(_) => ExitCode::SUCCESS,
        // What the model or the plan refuses before the first step, every rank refuses alike: no rank is to blame.
        Err(Error::Rank { cause, .. }) if !job.has_begun() && is_refusal(&cause) => end(USAGE, &cause),
        Err(error) => end(1, &error),
    }
}

fn end(code: u8, why: &dyn std::fmt::Display) -> ExitCode {
    eprintln!("error: {why}");
    ExitCode::from(code)
}

fn is_refusal(cause: &Failure) -> bool {
    matches!(cause, Failure::Error(Error::Invalid(_) | Error::Sharding(_) | Error::Unsupported(_)))
}
