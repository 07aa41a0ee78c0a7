//! Trains a small GPT on text, character by character, on any mesh of ranks.
//!
//! With no arguments: this repository's own text, two ranks under FSDP, about a minute. `--mesh fsdp=4`, `--mesh dp=2,tp=2`
//! and `--mesh 1` train the same model: same initial values, same batches, same dropout. `--help` names everything,
//! `--json` prints JSON lines for programs to read. `--device cuda` trains on a GPU, which the ranks share. `--model llama` trains a Llama instead, `--config odd` one whose
//! sizes divide by nothing. `mpirun -n 4 train_gpt --engine mpi --mesh fsdp=4` does with processes what it does with threads.
//!
//! `args` is what the user says, `data` the text and its batches, `model` what is trained, `train` the program of one rank, `sample` what the
//! model writes, `report` what the user sees, `ranks` what ranks are,
//! `dry` a step without data.

mod args;
mod data;
mod dry;
mod model;
mod ranks;
mod report;
mod sample;
mod train;

use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;

use crate::args::Args;
use crate::ranks::Outcome;
use crate::train::Job;

fn main() -> ExitCode {
    let job = match Job::new(Args::parse()) {
        Ok(job) => Arc::new(job),
        Err(refused) => return end(Outcome::refused(refused)),
    };
    end(ranks::run(&job))
}

fn end(outcome: Outcome) -> ExitCode {
    if let Some(why) = &outcome.says {
        eprintln!("error: {why}");
    }
    ExitCode::from(outcome.code)
}
