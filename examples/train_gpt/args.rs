//! The command line.

use std::ops::Range;
use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use isoshard::Error;
use isoshard::nn::{GptConfig, LlamaConfig, Parallel, Plan};
use isoshard::placement::Mesh;
use isoshard::tensor::{DType, Device};

use crate::model::Sizes;

/// Trains a small GPT (or Llama) on text, character by character, on any mesh of ranks.
///
/// Ranks are threads of this process, or with --engine mpi the processes that mpirun starts. The mesh decides who computes what, never what is computed: initial values,
/// batches and dropout depend on the seed alone.
#[derive(Clone, Debug, Parser)]
#[command(name = "train_gpt", version)]
pub struct Args {
    /// UTF-8 text to train on, or a directory of such files; without it, this repository's own text.
    ///
    /// Its characters are the vocabulary. The last tenth is kept for validation.
    #[arg(long, value_name = "FILE")]
    pub data: Option<PathBuf>,

    /// What to train.
    #[arg(long, value_enum, default_value = "gpt", value_name = "NAME")]
    pub model: ModelName,
    /// Sizes that --layers, --heads, --width, --block, --batch and so on then override.
    #[arg(long, value_enum, default_value = "nano", value_name = "NAME")]
    pub config: Config,
    /// Transformer blocks.
    #[arg(long, value_parser = positive, value_name = "N")]
    pub layers: Option<usize>,
    /// Attention heads; they divide the width, unless --head-width is given.
    #[arg(long, value_parser = positive, value_name = "N")]
    pub heads: Option<usize>,
    /// The width of the residual stream.
    #[arg(long, value_parser = positive, value_name = "N")]
    pub width: Option<usize>,
    /// Heads of keys and values of a Llama; they divide the heads.
    #[arg(long, value_parser = positive, value_name = "N")]
    pub kv_heads: Option<usize>,
    /// The width of a Llama's heads, an even number; without it, width / heads.
    #[arg(long, value_parser = positive, value_name = "N")]
    pub head_width: Option<usize>,
    /// The hidden width of a Llama's MLPs; without it, 8/3 of the width, rounded up to a multiple of 32.
    #[arg(long, value_parser = positive, value_name = "N")]
    pub hidden: Option<usize>,
    /// The number of characters the model sees at once.
    #[arg(long, value_parser = positive, value_name = "N")]
    pub block: Option<usize>,
    /// Sequences in a micro-batch, over all ranks together.
    #[arg(long, value_parser = positive, value_name = "N")]
    pub batch: Option<usize>,

    /// Axes and their ranks: dp, fsdp, tp, e.g. fsdp=4 or dp=2,tp=2; 1 for a single rank.
    #[arg(long, value_parser = mesh, default_value = "fsdp=2", value_name = "AXES")]
    pub mesh: String,
    /// Shard activations between tensor-parallel parts along the sequence. Changes nothing without a tp axis.
    #[arg(long)]
    pub sequence_parallel: bool,
    /// What ranks are, and how they talk.
    #[arg(long, value_enum, default_value = "threads", value_name = "NAME")]
    pub engine: EngineName,
    /// Let processes meet without a secret also where others can reach them: whoever does may take a rank's place. Without this
    /// they want ISOSHARD_TOKEN or ISOSHARD_TOKEN_FILE there.
    #[arg(long)]
    pub insecure_rendezvous: bool,
    /// With --engine dry: the number of ranks in the world, where it is not the mesh's.
    #[arg(long, value_name = "N")]
    pub world: Option<usize>,
    /// With --engine dry: the rank that is counted.
    #[arg(long, default_value_t = 0, value_name = "R")]
    pub rank: usize,
    /// Where ranks compute: cpu, cuda (the first device, which the ranks share) or cuda:N. Exact results are the same.
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    pub device: Device,
    /// What the model computes in. Parameters, their gradients and the optimizer's state are f32.
    #[arg(long, value_enum, default_value = "f32", value_name = "DTYPE")]
    pub dtype: Compute,
    /// How sums that ranks share are taken.
    #[arg(long, value_enum, default_value = "exact", value_name = "HOW")]
    pub reduction: ReductionName,
    /// Micro-batches whose gradients are averaged for a step.
    #[arg(long, value_parser = positive, default_value_t = 1, value_name = "K")]
    pub accumulate: usize,

