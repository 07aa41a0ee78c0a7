//! Trains a small GPT on text, character by character, on any mesh of ranks.
//!
//! Without arguments it trains on this project's documentation, on two ranks with FSDP, for a minute. `--mesh fsdp=4`,
//! `--mesh dp=2,tp=2` and `--mesh 1` train the same model: same initial values, same batches, same losses. With
//! `--save` and `--resume` a run that ended goes on from its newest checkpoint, on any mesh, with the same bits.
//! `--help` shows every option with examples, `--plot loss.svg` draws the losses, `--json` prints JSON lines for
//! programs to read.
//!
//! ```text
//! $ cargo run --release --example train_gpt
//! model   GPT of 4 layers, 4 heads, width 128, block 64: 807,680 parameters in f32 on cpu
//! data    handbook: 121,993 characters, 93 different; the last tenth is for validation
//! ...
//! losses  training 1.4354 (mean of the last 100 steps), validation 1.6993
//! result  807,680 parameters on 2 ranks, digest c6b26c67dfda2487; any other mesh gives the same
//! ```
//!
//! These numbers are the same on every machine and mesh: `tests/complete.sh` compares them, `cargo test` the first
//! losses.
//!
//! | file | holds |
//! |---|---|
//! | `args` | the command line |
//! | `data` | the text and its batches |
//! | `resume` | checkpoints of a run |
//! | `model` | GPT and Llama behind one type |
//! | `train` | the program of one rank |
//! | `sample` | text that the model writes |
//! | `report`, `table`, `plot` | the table, JSON lines, the loss curve |
//! | `ranks` | starting ranks as threads or processes, and how they end |
//! | `room` | the memory that the process may take, and the least that a run takes |
//! | `dry` | a step that is counted and not computed |

mod args;
mod data;
mod dry;
mod model;
mod plot;
mod ranks;
mod report;
mod resume;
mod room;
mod sample;
mod table;
mod train;

use std::io::Write;
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
        say(why, &mut std::io::stderr());
    }
    ExitCode::from(outcome.code)
}

/// Prints an error by one write: mpirun mixes the output of processes piece by piece.
fn say(why: &str, to: &mut impl Write) {
    let _ = to.write_all(format!("error: {why}\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The texts that arrive, one per write.
    #[derive(Default)]
    struct Pieces(Vec<String>);

    impl Write for Pieces {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.push(String::from_utf8_lossy(bytes).into_owned());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn an_error_is_one_write() {
        let mut pieces = Pieces::default();
        say("rank 1: mesh: it does not fit the processes; got 2", &mut pieces);
        assert_eq!(pieces.0, ["error: rank 1: mesh: it does not fit the processes; got 2\n"]);
    }
}
