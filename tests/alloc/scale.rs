//! The bytes and calls of one training step at the sizes that people train, by dry runs: these tests generate
//! `docs/scale.md` and compare it with the plans. `ISOSHARD_BLESS=1 cargo test --test alloc scale::` writes it.
//!
//! A cell is a model, a mesh and a number of sequences. A rank takes a step of a model of two layers and one of three;
//! the whole model's counts follow, because each further layer adds the same (a test shows it). The page has the first
//! and the last ranks along each axis. Unless it writes the page, the test runs the last rank of all, and the first for
//! one model.

use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use isoshard::Result;
use isoshard::comm::DryRun;
use isoshard::dtensor::{DTensor, DeviceMesh, Reduction};
use isoshard::nn::{Forward, Llama, LlamaConfig, Parallel, Params, Plan};
use isoshard::optim::AdamW;
use isoshard::placement::{Layout, Mesh, SumGroups};
use isoshard::tensor::DType;

use crate::scale_page;

/// The layers of the two models that are run.
const LAYERS: [usize; 2] = [2, 3];
/// The dtypes and modes, in the order of [`RankCounts`].
const MODES: [(DType, Mode); 5] = [
    (DType::BF16, Mode::Exact),
    (DType::BF16, Mode::Groups),
    (DType::BF16, Mode::Fast),
    (DType::F32, Mode::Exact),
    (DType::F32, Mode::Fast),
];
/// The modes of each table of the page, the fast one last.
const TABLES: [(&str, &[usize]); 2] = [("bf16", &[0, 1, 2]), ("f32", &[3, 4])];

/// The way in which sums are taken.
#[derive(Clone, Copy, Debug)]
enum Mode {
    Exact,
    /// In as many parts as ranks cut them, rounded to bf16: activations along tp, gradients along dp and fsdp.
    Groups,
    Fast,
}

const LLAMA_8B: LlamaConfig = LlamaConfig {
    vocabulary: 128_256,
    block: 8192,
    layers: 32,
    heads: 32,
    kv_heads: 8,
    head_width: 128,
    width: 4096,
    hidden: 14_336,
    base: 5e5,
    dropout: 0.0,
};
const LLAMA_70B: LlamaConfig = LlamaConfig { layers: 80, heads: 64, width: 8192, hidden: 28_672, ..LLAMA_8B };
/// Mixtral's sizes, with the two experts that a token visits as one dense map.
const MIXTRAL: LlamaConfig = LlamaConfig { vocabulary: 32_000, hidden: 28_672, ..LLAMA_8B };

const MODELS: [(&str, LlamaConfig); 3] = [("8B", LLAMA_8B), ("70B", LLAMA_70B), ("Mixtral", MIXTRAL)];
const MESHES: [&str; 5] = ["fsdp=8", "fsdp=64", "fsdp=8,tp=8", "dp=4,fsdp=16,tp=8", "dp=64,fsdp=32,tp=8"];
/// The sequences per rank of the data axes.
const SEQUENCES: [usize; 2] = [1, 8];

/// A model on a mesh.
#[derive(Clone, Copy, Debug)]
struct Cell {
    model: &'static str,
    config: LlamaConfig,
    mesh: &'static str,
    sequences: usize,
}

/// The collective calls of a rank's step, and the bytes that it receives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct StepCounts {
    calls: u64,
    bytes: u64,
}

/// A rank's counts, by mode.
type RankCounts = [StepCounts; MODES.len()];

impl Cell {
    fn mesh(&self) -> Mesh {
        Mesh::parse(self.mesh, 0).expect("a mesh")
    }

    /// Returns the length of an axis, 1 if the mesh lacks it.
    fn axis_len(&self, name: &str) -> usize {
        let mesh = self.mesh();
        mesh.axis(name).map_or(1, |a| mesh.axis_len(a))
    }