    /// Training steps.
    #[arg(long, default_value_t = 900, value_name = "N")]
    pub steps: usize,
    /// The learning rate after the warm-up.
    #[arg(long, value_parser = rate, default_value_t = 1e-3, value_name = "RATE")]
    pub lr: f64,
    /// The learning rate at the end of the cosine.
    #[arg(long, value_parser = rate, default_value_t = 1e-4, value_name = "RATE")]
    pub min_lr: f64,
    /// Steps of linear warm-up.
    #[arg(long, default_value_t = 50, value_name = "N")]
    pub warmup: usize,
    /// The probability of dropping embeddings, attention probabilities and the blocks' outputs.
    #[arg(long, value_parser = probability, default_value_t = 0.0, value_name = "P")]
    pub dropout: f64,
    /// AdamW's decoupled weight decay, of matrices only.
    #[arg(long, value_parser = rate, default_value_t = 0.1, value_name = "RATE")]
    pub weight_decay: f64,
    /// Every so many steps, compare replicas of parameters and look for gradients that are no number; 0 for never.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub check: usize,
    /// The largest global norm of the gradients; 0 for no limit.
    #[arg(long, value_parser = rate, default_value_t = 1.0, value_name = "NORM")]
    pub clip: f64,
    /// The seed of initial values, batches, dropout and the sample.
    #[arg(long, default_value_t = 1337, value_name = "S")]
    pub seed: u64,

    /// Steps between evaluations; there is one after the last step, too.
    #[arg(long, value_parser = positive, default_value_t = 300, value_name = "N")]
    pub eval_every: usize,
    /// Batches of an evaluation, the same ones every time.
    #[arg(long, value_parser = positive, default_value_t = 10, value_name = "N")]
    pub eval_batches: usize,

    /// Print JSON lines on standard output instead of progress and sample.
    #[arg(long)]
    pub json: bool,

    /// Panic on this rank at this step, to see what becomes of the others.
    #[arg(long, hide = true, value_parser = step_and_rank, value_name = "STEP:RANK")]
    pub fail_at: Option<(usize, usize)>,
}

/// What to train.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ModelName {
    /// Learned positions, layer norms, GELU, a head tied to the token table.
    Gpt,
    /// Rotary positions, root-mean-square norms, gated SiLU, grouped heads, a head of its own.
    Llama,
}

/// What ranks are, and how they talk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EngineName {
    /// Threads of this process, as many as the mesh has ranks.
    Threads,
    /// Processes on CPUs, which mpirun or srun starts, as many as the mesh has ranks.
    Mpi,
    /// A GPU a rank: threads of this process, or processes where a launcher starts it.
    Nccl,
    /// One rank's plan without data: not built.
    Dry,
}

/// How sums that ranks share are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ReductionName {
    /// Every mesh gives the bits of one rank.
    Exact,
    /// Right up to rounding, which differs from mesh to mesh.
    Fast,
}

/// What a model computes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Compute {
    /// 24 bits of precision.
    F32,
    /// 8 bits of precision: parameters are rounded where they are used, and activations are.
    Bf16,
}

/// Named sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Config {
    /// 4 layers, 4 heads (a Llama's in 2 groups), width 128, block 64, batch 12.
    Nano,
    /// 6 layers, 6 heads (in 2 groups), width 384, block 256, batch 64.
    Baby,
    /// 12 layers, 12 heads (in 4 groups), width 768, block 1024, batch 16: the smallest GPT-2.
    Gpt2,
    /// Sizes that divide by nothing: 3 layers, 4 heads, width 52, block 37, batch 7. A Llama has 8 heads of width 10 in 4
    /// groups, width 37, hidden width 101.
    Odd,
}

