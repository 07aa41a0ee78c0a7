//! Saving and loading a sharded checkpoint of 1.08 GB, beside plain files with as many bytes.
//!
//! `cargo bench --bench checkpoint -- [--json] [DIR] [rounds]`. The model has the sizes of a GPT with 12 layers, width
//! 768, vocabulary 3072 with a head of its own and 512 positions: 90.1M f32 (360 MB), and two AdamW moments each (721
//! MB). Two ranks under FSDP. Each round times, from barrier to barrier: an asynchronous save until it returns and until
//! it is whole, an optimizer's step before it and after it (which cannot update in place then), a save, a load, a load by one
//! rank, and half of the bytes per rank written to and read from plain files. `DIR` is where to write; a folder in memory
//! (`/dev/shm`) compares programs, a disk varies.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use isoshard::Result;
use isoshard::checkpoint::{Checkpoint, CheckpointFolder, StateTree};
use isoshard::comm::{Rank, spmd};
use isoshard::dtensor::{DeviceMesh, Gradients};
use isoshard::nn::{ParamId, Params, Plan};
use isoshard::optim::{AdamW, Optimizer};
use isoshard::rng::Init;

/// A model's parameters and their moments.
struct Trained {
    params: Params,
    optimizer: Optimizer<AdamW>,
}

impl Trained {
    fn new(mesh: &DeviceMesh) -> Result<Trained> {
        let mut params = Params::new(mesh, Plan::default().fsdp("fsdp"), 7)?;
        let mut root = params.root();
        let init = Init::Normal { mean: 0.0, std: 1.0 };
        root.param("wte", [3072, 768], init)?;
        root.param("wpe", [512, 768], init)?;
        let mut h = root.child("h");
        for layer in 0..12 {
            let mut block = h.child(layer);
            block.param("qkv", [3 * 768, 768], init)?;
            block.param("out", [768, 768], init)?;
            block.param("up", [3072, 768], init)?;
            block.param("down", [768, 3072], init)?;
            block.param("norm_1", [768], init)?;
            block.param("norm_2", [768], init)?;
        }
        root.param("norm", [768], init)?;
        root.param("head", [3072, 768], init)?;
        let mut trained = Trained { params, optimizer: AdamW::new().betas(0.9, 0.95).decay(0.1).rate(1e-3) };
        let gradients = &mut trained.gradients()?;
        trained.optimizer.step(&mut trained.params, gradients)?;
        Ok(trained)
    }

    fn gradients(&self) -> Result<Gradients> {
        let ids: Vec<ParamId> = self.params.ids().collect();
        let sums = ids.iter().map(|&id| self.params.value(id).sum_all()).collect::<Result<Vec<_>>>()?;
        let mut total = sums[1..].iter().try_fold(sums[0].clone(), |total, sum| total.add(sum))?;
        total.backward()
    }

    fn state(&self) -> Result<StateTree> {
        let mut state = StateTree::new();
        state.insert_tree("model", self.params.state()?)?;
        state.insert_tree("optimizer", self.optimizer.state(&self.params)?)?;
        Ok(state)
    }

    fn load(&mut self, saved: &Checkpoint) -> Result<()> {
        self.params.load_state(&saved.subtree("model"))?;
        self.optimizer.load_state(&self.params, &saved.subtree("optimizer"))
    }
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
    let mut trained = Trained::new(&mesh)?;
    let mut rows = Vec::new();
    let bytes = 3 * 4 * trained.params.numel() / rank.world_len();
    let mut buffer = vec![1u8; bytes];
    for round in 0..rounds as u64 {
        let dir = root.join(format!("round-{round}"));
        let mut folder = CheckpointFolder::new(&dir);
        let mut gradients = trained.gradients()?;
        timed(&mesh, &mut rows, "AdamW step", || {
            trained.optimizer.step(&mut trained.params, &mut gradients)
        })?;
        let mut gradients = trained.gradients()?;
        let begin = Instant::now();
        timed(&mesh, &mut rows, "async save: stall until it returns", || {
            folder.save_async(&mesh, 1, &trained.state()?)
        })?;
        timed(&mesh, &mut rows, "AdamW step while its files are written", || {
            trained.optimizer.step(&mut trained.params, &mut gradients)
        })?;
        folder.wait(&mesh)?;
        mesh.barrier()?;
        rows.push(("async save: whole", begin.elapsed().as_secs_f64() * 1e3));
        timed(&mesh, &mut rows, "save", || folder.save(&mesh, 2, &trained.state()?))?;
        let (_, saved) = folder.newest(&mesh)?.expect("just saved");
        timed(&mesh, &mut rows, "load", || trained.load(&saved))?;
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
    let mut trained = Trained::new(&mesh)?;
    let mut folder = CheckpointFolder::new(root.join(format!("round-{}", rounds - 1)));
    let mut rows = Vec::new();
    for _ in 0..rounds {
        let (_, saved) = folder.newest(&mesh)?.expect("the ranks saved");
        timed(&mesh, &mut rows, "load, 2 ranks to 1", || trained.load(&saved))?;
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