    fn reduction(&self, mode: Mode) -> Result<Reduction> {
        let data = self.axis_len("dp") * self.axis_len("fsdp");
        Ok(match mode {
            Mode::Exact => Reduction::Exact,
            Mode::Groups => {
                let groups = SumGroups::new(self.axis_len("tp"))?.with_gradient_parts(data)?;
                Reduction::Grouped(groups.with_wire(DType::BF16)?)
            }
            Mode::Fast => Reduction::Fast,
        })
    }

    /// Returns the first and the last ranks along each axis, the first of all first and the last of all last.
    fn corners(&self) -> Vec<usize> {
        let mesh = self.mesh();
        let is_corner = |r: &usize| {
            let coords = mesh.coords_of(*r).expect("a rank of the mesh");
            coords.iter().enumerate().all(|(a, &c)| c == 0 || c + 1 == mesh.axis_len(a))
        };
        mesh.ranks().filter(is_corner).collect()
    }

    /// Returns the counts of a step of the model with so many layers.
    fn step(&self, dry: &DryRun, mesh: &DeviceMesh, dtype: DType, layers: usize) -> Result<StepCounts> {
        let parallel = Parallel { heads: self.config.kv_heads, sequence: self.axis_len("tp") > 1 };
        let plan = Plan::transformer(mesh.mesh(), parallel)?;
        let batch = self.sequences * self.axis_len("dp") * self.axis_len("fsdp");
        let layout = plan.batch_layout(mesh.mesh());
        let mut params = Params::new(mesh, plan, 11)?;
        params.compute_in(dtype)?;
        let model = Llama::new(&mut params, LlamaConfig { layers, ..self.config })?;
        let tokens = DTensor::zeros(mesh, DType::I64, [batch, self.config.block], layout)?;
        let scale = DTensor::full(mesh, DType::F32, [], Layout::replicated(mesh.mesh().ndim()), 1.0)?;
        let before = dry.report().total();
        let mut loss = model.loss(&Forward::train_without_dropout(&params), &tokens, &tokens)?;
        let mut gradients = loss.backward()?;
        drop(loss);
        AdamW::new().betas(0.9, 0.95).decay(0.1).step(&mut params, &mut gradients, &scale, 1e-4)?;
        let after = dry.report().total();
        let (calls, bytes) = (after.calls - before.calls, after.received_bytes - before.received_bytes);
        Ok(StepCounts { calls, bytes })
    }

    /// Returns a rank's counts in steps of the whole model.
    fn counts(&self, rank: usize) -> Result<RankCounts> {
        let dry = DryRun::new(self.mesh().rank_len(), rank)?;
        let mesh = DeviceMesh::parse(&dry.rank()?, self.mesh)?;
        let mut counts = RankCounts::default();
        for (counts, (dtype, mode)) in counts.iter_mut().zip(MODES) {
            mesh.set_reduction(self.reduction(mode)?);
            let [few, more] = LAYERS.map(|layers| self.step(&dry, &mesh, dtype, layers));
            *counts = extended(few?, more?, self.config.layers);
        }
        Ok(counts)
    }

    /// Returns the bytes that each rank receives by the published schemes; the page says which.
    fn formula(&self, dtype: DType) -> f64 {
        let LlamaConfig { vocabulary, block, layers, heads, kv_heads, head_width, width, hidden, .. } =
            self.config;
        let [d, n, t] = ["dp", "fsdp", "tp"].map(|axis| self.axis_len(axis) as f64);
        let others = |ranks: f64| (ranks - 1.0) / ranks;
        let of_block = width * head_width * (2 * heads + 2 * kv_heads) + 3 * width * hidden;
        let maps = (layers * of_block + 2 * vocabulary * width) as f64;
        let norms = ((2 * layers + 1) * width) as f64;
        let held = maps / t + norms;
        let tokens = (self.sequences * block) as f64;
        let activations = (8 * layers + 4) as f64 * tokens * width as f64;
        let elements =
            3.0 * others(n) * held + 2.0 * others(d) * held / n + others(t) * (activations + 2.0 * norms);
        elements * dtype.size_bytes() as f64 + 6.0 * others(t) * tokens * DType::F32.size_bytes() as f64
    }
}

