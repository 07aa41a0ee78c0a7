//! Mutated checkpoints: the reader may not panic, nor take more memory than the files' length accounts for.
//!
//! `ISOSHARD_FUZZ` sets the number of mutations (`tests/complete.sh` tries ten million), `ISOSHARD_FUZZ_SEED` the first
//! seed.

use std::fs;
use std::path::{Path, PathBuf};

use isoshard::checkpoint::{self, Checkpoint, StateTree};
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::tensor::{DType, Shape};
use isoshard::testing::values::{SplitMix, small_ints};

/// The default number of mutations.
const FEW: u64 = 50_000;
/// The memory that reading a checkpoint may take, plus [`PER_BYTE`] per byte of its files. A JSON value of two
/// characters takes 32 bytes, in lists that double.
const BYTES: usize = 64 << 10;
const PER_BYTE: usize = 64;

/// The index and the two files of tensors of a small checkpoint.
fn save(dir: &Path) {
    let dir = dir.to_path_buf();
    let run = move |rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
        let mut state = StateTree::new();
        for (name, dtype, shape, layout) in [
            ("model.weight", DType::F32, Shape::from([5, 3]), "(S0)"),
            ("model.mask", DType::Bool, Shape::from([4]), "(S0)"),
            ("model.scale", DType::BF16, Shape::from([]), "(R)"),
        ] {
            let x = small_ints(dtype, &shape, 7);
            state.insert(name, DTensor::distribute(&mesh, &x, layout.parse()?)?)?;
        }
        state.insert_value("data", serde_json::json!({ "epoch": 3, "seeds": [1, 2.5, null, "x"] }))?;
        checkpoint::save(&mesh, &dir, &state)
    };
    spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
}

/// Changes, removes, repeats or inserts bytes; now and then puts a large number or deep nesting in their place.
fn mutate(bytes: &[u8], random: &mut SplitMix) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..1 + random.below(3) {
        let at = random.below(bytes.len().max(1)).min(bytes.len());
        let end = (at + 1 + random.below(12)).min(bytes.len());
        match random.below(7) {
            0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            1 if at < bytes.len() => bytes[at] = random.next_u64() as u8,
            2 => drop(bytes.drain(at..end)),
            3 => {
                let again = bytes[at..end].to_vec();
                bytes.splice(at..at, again);
            }
            4 => {
                const NUMBERS: [&[u8]; 6] =
                    [b"18446744073709551615", b"-1", b"9223372036854775808", b"1e400", b"0", b"4294967296"];
                bytes.splice(at..end, random.pick(&NUMBERS).iter().copied());
            }
            5 => {
                const TEXTS: [&[u8]; 5] =
                    [b"[[[[[[[[", b"{\"a\":{\"a\":{\"a\":", b"\"\\u0000", b"../../etc", b"[],"];
                let text = random.pick(&TEXTS).repeat(1 + random.below(40));
                bytes.splice(at..end, text);
            }
            _ => bytes.truncate(at),
        }
    }
    bytes
}

fn temporary() -> PathBuf {
    // In memory, if there is such a file system: ten million files are written.
    let memory = Path::new("/dev/shm");
    let root = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
    root.join(format!("isoshard-fuzz-{}", std::process::id()))
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |text| text.parse().expect("a number"))
}

#[test]
fn mutated_checkpoints_are_refused_without_panics_or_large_allocations() {
    let root = temporary();
    let _ = fs::remove_dir_all(&root);
    let dir = root.join("saved");
    save(&dir);
    let names = ["checkpoint.json", "part-00000.safetensors", "part-00001.safetensors"];
    let files: Vec<Vec<u8>> = names.iter().map(|name| fs::read(dir.join(name)).expect("saved")).collect();
    let (count, seed) = (number("ISOSHARD_FUZZ", FEW), number("ISOSHARD_FUZZ_SEED", 1));
    let (mut opened, mut whole) = (0, 0);
    for seed in seed..seed + count {
        let mut random = SplitMix(seed);
        // The index has more to say than headers, whose checksums it has.
        let which = if random.below(8) == 0 { 1 + random.below(2) } else { 0 };
        let bytes = mutate(&files[which], &mut random);
        fs::write(dir.join(names[which]), &bytes).expect("writable");
        let limit = BYTES + PER_BYTE * (bytes.len() + files.iter().map(Vec::len).sum::<usize>());
        let (outcome, peak) = crate::peak_of(|| {
            let saved = Checkpoint::open(&dir)?;
            Ok::<_, isoshard::Error>(saved.verify().is_ok())
        });
        assert!(peak <= limit, "seed {seed}: {peak} bytes for {} in {}", bytes.len(), names[which]);
        opened += u64::from(outcome.is_ok());
        whole += u64::from(outcome.is_ok_and(|whole| whole));
        fs::write(dir.join(names[which]), &files[which]).expect("writable");
    }
    assert!(Checkpoint::open(&dir).and_then(|saved| saved.verify()).is_ok(), "the files are as they were");
    println!("{count} mutations: {opened} indexes were read, {whole} checkpoints were found whole");
    assert!(opened < count / 2, "most mutations are refused");
    fs::remove_dir_all(root).expect("it was made here");
}
