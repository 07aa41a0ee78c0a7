//! Saving and loading a sharded checkpoint of 1.08 GB, beside plain files with as many bytes.
//!
//! `cargo bench --bench checkpoint -- [--json] [DIR] [rounds]`. The model has the sizes of a GPT with 12 layers, width
//! 768, vocabulary 3072 with a head of its own and 512 positions: 90.1M f32 (360 MB), and two AdamW moments each (721
//! MB). Two ranks under FSDP. Each round times, from barrier to barrier: an asynchronous save until it returns and until
//! it is whole, the next update in place after it (its memory is shared with the snapshot), a save, a load, a load by one
//! rank, and half of the bytes per rank written to and read from plain files. `DIR` is where to write; a folder in memory
//! (`/dev/shm`) compares programs, a disk varies.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use isoshard::Result;
use isoshard::checkpoint::{CheckpointFolder, StateTree};
use isoshard::comm::{Rank, spmd};
use isoshard::dtensor::DeviceMesh;
use isoshard::nn::{Params, Plan};
use isoshard::rng::Init;

/// The tensors of a model and its moments, as parameters.
fn declare(mesh: &DeviceMesh, prefix: &str, init: Init) -> Result<Params> {
    let mut params = Params::new(mesh, Plan::default().fsdp("fsdp"), 7)?;
    let mut root = params.root();
    let mut scope = root.child(prefix);
    scope.param("wte", [3072, 768], init)?;
    scope.param("wpe", [512, 768], init)?;
    for layer in 0..12 {
        let mut h = scope.child("h");
        let mut block = h.child(layer);
        block.param("qkv", [3 * 768, 768], init)?;
        block.param("out", [768, 768], init)?;
        block.param("up", [3072, 768], init)?;
        block.param("down", [768, 3072], init)?;
        block.param("norm_1", [768], init)?;
        block.param("norm_2", [768], init)?;
    }
    scope.param("norm", [768], init)?;
    scope.param("head", [3072, 768], init)?;
    Ok(params)
}

fn state(trees: &[Params]) -> Result<StateTree> {
    let mut state = StateTree::new();
    trees
        .iter()
        .zip(["model", "first", "second"])
        .try_for_each(|(p, name)| state.insert_tree(name, p.state()?))?;
    Ok(state)
}

fn trees(mesh: &DeviceMesh) -> Result<Vec<Params>> {
    let normal = Init::Normal { mean: 0.0, std: 1.0 };
    ["a", "b", "c"].iter().map(|name| declare(mesh, name, normal)).collect()
}

