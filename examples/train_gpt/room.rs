//! The memory of this machine, and the least that a run takes of it.

use std::fs;

use isoshard::comm::Launch;
use isoshard::{Error, Result};

use crate::args::{Args, EngineName};
use crate::model::{Sizes, product};

/// The most ranks that are threads of this process.
const MOST_THREADS: usize = 1024;

/// The bytes of a parameter: its value, its gradient and AdamW's two moments, all f32.
const PARAMETER_BYTES: u128 = 16;

/// Returns the bytes of this machine's memory, if the system says.
pub fn machine_bytes() -> Option<usize> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()?.checked_mul(1024)
}

/// Returns the most bytes that each of `ranks` on this machine may take, if the system says.
pub fn bytes_each(ranks: usize) -> usize {
    machine_bytes().map_or(usize::MAX, |bytes| bytes / ranks.max(1))
}

/// Refuses more ranks than a process has threads for, and sizes for which this machine surely has no room. A dry run
/// computes nothing and takes any. Processes may be on several machines: each has its ranks' share of the run.
///
/// # Errors
/// Names the bound.
pub fn check(args: &Args, ranks: usize, sizes: &Sizes, batch: usize) -> Result<()> {
    let here = match args.engine {
        EngineName::Threads => ranks,
        EngineName::Mpi => match Launch::from_env()? {
            Some(launch) => launch.local_len().unwrap_or(1),
            None => return Ok(()),
        },
        EngineName::Nccl | EngineName::Dry => return Ok(()),
    };
    if args.engine == EngineName::Threads && ranks > MOST_THREADS {
        let rule = format!("ranks that are threads of one process are at most {MOST_THREADS}");
        let remedy = "use fewer, --engine mpi, or --engine dry to count a step";
        return Err(Error::invalid("mesh", rule, format!("{} of {ranks} ranks", args.mesh), remedy));
    }
    match machine_bytes().filter(|_| args.device == isoshard::tensor::Device::Cpu) {
        Some(bytes) => fits(sizes, batch, args.recompute, (here, ranks), bytes),
        None => Ok(()),
    }
}