impl Args {
    /// The model for a vocabulary, and the batch.
    ///
    /// # Errors
    /// Refuses sizes that the model does not have.
    pub fn sizes(&self, vocabulary: usize) -> isoshard::Result<(Sizes, usize)> {
        let odd_llama = (self.config, self.model) == (Config::Odd, ModelName::Llama);
        let (layers, heads, kv_heads, width, block, batch) = match self.config {
            Config::Nano => (4, 4, 2, 128, 64, 12),
            Config::Baby => (6, 6, 2, 384, 256, 64),
            Config::Gpt2 => (12, 12, 4, 768, 1024, 16),
            Config::Odd if odd_llama => (3, 8, 4, 37, 37, 7),
            Config::Odd => (3, 4, 4, 52, 37, 7),
        };
        let (layers, heads) = (self.layers.unwrap_or(layers), self.heads.unwrap_or(heads));
        let (width, block) = (self.width.unwrap_or(width), self.block.unwrap_or(block));
        let dropout = self.dropout;
        let sizes = match self.model {
            ModelName::Gpt => {
                self.refuse_llama_sizes()?;
                Sizes::Gpt(GptConfig { vocabulary, block, layers, heads, width, dropout, bias: false })
            }
            ModelName::Llama => Sizes::Llama(LlamaConfig {
                vocabulary,
                block,
                layers,
                heads,
                kv_heads: self.kv_heads.unwrap_or(kv_heads),
                head_width: self.head_width.unwrap_or(if odd_llama { 10 } else { width / heads }),
                width,
                hidden: self.hidden.unwrap_or(if odd_llama {
                    101
                } else {
                    (8 * width).div_ceil(3).next_multiple_of(32)
                }),
                base: 1e4,
                dropout,
            }),
        };
        Ok((sizes, self.batch.unwrap_or(batch)))
    }

    /// The dtype of [`Args::dtype`].
    pub fn compute(&self) -> DType {
        match self.dtype {
            Compute::F32 => DType::F32,
            Compute::Bf16 => DType::BF16,
        }
    }

    fn refuse_llama_sizes(&self) -> isoshard::Result<()> {
        let given =
            [("--kv-heads", self.kv_heads), ("--head-width", self.head_width), ("--hidden", self.hidden)];
        match given.into_iter().find(|(_, size)| size.is_some()) {
            None => Ok(()),
            Some((name, _)) => {
                Err(Error::invalid("sizes", "a GPT has no such size", name, "add --model llama"))
            }
        }
    }
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err("expected a whole number from 1 up".into()),
    }
}

fn rate(text: &str) -> Result<f64, String> {
    number_in(text, 0.0..f64::INFINITY, "expected a number from 0 up")
}

fn probability(text: &str) -> Result<f64, String> {
    number_in(text, 0.0..1.0, "expected a probability from 0 up to, but not, 1")
}

fn number_in(text: &str, range: Range<f64>, expected: &str) -> Result<f64, String> {
    text.parse().ok().filter(|x| range.contains(x)).ok_or_else(|| expected.into())
}

/// A mesh's text, if it can be read and has axes that a transformer's plan knows.
fn mesh(text: &str) -> Result<String, String> {
    let any = Parallel { heads: usize::MAX, sequence: false };
    let known = Mesh::parse(text, 0).and_then(|mesh| Plan::transformer(&mesh, any));
    known.map(|_| text.into()).map_err(|e| format!("{e}; e.g. fsdp=4, dp=2,tp=2 or 1"))
}

fn step_and_rank(text: &str) -> Result<(usize, usize), String> {
    let pair = text.split_once(':').and_then(|(step, rank)| Some((step.parse().ok()?, rank.parse().ok()?)));
    pair.ok_or_else(|| "expected STEP:RANK".into())
}