/// Times a call, from barrier to barrier.
fn timed<T>(
    mesh: &DeviceMesh,
    rows: &mut Vec<(&'static str, f64)>,
    name: &'static str,
    f: impl FnOnce() -> Result<T>,
) -> Result<T> {
    mesh.barrier()?;
    let begin = Instant::now();
    let result = f()?;
    mesh.barrier()?;
    rows.push((name, begin.elapsed().as_secs_f64() * 1e3));
    Ok(result)
}

fn plain_write(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || {
        let mut file = File::create(path)?;
        bytes.chunks(16 << 20).try_for_each(|part| file.write_all(part))?;
        file.sync_all()
    };
    write().map_err(isoshard::Error::other)
}

fn plain_read(path: &Path, bytes: &mut [u8]) -> Result<()> {
    let mut read = || {
        let mut file = File::open(path)?;
        bytes.chunks_mut(16 << 20).try_for_each(|part| file.read_exact(part))
    };
    read().map_err(isoshard::Error::other)
}

fn ranks(rank: &Rank, root: &Path, rounds: usize) -> Result<Vec<(&'static str, f64)>> {
    let mesh = DeviceMesh::new(rank, &[("fsdp", rank.world_len())])?;
    let mut trees = trees(&mesh)?;
    let mut rows = Vec::new();
    let bytes: usize = 4 * trees.iter().map(Params::numel).sum::<usize>() / rank.world_len();
    let mut buffer = vec![1u8; bytes];
    for round in 0..rounds as u64 {
        let dir = root.join(format!("round-{round}"));
        let mut folder = CheckpointFolder::new(&dir);
        let begin = Instant::now();
        timed(&mesh, &mut rows, "async save: stall until it returns", || {
            folder.save_async(&mesh, 1, &state(&trees)?)
        })?;
        folder.wait(&mesh)?;
        mesh.barrier()?;
        rows.push(("async save: whole", begin.elapsed().as_secs_f64() * 1e3));
        timed(&mesh, &mut rows, "save", || folder.save(&mesh, 2, &state(&trees)?))?;
        let (_, saved) = folder.newest(&mesh)?.expect("just saved");
        timed(&mesh, &mut rows, "load", || {
            trees
                .iter_mut()
                .zip(["model", "first", "second"])
                .try_for_each(|(p, name)| p.load_state(&saved.subtree(name)))
        })?;
        let path = root.join(format!("plain-{}", rank.rank()));
        timed(&mesh, &mut rows, "plain files: write and fsync", || plain_write(&path, &buffer))?;
        timed(&mesh, &mut rows, "plain files: read", || plain_read(&path, &mut buffer))?;
        fs::remove_file(&path).map_err(isoshard::Error::other)?;
        mesh.barrier()?;
        if rank.rank() == 0 && round + 1 < rounds as u64 {
            fs::remove_dir_all(&dir).map_err(isoshard::Error::other)?;
        }
        mesh.barrier()?;
    }
    Ok(rows)
}

fn one_rank(rank: &Rank, root: &Path, rounds: usize) -> Result<Vec<(&'static str, f64)>> {
    let mesh = DeviceMesh::new(rank, &[("fsdp", 1)])?;
    let mut trees = trees(&mesh)?;
    let folder = CheckpointFolder::new(root.join(format!("round-{}", rounds - 1)));
    let mut rows = Vec::new();
    for _ in 0..rounds {
        let (_, saved) = folder.newest(&mesh)?.expect("the ranks saved");
        timed(&mesh, &mut rows, "load, 2 ranks to 1", || {
            trees
                .iter_mut()
                .zip(["model", "first", "second"])
                .try_for_each(|(p, name)| p.load_state(&saved.subtree(name)))
        })?;
    }
    Ok(rows)
}

fn main() {
    let mut args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let json = args.iter().position(|arg| arg == "--json").map(|at| args.remove(at)).is_some();
    let root = args.first().map_or_else(std::env::temp_dir, PathBuf::from);
    let rounds: usize = args.get(1).map_or(5, |text| text.parse().expect("a number of rounds"));
    let root = root.join(format!("isoshard-bench-{}", std::process::id()));
    let (two, one) = (root.clone(), root.clone());
    let rows = spmd(2, move |rank| ranks(&rank, &two, rounds)).unwrap_or_else(|e| panic!("{e}")).remove(0);
    let more = spmd(1, move |rank| one_rank(&rank, &one, rounds)).unwrap_or_else(|e| panic!("{e}")).remove(0);
    fs::remove_dir_all(&root).expect("made here");
    let mut names: Vec<&str> = Vec::new();
    rows.iter().chain(&more).for_each(|(name, _)| {
        if !names.contains(name) {
            names.push(name);
        }
    });
    for name in names {
        let mut times: Vec<f64> =
            rows.iter().chain(&more).filter(|(other, _)| *other == name).map(|(_, ms)| *ms).collect();
        times.sort_by(f64::total_cmp);
        let (best, median, worst) = (times[0], times[times.len() / 2], times[times.len() - 1]);
        match json {
            true => println!(
                "{}",
                serde_json::json!({ "name": name, "median_ms": median, "best_ms": best, "worst_ms": worst })
            ),
            false => println!("{name:40} {median:8.1} ms [{best:.1} .. {worst:.1}]"),
        }
    }
}
