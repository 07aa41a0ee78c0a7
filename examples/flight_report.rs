//! Says which rank left the others where, from the records that ranks write to `ISOSHARD_FLIGHT_DIR` when they fail:
//! `cargo run --example flight_report -- FOLDER`. Without a folder it makes its own case: a rank that skips a call.

use std::path::PathBuf;

use isoshard::comm::flight;
use isoshard::comm::{Rank, Spmd};
use isoshard::tensor::{ReduceOp, Tensor};
use isoshard::{Result, comm};

fn main() -> Result<()> {
    if let Some(folder) = std::env::args_os().nth(1) {
        print!("{}", flight::read(folder.as_ref())?);
        return Ok(());
    }
    let folder: PathBuf = std::env::temp_dir().join(format!("isoshard-flight-report-{}", std::process::id()));
    let failed = Spmd::new(3).flight_dir(&folder).run(a_rank_skips_a_call);
    println!("{}\n", failed.expect_err("rank 1 skips a call"));
    let report = comm::flight::read(&folder)?;
    print!("{report}");
    assert_eq!(report.mismatches.len(), 1);
    assert!(report.mismatches[0].brought.iter().any(|(_, ranks)| *ranks == [1]));
    // The folder is the system's to clean, should it not be ours.
    let _ = std::fs::remove_dir_all(folder);
    Ok(())
}

fn a_rank_skips_a_call(rank: Rank) -> Result<()> {
    let dp = rank.group(&[0, 1, 2], "dp")?;
    for step in 0..5 {
        if (rank.rank(), step) != (1, 3) {
            dp.all_reduce(&Tensor::full(isoshard::tensor::DType::F32, [step + 1], 1.0), ReduceOp::Sum)?;
        }
    }
    Ok(())
}
