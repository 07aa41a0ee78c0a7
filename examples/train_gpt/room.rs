//! The memory that this process may take, and the least that a run takes of it.

use std::fs;

use isoshard::comm::Launch;
use isoshard::tensor::cpu;
use isoshard::{Error, Result};

use crate::args::{Args, EngineName, RecomputeName};
use crate::model::{Sizes, product};

/// The most ranks that are threads of this process.
const MOST_THREADS: usize = 1024;

/// The bytes of a parameter: its value, its gradient and AdamW's two moments, all f32.
const PARAMETER_BYTES: u128 = 16;

/// The part of the memory that is left to lists that no limit counts: a sixteenth.
const UNCOUNTED_SHARE: usize = 16;

/// Returns the most bytes that the tensors of each of `ranks` on this machine may take, if the system says: equal parts of
/// what is left beside the text, the program and small lists.
pub fn bytes_each(ranks: usize) -> usize {
    cpu::memory_bytes().map_or(usize::MAX, |bytes| share(bytes, resident_bytes().unwrap_or(0), ranks))
}

fn share(bytes: usize, resident: usize, ranks: usize) -> usize {
    let left = bytes.saturating_sub(resident);
    (left - left / UNCOUNTED_SHARE) / ranks.max(1)
}

/// Returns the bytes of this process that are in memory, if the system says.
fn resident_bytes() -> Option<usize> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()?.checked_mul(1024)
}

/// Refuses more ranks than a process has threads for, and sizes for which this process surely has no room. A dry run
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
    match cpu::memory_bytes().filter(|_| args.device == isoshard::tensor::Device::Cpu) {
        Some(bytes) => fits(sizes, batch, args.recompute == RecomputeName::Blocks, (here, ranks), bytes),
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
    let rule = format!("the run takes more memory than the {room} bytes that the system allows");
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
        let Some(room) = cpu::memory_bytes() else { return println!("skipped: the system does not say") };
        for words in [
            &["--width", "100000"][..],
            &["--width", "1000000", "--heads", "1000000"],
            &["--model", "llama", "--width", "100000"],
            &["--model", "llama", "--hidden", "1000000", "--layers", "10000"],
            &["--layers", "10000", "--width", "4096"],
            &["--batch", "100000", "--layers", "100"],
        ] {
            let said = refused(words);
            let rule = format!(
                "sizes: the run takes more memory than the {room} bytes that the system allows; got "
            );
            assert!(said.starts_with(&rule), "{words:?}: {said}");
        }
        let (dry, _) = (["train_gpt", "--engine", "dry", "--width", "100000"], ());
        assert!(Job::new(Args::parse_from(dry)).is_ok(), "a dry run takes no room");
    }

    /// Weights of Hugging Face's format have their sizes in a file, which says anything.
    #[test]
    fn a_pretrained_model_beyond_this_machine_is_refused_before_its_weights_are_read() {
        let Some(room) = cpu::memory_bytes() else { return println!("skipped: the system does not say") };
        let dir = std::env::temp_dir().join(format!("isoshard-from-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let config = |layers: usize, vocabulary: usize, width: usize| {
            format!(
                r#"{{"model_type": "llama", "hidden_act": "silu", "num_hidden_layers": {layers}, "vocab_size": {vocabulary},
                "num_attention_heads": 10, "num_key_value_heads": 10, "head_dim": 10000, "hidden_size": {width},
                "intermediate_size": 1000, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
                "tie_word_embeddings": false}}"#
            )
        };
        let given = dir.display().to_string();
        for (layers, vocabulary, width) in [(100, 200, 100_000), (1, 1 << 20, 1 << 20)] {
            std::fs::write(dir.join("config.json"), config(layers, vocabulary, width)).unwrap();
            let said = refused(&["--from", &given]);
            let rule = format!(
                "sizes: the run takes more memory than the {room} bytes that the system allows; got "
            );
            assert!(said.starts_with(&rule), "{said}");
            assert!(said.contains(&format!("of {layers} layers, width {width}, ")), "{said}");
        }
        std::fs::write(dir.join("config.json"), config(1_000_000_000_000, 200, 100)).unwrap();
        let said = refused(&["--from", &given]);
        assert!(said.contains("a size from 1 to 2^20; got num_hidden_layers: 1000000000000 in "), "{said}");
        std::fs::remove_dir_all(&dir).unwrap();
    }

    /// A rank's limit leaves room for what no limit counts, so that it is met before the system ends the process.
    #[test]
    fn ranks_share_what_is_left_of_the_memory() {
        assert_eq!(share(1600, 0, 1), 1500);
        assert_eq!(share(1700, 100, 3), 500);
        assert_eq!((share(100, 200, 2), share(1600, 0, 0)), (0, 1500));
        if let Some(bytes) = cpu::memory_bytes() {
            assert!(bytes_each(2) < bytes / 2 && bytes_each(2) > 0);
        }
    }

    #[test]
    fn a_machine_has_room_for_the_share_of_its_ranks() {
        let args = Args::parse_from(["train_gpt", "--width", "2048", "--layers", "8"]);
        let (sizes, batch) = args.sizes(0).unwrap();
        // 403 million parameters take 6.4 GB.
        let fits = |here, ranks| fits(&sizes, batch, false, (here, ranks), 4_000_000_000);
        let said = fits(4, 4).unwrap_err().to_string();
        assert!(
            said.starts_with(
                "sizes: the run takes more memory than the 4000000000 bytes that the system allows; got "
            ),
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