/// Returns the counts of a model of `layers` from those of models of [`LAYERS`].
fn extended(few: StepCounts, more: StepCounts, layers: usize) -> StepCounts {
    let of = |few: u64, more: u64| few + (layers - LAYERS[0]) as u64 * (more - few);
    StepCounts { calls: of(few.calls, more.calls), bytes: of(few.bytes, more.bytes) }
}

fn cells() -> Vec<Cell> {
    let of_model = |(model, config)| {
        let of_mesh = move |mesh| SEQUENCES.map(move |sequences| Cell { model, config, mesh, sequences });
        MESHES.into_iter().flat_map(of_mesh)
    };
    MODELS.into_iter().flat_map(of_model).collect()
}

/// Returns the counts of all ranks that `ranks` names, per cell. Several threads share the cells.
fn run(cells: &[Cell], ranks: impl Fn(&Cell) -> Vec<usize> + Sync) -> Vec<Vec<RankCounts>> {
    let all: Mutex<Vec<Vec<RankCounts>>> = Mutex::new(vec![Vec::new(); cells.len()]);
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(cell) = cells.get(next.fetch_add(1, Ordering::Relaxed)) {
            let counts = |rank| cell.counts(rank).unwrap_or_else(|e| panic!("{cell:?}, rank {rank}: {e}"));
            let counts = ranks(cell).into_iter().map(counts).collect();
            let nth = cells.iter().position(|other| std::ptr::eq(other, cell)).expect("it is from there");
            all.lock().expect("no thread panics with it")[nth] = counts;
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    all.into_inner().expect("no thread panics with it")
}

/// The numbers of a cell.
struct CellRow {
    cell: Cell,
    calls: [u64; MODES.len()],
    /// Least, mean and most gigabytes, by mode.
    gigabytes: [[f64; 3]; MODES.len()],
}

/// A limit of the page.
struct Limit {
    name: &'static str,
    most: f64,
    of: fn(&CellRow) -> f64,
    above: &'static [Reason],
}

/// Cells that are above a limit, and why.
type Reason = (fn(&Cell) -> bool, &'static str);

const LIMITS: [Limit; 5] = [
    Limit {
        name: "the rank that receives most, over the mean",
        most: 1.02,
        of: CellRow::imbalance,
        above: &[],
    },
    Limit { name: "fast mode over the formula", most: 1.05, of: CellRow::fast_over_formula, above: &[] },
    Limit { name: "exact mode over fast mode, f32", most: 1.05, of: |row| row.over_fast(3, 4), above: &[] },
    Limit { name: "groups over fast mode, bf16", most: 1.05, of: |row| row.over_fast(1, 2), above: &[] },
    Limit {
        name: "exact mode over fast mode, bf16",
        most: 1.05,
        of: |row| row.over_fast(0, 2),
        above: &[(
            |_| true,
            "Parts of a sum stay f32 until the sum is whole, so that it is rounded once:\n  each reduction receives twice \
             the bytes of fast mode's, which rounds parts to bf16. Gathers are equal.",
        )],
    },
];

impl CellRow {
    fn new(cell: Cell, ranks: &[RankCounts]) -> CellRow {
        let bytes = |mode: usize| ranks.iter().map(move |counts| counts[mode].bytes);
        let of_mode = |mode| {
            let (least, most) = (bytes(mode).min().expect("a rank"), bytes(mode).max().expect("a rank"));
            let mean = bytes(mode).sum::<u64>() as f64 / ranks.len() as f64;
            [least as f64, mean, most as f64].map(|bytes| bytes / 1e9)
        };
        let modes = [0, 1, 2, 3, 4];
        CellRow { cell, calls: modes.map(|mode| ranks[0][mode].calls), gigabytes: modes.map(of_mode) }
    }

    fn mean(&self, mode: usize) -> f64 {
        self.gigabytes[mode][1]
    }

    fn imbalance(&self) -> f64 {
        self.gigabytes.iter().map(|[_, mean, most]| most / mean).fold(0.0, f64::max)
    }

    fn fast_over_formula(&self) -> f64 {
        let ratio = |mode: usize| self.mean(mode) * 1e9 / self.cell.formula(MODES[mode].0);
        ratio(2).max(ratio(4))
    }

    fn over_fast(&self, mode: usize, fast: usize) -> f64 {
        self.mean(mode) / self.mean(fast)
    }

    /// Returns the line of the table for these modes.
    fn line(&self, modes: &[usize]) -> String {
        let Cell { model, mesh, sequences, .. } = self.cell;
        let mut line = format!("| {model} | `{mesh}` | {sequences} |");
        for &mode in modes {
            let [least, mean, most] = self.gigabytes[mode];
            write!(line, " {} | {least:.2} | {mean:.2} | {most:.2} |", self.calls[mode]).expect("text");
        }
        let (fast, others) = modes.split_last().expect("a table has modes");
        let formula = self.cell.formula(MODES[*fast].0) / 1e9;
        write!(line, " {formula:.2} | {:.3} |", self.mean(*fast) / formula).expect("text");
        for &mode in others {
            write!(line, " {:.3} |", self.over_fast(mode, *fast)).expect("text");
        }
        line
    }
}

const INTRO: &str = "\
# Bytes and calls of a training step, at scale

*Written by `tests/alloc/scale.rs` and `tests/alloc/fsdp_scale.rs`, which compare this page with dry runs:
`ISOSHARD_BLESS=1 cargo test --test alloc scale::` writes it.*

A step is a forward pass, a backward pass and AdamW, with gradients in the layouts of the parameters, on sequences of 8,192 tokens, without
recomputation and clipping. Parameters are stored in f32, and computed with in bf16 or in f32.

| model | layers | width | heads, of keys and values | hidden | vocabulary |
|---|--:|--:|--:|--:|--:|
| 8B: Llama 3 | 32 | 4096 | 32, 8 | 14336 | 128256 |
| 70B: Llama 3 | 80 | 8192 | 64, 8 | 28672 | 128256 |
| Mixtral: a dense stand-in, whose hidden width is that of the two experts that a token visits | 32 | 4096 | 32, 8 | 28672 | 32000 |

*Sequences* are those of each rank of the data axes (`dp`, `fsdp`). Meshes with `tp` have sequence parallelism. The last mesh has 16,384
ranks. Layouts come from `Plan::transformer`, and no layer is left out: each layer beyond the second adds the same bytes and calls.

## The formula

Published schemes move the following; each rank receives the part that it lacks, which is `(n - 1) / n` of the whole on `n` ranks.

- **FSDP** (ZeRO-3: Rajbhandari et al. 2020, arXiv 1910.02054, §7.2.2): a parameter is gathered for the forward pass and for the backward
  pass, and its gradient is reduce-scattered: 3 times its bytes on the other axes. Over `dp`, a ring all-reduce of the gradient's shard
  receives 2 times the shard.
- **Tensor parallelism with sequence parallelism** (Korthikanti et al. 2022, arXiv 2205.05198, §4.2.2): attention and MLP each gather their
  input and reduce-scatter their result, and the backward pass does the reverse. A layer moves 4 activations forward and 4 backward, of
  `sequences x 8192 x width` elements each. The paper gathers two more per layer in the backward pass, since it drops gathered inputs;
  here they are kept, and the formula leaves them out.
- **The vocabulary's parts** (Shoeybi et al. 2019, arXiv 1909.08053, §3): the embedding's result is reduce-scattered and the head's input
  gathered, and the reverse: 4 activations. The loss all-reduces a maximum, a sum and a logit per token, in f32.
- **Gradients of norms**, which the ranks of `tp` share, are all-reduced.

Here, the last block's parameters and those of the root (both tables, the last norm) are still held when the backward pass begins, and
are gathered once. So pure FSDP receives less than the formula.

## The table

Gigabytes (1e9) that a rank receives. *Least*, *mean* and *most* are over the ranks that are first or last along each axis. *Calls* are
collective calls. A layer's parameters are gathered by one call; their gradients are reduced one by one. A layer on `fsdp=8,tp=8` makes 18
calls: 8 for activations, 2 gathers and 6 reduce-scatters of its 6 parameters, and 2 gathers of its norms' gradients. With 8 sequences,
exact mode and groups make 2 more a layer for 70B.

*Groups* are sums in parts that the program declares ([exactness](exactness.md#groups)): as many parts as `tp` has ranks, and for gradients of
parameters as many as `dp` and `fsdp` together, rounded to bf16. Every mesh whose axes divide these numbers has the same bits.

";

/// Returns the page.
fn page(rows: &[CellRow]) -> String {
    let mut page = INTRO.to_string();
    for (title, modes) in TABLES {
        writeln!(page, "### Computed in {title}\n").expect("text");
        let name = |&mode: &usize| format!("{:?}", MODES[mode].1).to_lowercase();
        page.push_str("| model | mesh | sequences |");
        for mode in modes {
            write!(page, " {}: calls | least | mean | most |", name(mode)).expect("text");
        }
        page.push_str(" formula | fast / formula |");
        for mode in &modes[..modes.len() - 1] {
            write!(page, " {} / fast |", name(mode)).expect("text");
        }
        writeln!(page, "\n|---|---|{}", "--:|".repeat(2 + 5 * modes.len())).expect("text");
        rows.iter().for_each(|row| writeln!(page, "{}", row.line(modes)).expect("text"));
        page.push('\n');
    }
    page.push_str("## Limits\n\n");
    for limit in &LIMITS {
        let most = rows.iter().map(limit.of).fold(0.0, f64::max);
        writeln!(page, "- **{}**: at most {:.2}; the most is {most:.3}.", limit.name, limit.most)
            .expect("text");
        for (above, reason) in limit.above {
            let of_reason: Vec<&CellRow> = rows.iter().filter(|row| above(&row.cell)).collect();
            let list: Vec<String> = match of_reason.len() == rows.len() {
                true => vec!["All cells are above".into()],
                false => of_reason.iter().map(|row| row.cell.to_string()).collect(),
            };
            writeln!(page, "  {}. {reason}", list.join("; ")).expect("text");
        }
    }
    page
}

impl std::fmt::Display for Cell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} on `{}` with {}", self.model, self.mesh, self.sequences)
    }
}

#[test]
fn the_page_shows_the_plans() {
    let cells = cells();
    let blesses = scale_page::blesses();
    let ranks = |cell: &Cell| {
        let corners = cell.corners();
        let (first, last) = (corners[0], corners[corners.len() - 1]);
        match cell.model {
            _ if blesses => corners,
            "8B" => vec![first, last],
            _ => vec![last],
        }
    };
    let rows: Vec<CellRow> =
        cells.iter().zip(run(&cells, ranks)).map(|(cell, ranks)| CellRow::new(*cell, &ranks)).collect();
    let page = page(&rows);
    for limit in &LIMITS {
        for row in &rows {
            let listed = limit.above.iter().any(|(above, _)| above(&row.cell));
            let ratio = (limit.of)(row);
            assert_eq!(ratio > limit.most, listed, "{}: {} has {ratio:.4}", limit.name, row.cell);
        }
    }
    scale_page::check(0, &page);
}

/// Each layer beyond the second adds the same, so the counts of two small models give those of the whole one.
#[test]
fn each_layer_adds_the_same() {
    for mesh in MESHES {
        let cell = Cell { model: "8B", config: LLAMA_8B, mesh, sequences: 1 };
        let last = *cell.corners().last().expect("a rank");
        let dry = DryRun::new(cell.mesh().rank_len(), last).unwrap();
        let device_mesh = DeviceMesh::parse(&dry.rank().unwrap(), mesh).unwrap();
        let step = |layers| cell.step(&dry, &device_mesh, DType::BF16, layers).unwrap();
        let [few, more] = LAYERS.map(step);
        for layers in [5, cell.config.layers] {
            assert_eq!(step(layers), extended(few, more, layers), "{layers} layers on {mesh}");
        }
    }
}
