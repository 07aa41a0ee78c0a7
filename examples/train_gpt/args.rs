//! The command line.

use std::ops::Range;
use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use isoshard::nn::{GptConfig, Parallel, Plan};
use isoshard::placement::Mesh;

/// Trains a small GPT on text, character by character, on any mesh of ranks.
///
/// Ranks are threads of this process. The mesh decides who computes what, never what is computed: initial values,
/// batches and dropout depend on the seed alone.
#[derive(Clone, Debug, Parser)]
#[command(name = "train_gpt", version)]
pub struct Args {
    /// UTF-8 text to train on, or a directory of such files; without it, this repository's own text.
    ///
    /// Its characters are the vocabulary. The last tenth is kept for validation.
    #[arg(long, value_name = "FILE")]
    pub data: Option<PathBuf>,

    /// Sizes that --layers, --heads, --width, --block and --batch then override.
    #[arg(long, value_enum, default_value = "nano", value_name = "NAME")]
    pub config: Config,
    /// Transformer blocks.
    #[arg(long, value_parser = positive, value_name = "N")]
    pub layers: Option<usize>,
    /// Attention heads; they divide the width.
    #[arg(long, value_parser = positive, value_name = "N")]
    pub heads: Option<usize>,
    /// The width of the residual stream.
    #[arg(long, value_parser = positive, value_name = "N")]
    pub width: Option<usize>,
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

/// Named sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Config {
    /// 4 layers, 4 heads, width 128, block 64, batch 12.
    Nano,
    /// 6 layers, 6 heads, width 384, block 256, batch 64.
    Baby,
}

impl Args {
    /// The model for a vocabulary, and the batch.
    pub fn sizes(&self, vocabulary: usize) -> (GptConfig, usize) {
        let (layers, heads, width, block, batch) = match self.config {
            Config::Nano => (4, 4, 128, 64, 12),
            Config::Baby => (6, 6, 384, 256, 64),
        };
        let model = GptConfig {
            vocabulary,
            layers: self.layers.unwrap_or(layers),
            heads: self.heads.unwrap_or(heads),
            width: self.width.unwrap_or(width),
            block: self.block.unwrap_or(block),
            dropout: self.dropout,
            bias: false,
        };
        (model, self.batch.unwrap_or(batch))
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