/// Refuses sizes if `here` of all `ranks`, which share a machine, take more than `room` bytes together.
fn fits(
    sizes: &Sizes,
    batch: usize,
    recompute: bool,
    (here, ranks): (usize, usize),
    room: usize,
) -> Result<()> {
    let (parameters, layers, width) = sizes.least();
    let tokens = batch as u128 * sizes.block() as u128;
    // A block keeps more than eight vectors of a token for its backward pass; the loss reads the scores and makes their
    // gradient.
    let kept = if recompute { 1 } else { 8 };
    let of_token = product([width, layers, kept]).saturating_add(2 * sizes.vocabulary() as u128);
    let of_batch = product([tokens, of_token, 4]);
    let least = product([parameters, PARAMETER_BYTES]).saturating_add(of_batch);
    let least = product([least, here as u128]) / ranks.max(1) as u128;
    if least <= room as u128 {
        return Ok(());
    }
    let rule = format!("the run takes more memory than this machine's {room} bytes");
    let given = format!("{}, batch {batch}: {least} bytes or more", sizes.describe());
    Err(Error::invalid("sizes", rule, given, "use a smaller model or batch, or --engine dry to count a step"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::train::Job;

    fn refused(words: &[&str]) -> String {
        let words = std::iter::once(&"train_gpt").chain(words);
        match Args::try_parse_from(words) {
            Ok(args) => Job::new(args).map(drop).unwrap_err().to_string(),
            Err(refused) => refused.to_string(),
        }
    }

    #[test]
    fn counts_that_would_not_end_are_refused_with_the_bound() {
        let most = usize::MAX.to_string();
        for (option, bound) in [
            ("--steps", "1000000000"),
            ("--batch", "100000"),
            ("--accumulate", "100000"),
            ("--eval-batches", "100000"),
            ("--layers", "10000"),
            ("--heads", "1000000"),
            ("--width", "1000000"),
            ("--block", "1000000"),
            ("--hidden", "1000000"),
            ("--head-width", "1000000"),
            ("--kv-heads", "1000000"),
            ("--tokenizer", "1000000"),
        ] {
            for given in [&most[..], "1000000000000", "0"] {
                let said = refused(&[option, given]);
                let bound = format!("expected a whole number from 1 to {bound}; a larger one would not end");
                assert!(said.contains(&bound), "{option} {given}: {said}");
            }
        }
        let said = refused(&["--mesh", "fsdp=100000"]);
        assert!(
            said.starts_with("mesh: ranks that are threads of one process are at most 1024; got "),
            "{said}"
        );
        let said = refused(&["--mesh", &format!("fsdp={most}")]);
        assert!(said.starts_with("mesh: ranks that are threads"), "{said}");
        let said = refused(&["--mesh", &format!("fsdp={most},tp=2")]);
        assert!(said.contains("the number of ranks overflows"), "{said}");
    }

    #[test]
    fn sizes_beyond_this_machine_are_refused_with_its_bytes() {
        let Some(room) = machine_bytes() else { return println!("skipped: the system does not say") };
        for words in [
            &["--width", "100000"][..],
            &["--width", "1000000", "--heads", "1000000"],
            &["--model", "llama", "--width", "100000"],
            &["--model", "llama", "--hidden", "1000000", "--layers", "10000"],
            &["--layers", "10000", "--width", "4096"],
            &["--batch", "100000", "--layers", "100"],
        ] {
            let said = refused(words);
            let rule = format!("sizes: the run takes more memory than this machine's {room} bytes; got ");
            assert!(said.starts_with(&rule), "{words:?}: {said}");
        }
        let (dry, _) = (["train_gpt", "--engine", "dry", "--width", "100000"], ());
        assert!(Job::new(Args::parse_from(dry)).is_ok(), "a dry run takes no room");
    }

    #[test]
    fn a_machine_has_room_for_the_share_of_its_ranks() {
        let args = Args::parse_from(["train_gpt", "--width", "2048", "--layers", "8"]);
        let (sizes, batch) = args.sizes(0).unwrap();
        // 403 million parameters take 6.4 GB.
        let fits = |here, ranks| fits(&sizes, batch, false, (here, ranks), 4_000_000_000);
        let said = fits(4, 4).unwrap_err().to_string();
        assert!(
            said.starts_with("sizes: the run takes more memory than this machine's 4000000000 "),
            "{said}"
        );
        assert!(fits(1, 4).is_ok() && fits(1, 1).is_err());
        assert_eq!(product([u128::MAX / 2, 3]), u128::MAX);
    }

    #[cfg(unix)]
    #[test]
    fn texts_without_end_are_refused() {
        let dir = std::env::temp_dir().join(format!("isoshard-room-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (pipe, sparse) = (dir.join("pipe"), dir.join("sparse"));
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        if made.is_ok_and(|status| status.success()) {
            for path in [&pipe, &dir] {
                let said = refused(&["--data", &path.display().to_string()]);
                assert!(
                    said.starts_with("data: it is neither a regular file nor a directory; got "),
                    "{said}"
                );
            }
            std::fs::remove_file(&pipe).unwrap();
        } else {
            println!("skipped: no mkfifo");
        }
        let said = refused(&["--data", "/dev/zero"]);
        assert!(
            said.starts_with("data: it is neither a regular file nor a directory; got /dev/zero"),
            "{said}"
        );
        std::fs::File::create(&sparse).unwrap().set_len(2 << 30).unwrap();
        let rule = "data: the text has more than 268435456 bytes, which are held in memory whole; got ";
        let said = refused(&["--data", &sparse.display().to_string()]);
        assert!(said.starts_with(rule), "{said}");
        // Files of a folder count together.
        std::fs::File::create(&sparse).unwrap().set_len(200 << 20).unwrap();
        std::fs::File::create(dir.join("twin")).unwrap().set_len(200 << 20).unwrap();
        let said = refused(&["--data", &dir.display().to_string()]);
        assert!(said.starts_with(rule), "{said}");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
