//! Reads the records that ranks write when they fail, and says which rank left the other ranks waiting at which call.
//!
//! `cargo run --example flight_report -- FOLDER` reads the folder that `ISOSHARD_FLIGHT_DIR` named. Without a folder
//! the example makes a failure of its own: a rank that skips a call.

use std::path::{Path, PathBuf};

use isoshard::Result;
use isoshard::comm::{Rank, Spmd, flight};
use isoshard::tensor::{DType, ReduceOp, Tensor};

const USAGE: &str = "\
usage: flight_report [FOLDER]

Reads the flight records in FOLDER and says which calls the ranks made last, and where they differ.
Ranks write their records when they fail, if ISOSHARD_FLIGHT_DIR names a folder.
Without FOLDER: three ranks run, one of them skips a call, and their records are read.";

fn main() -> Result<()> {
    match std::env::args_os().nth(1) {
        Some(arg) if arg == "--help" || arg == "-h" => println!("{USAGE}"),
        Some(folder) => print!("{}", flight::read(Path::new(&folder))?),
        None => skipped_call()?,
    }
    Ok(())
}

/// Lets three ranks fail, and reads their records.
fn skipped_call() -> Result<()> {
    let folder: PathBuf = std::env::temp_dir().join(format!("isoshard-flight-report-{}", std::process::id()));
    println!("Three ranks make five all-reduces, but rank 1 skips the fourth. All ranks fail with:\n");
    let failed = Spmd::new(3).flight_dir(&folder).run(skips_a_call);
    println!("{}\n", failed.expect_err("rank 1 skips a call"));
    println!("Each rank wrote its last calls to a file. The files together say:\n");
    let report = flight::read(&folder)?;
    print!("{report}");
    assert_eq!(report.mismatches.len(), 1);
    assert!(report.mismatches[0].brought.iter().any(|(_, ranks)| *ranks == [1]));
    // If removing the folder fails, the system will clean it up.
    let _ = std::fs::remove_dir_all(folder);
    Ok(())
}

fn skips_a_call(rank: Rank) -> Result<()> {
    let dp = rank.group(&[0, 1, 2], "dp")?;
    for step in 0..5 {
        if (rank.rank(), step) != (1, 3) {
            dp.all_reduce(&Tensor::full(DType::F32, [step + 1], 1.0), ReduceOp::Sum)?;
        }
    }
    Ok(())
}
