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

#[path = "../common/index_file.rs"]
mod index_file;

use index_file::{body_of, summed};

/// The default number of mutations.
const FEW: u64 = 20_000;
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
            state.insert(name, DTensor::distribute(&mesh, &x, layout)?)?;
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

/// The files of a checkpoint, with one of them mutated.
struct Files {
    names: [&'static str; 3],
    bytes: Vec<Vec<u8>>,
}

impl Files {
    /// Writes a mutation. Every other mutated header gets a right checksum in the index, so that its content is read.
    /// Returns the number of bytes that were written.
    fn write_mutated(&self, dir: &Path, seed: u64) -> usize {
        let mut random = SplitMix(seed);
        let which = if random.below(3) == 0 { 1 + random.below(2) } else { 0 };
        let bytes = mutate(&self.bytes[which], &mut random);
        if which == 0 {
            // Three of four mutated indexes get a right checksum, so that their content is read, or the format without one.
            let text = std::str::from_utf8(&self.bytes[0]).expect("the index");
            let body = mutate(body_of(text).as_bytes(), &mut random);
            let bytes = match (random.below(4), String::from_utf8(body)) {
                (0, _) | (_, Err(_)) => bytes,
                (1, Ok(body)) => format!(
                    "{{\"format\":\"isoshard checkpoint 1\",{}",
                    body.strip_prefix('{').unwrap_or_default()
                )
                .into_bytes(),
                (_, Ok(body)) => summed(&body).into_bytes(),
            };
            fs::write(dir.join(self.names[0]), &bytes).expect("writable");
            return bytes.len();
        }
        if random.below(2) == 0 {
            let text = std::str::from_utf8(&self.bytes[0]).expect("the index");
            let mut index: serde_json::Value = serde_json::from_str(body_of(text)).expect("the index");
            let header =
                bytes.get(..8).map_or(0, |len| u64::from_le_bytes(len.try_into().expect("eight bytes")));
            let end = (header.saturating_add(8)).min(bytes.len() as u64) as usize;
            let file = &mut index["files"][which - 1];
            file["header_crc32"] = crc32fast::hash(&bytes[..end]).into();
            file["bytes"] = bytes.len().into();
            fs::write(dir.join(self.names[0]), summed(&index.to_string())).expect("writable");
        }
        fs::write(dir.join(self.names[which]), &bytes).expect("writable");
        bytes.len()
    }

    fn restore(&self, dir: &Path) {
        self.names
            .iter()
            .zip(&self.bytes)
            .for_each(|(name, bytes)| fs::write(dir.join(name), bytes).expect("writable"));
    }
}

#[test]
fn mutated_checkpoints_are_refused_without_panics_or_large_allocations() {
    let root = temporary();
    let _ = fs::remove_dir_all(&root);
    let dir = root.join("saved");
    save(&dir);
    let names = ["checkpoint.json", "part-00000.safetensors", "part-00001.safetensors"];
    let bytes: Vec<Vec<u8>> = names.iter().map(|name| fs::read(dir.join(name)).expect("saved")).collect();
    let (count, seed) = (number("ISOSHARD_FUZZ", FEW), number("ISOSHARD_FUZZ_SEED", 1));
    let sum = bytes.iter().map(Vec::len).sum::<usize>();
    let (files, at) = (Files { names, bytes }, dir.clone());
    // Two ranks, so that shards begin within blocks, and ranks exchange what they have read.
    let run = move |rank: isoshard::comm::Rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
        let wanted = [
            ("model.weight", "(S0)"),
            ("model.mask", "(S0)"),
            ("model.weight", "(R)"),
            ("model.scale", "(R)"),
        ];
        let wanted = wanted.map(|(name, layout)| (name, layout.parse().expect("a layout")));
        let (mut opened, mut whole, mut both) = (0, 0, 0);
        for seed in seed..seed + count {
            let len = if rank.rank() == 0 { files.write_mutated(&at, seed) } else { 0 };
            mesh.barrier()?;
            let limit = BYTES + PER_BYTE * (len + sum);
            let (outcome, peak) =
                crate::peak_of(|| Checkpoint::open(&at).map(|saved| (saved.verify().is_ok(), saved)));
            assert!(rank.rank() != 0 || peak <= limit, "seed {seed}: {peak} bytes to open");
            if let Ok((is_whole, saved)) = outcome {
                let (loaded, peak) = crate::peak_of(|| saved.tensors(&mesh, &wanted).is_ok());
                assert!(rank.rank() != 0 || peak <= limit, "seed {seed}: {peak} bytes to load");
                both += u64::from(loaded && is_whole);
                (opened, whole) = (opened + 1, whole + u64::from(is_whole));
            }
            mesh.barrier()?;
            if rank.rank() == 0 {
                files.restore(&at);
            }
        }
        mesh.barrier()?;
        Checkpoint::open(&at)?.verify()?;
        Ok((opened, whole, both))
    };
    let (opened, whole, both) = spmd(2, run).unwrap_or_else(|e| panic!("{e}")).remove(0);
    println!(
        "{count} mutations: {opened} indexes were read, {whole} checkpoints were found whole, {both} of them loaded"
    );
    assert!(both > 0 && opened < count, "most mutations are refused, and some change nothing that counts");
    fs::remove_dir_all(root).expect("it was made here");
}
