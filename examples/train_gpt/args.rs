//! The command line.

use std::ops::Range;
use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use isoshard::Error;
use isoshard::dtensor::Reduction;
use isoshard::nn::{GptConfig, LlamaConfig, Parallel, Plan};
use isoshard::placement::{Mesh, SumGroups};
use isoshard::tensor::{DType, Device};

use crate::model::{PretrainedSizes, Sizes, product};

const EXAMPLES: &str = "\
Meshes (dp = data parallel, fsdp = parameters sharded as well, tp = tensor parallel):
  train_gpt                                             two ranks under FSDP, about a minute on two cores
  train_gpt --mesh 1                                    a single rank: the same losses, to the last bit
  train_gpt --mesh fsdp=4                               four ranks under FSDP
  train_gpt --mesh dp=2,tp=2 --sequence-parallel        two replicas, each over two ranks
  mpirun -n 4 train_gpt --engine mpi --mesh fsdp=4      processes instead of threads
  train_gpt --engine dry --mesh dp=64,fsdp=32,tp=8 --batch 2048 --heads 8
                                                        one step of one rank of 16,384, counted and not computed
More:
  train_gpt --data book.txt --plot loss.svg             another text, and the losses as a picture
  train_gpt --model llama --config baby --dropout 0.2   a larger model
  train_gpt --save run --save-every 100 --resume        checkpoints; started again, it goes on where it ended
  train_gpt --from MODEL --lr 1e-5                      fine-tunes the weights of a folder of Hugging Face
  train_gpt --json                                      JSON lines for programs to read";

/// Trains a small GPT (or Llama) on text, character by character, on any mesh of ranks.
///
/// Ranks are threads of this process or, with --engine mpi, the processes that mpirun starts. The mesh decides which
/// rank computes which values. It never changes a value: initial parameters, batches and dropout depend on the seed
/// alone, and every mesh gives the losses of a single rank, bit for bit.
#[derive(Clone, Debug, Parser)]
#[command(name = "train_gpt", version, after_help = EXAMPLES)]
pub struct Args {
    /// A UTF-8 text to train on, or a directory of such files [default: this project's documentation].
    ///
    /// Its characters are the vocabulary, unless --tokenizer is given. The last tenth is kept for validation.
    #[arg(long, value_name = "FILE")]
    pub data: Option<PathBuf>,
    /// A byte-level BPE of N tokens, trained on the text, or a tokenizer.json. Needs the feature `tokenizers`.
    #[arg(long, value_parser = tokenizer, value_name = "N|FILE")]
    pub tokenizer: Option<TokenizerChoice>,

    /// The model to train.
    #[arg(long, value_enum, default_value = "gpt", value_name = "NAME")]
    pub model: ModelName,
    /// Fine-tune the weights of DIR, which has config.json and safetensors files as Hugging Face writes them.
    ///
    /// The tokenizer.json of DIR is the tokenizer, unless --tokenizer names another file: the model's tokens are no
    /// characters. The model's sizes are those of config.json.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["model", "layers", "heads", "width", "kv_heads", "head_width", "hidden"])]
    pub from: Option<PathBuf>,
    /// Sizes by name; --layers, --heads, --width, --block, --batch and so on override single ones.
    #[arg(long, value_enum, default_value = "nano", value_name = "NAME")]
    pub config: Config,
    /// The number of transformer blocks.
    #[arg(long, value_parser = up_to::<10_000>, value_name = "N")]
    pub layers: Option<usize>,
    /// The number of attention heads; it divides the width unless --head-width is given.
    #[arg(long, value_parser = up_to::<1_000_000>, value_name = "N")]
    pub heads: Option<usize>,
    /// The width of the residual stream.
    #[arg(long, value_parser = up_to::<1_000_000>, value_name = "N")]
    pub width: Option<usize>,
    /// The number of key and value heads of a Llama; it divides the heads.
    #[arg(long, value_parser = up_to::<1_000_000>, value_name = "N")]
    pub kv_heads: Option<usize>,
    /// The width of each head of a Llama, an even number [default: width / heads].
    #[arg(long, value_parser = up_to::<1_000_000>, value_name = "N")]
    pub head_width: Option<usize>,
    /// The hidden width of a Llama's MLPs [default: 8/3 of the width, rounded up to a multiple of 32].
    #[arg(long, value_parser = up_to::<1_000_000>, value_name = "N")]
    pub hidden: Option<usize>,
    /// The number of characters, or of tokens, that the model sees at once.
    #[arg(long, value_parser = up_to::<1_000_000>, value_name = "N")]
    pub block: Option<usize>,
    /// The number of sequences per micro-batch, over all ranks together.
    #[arg(long, value_parser = up_to::<100_000>, value_name = "N")]
    pub batch: Option<usize>,

    /// The mesh's axes (dp, fsdp, tp) and their ranks, such as fsdp=4 or dp=2,tp=2; 1 for a single rank.
    #[arg(long, value_parser = mesh, default_value = "fsdp=2", value_name = "AXES")]
    pub mesh: String,
    /// Shard activations along the sequence between tensor-parallel layers. Changes nothing without a tp axis.
    #[arg(long)]
    pub sequence_parallel: bool,
    /// The engine that runs the ranks and carries what they send.
    #[arg(long, value_enum, default_value = "threads", value_name = "NAME")]
    pub engine: EngineName,
    /// Let processes meet without a secret, even at an address that other machines can reach.
    ///
    /// Anyone who can reach that address may then take the place of a rank. Without this option the processes want
    /// ISOSHARD_TOKEN or ISOSHARD_TOKEN_FILE there.
    #[arg(long)]
    pub insecure_rendezvous: bool,
    /// With --engine dry: the number of ranks in the world, if it is not the mesh's.
    #[arg(long, value_name = "N")]
    pub world: Option<usize>,
    /// With --engine dry: the rank that is counted.
    #[arg(long, default_value_t = 0, value_name = "R")]
    pub rank: usize,
    /// The device that computes: cpu, cuda (the first GPU, which the ranks share) or cuda:N.
    ///
    /// With --reduction exact, every device gives the same values.
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    pub device: Device,
    /// The number of threads per rank on the CPU [default: ISOSHARD_THREADS, or the cores divided by the ranks].
    ///
    /// Changes no value.
    #[arg(long, value_parser = up_to::<1024>, value_name = "N")]
    pub threads: Option<usize>,
    /// The element type in which the model computes. Parameters, gradients and the optimizer's state are f32.
    #[arg(long, value_enum, default_value = "f32", value_name = "DTYPE")]
    pub dtype: Compute,
    /// The order in which sums over several ranks are taken.
    #[arg(long, value_enum, default_value = "exact", value_name = "HOW")]
    pub reduction: ReductionName,
    /// With --reduction exact: take products in this many parts on every mesh, a power of two.
    ///
    /// Every mesh then gives the bits that a single rank gives with the same number; a mesh sends the fewest bytes if the
    /// product of its axes divides it.
    #[arg(long, value_name = "N")]
    pub groups: Option<usize>,
    /// With --groups: the number of parts of parameters' gradients, if it is another.
    #[arg(long, value_name = "N", requires = "groups")]
    pub gradient_groups: Option<usize>,
    /// With --groups: the element type to which parts of sums are rounded before ranks send them.
    #[arg(long, value_enum, value_name = "DTYPE")]
    pub wire: Option<Compute>,
    /// The activations that blocks drop after the forward pass and compute again in the backward pass. Changes no value.
    #[arg(long, value_enum, default_value_t = RecomputeName::Auto, value_name = "WHAT")]
    pub recompute: RecomputeName,
    /// The number of micro-batches per step; their gradients are averaged.
    ///
    /// With --reduction fast and with --groups, ranks send gradients once per step; otherwise once per micro-batch.
    #[arg(long, value_parser = up_to::<100_000>, default_value_t = 1, value_name = "K")]
    pub accumulate: usize,

    /// The number of training steps.
    #[arg(long, value_parser = up_to::<1_000_000_000>, default_value_t = 2000, value_name = "N")]
    pub steps: usize,
    /// The learning rate after the warm-up; it then falls along a cosine.
    #[arg(long, value_parser = rate, default_value_t = 1e-3, value_name = "RATE")]
    pub lr: f64,
    /// The learning rate at the end of the cosine.
    #[arg(long, value_parser = rate, default_value_t = 1e-4, value_name = "RATE")]
    pub min_lr: f64,
    /// The number of steps in which the learning rate rises to --lr.
    #[arg(long, default_value_t = 50, value_name = "N")]
    pub warmup: usize,
    /// The probability with which dropout drops embeddings, attention probabilities and the blocks' outputs.
    #[arg(long, value_parser = probability, default_value_t = 0.0, value_name = "P")]
    pub dropout: f64,
    /// AdamW's decoupled weight decay, for matrices only.
    #[arg(long, value_parser = rate, default_value_t = 0.1, value_name = "RATE")]
    pub weight_decay: f64,
    /// Every N steps, compare the replicas of parameters and look for gradients that are NaN or infinite; 0 for never.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub check: usize,
    /// The norm to which larger gradients are clipped, over all parameters together; 0 for no limit.
    #[arg(long, value_parser = rate, default_value_t = 1.0, value_name = "NORM")]
    pub clip: f64,
    /// The seed of initial values, batches, dropout and the sample.
    #[arg(long, default_value_t = 1337, value_name = "S")]
    pub seed: u64,

    /// The number of steps between validations; one more follows the last step.
    #[arg(long, value_parser = positive, default_value_t = 200, value_name = "N")]
    pub eval_every: usize,
    /// The number of batches per validation, the same ones every time.
    #[arg(long, value_parser = up_to::<100_000>, default_value_t = 20, value_name = "N")]
    pub eval_batches: usize,

    /// Save checkpoints to a folder of this name: parameters, the optimizer's state and the state of dropout.
    #[arg(long, value_name = "DIR")]
    pub save: Option<PathBuf>,
    /// The number of steps between checkpoints; one more follows the last step.
    #[arg(long, requires = "save", value_parser = positive, default_value_t = 500, value_name = "N")]
    pub save_every: usize,
    /// The number of checkpoints that are kept, the newest ones [default: all].
    #[arg(long, requires = "save", value_parser = positive, value_name = "N")]
    pub keep: Option<usize>,
    /// Go on from the newest checkpoint in the folder of --save, on any mesh; from the beginning if there is none.
    ///
    /// The losses and parameters are those of a run that was never interrupted, bit for bit.
    #[arg(long, requires = "save")]
    pub resume: bool,

    /// The number of steps per line of the table [default: a twentieth of --steps].
    #[arg(long, value_parser = positive, value_name = "N")]
    pub print_every: Option<usize>,
    /// Write the training and validation losses to FILE as a picture (SVG), at every validation.
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// Print JSON lines on standard output instead of the table and the sample.
    #[arg(long)]
    pub json: bool,

    /// Panic on this rank at this step, to see how the other ranks fail.
    #[arg(long, hide = true, value_parser = step_and_rank, value_name = "STEP:RANK")]
    pub fail_at: Option<(usize, usize)>,
}

/// The tokenizer to use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizerChoice {
    /// A byte-level BPE of this many tokens at most, trained on the text.
    Train(usize),
    /// A tokenizer.json.
    Load(PathBuf),
}

/// The model to train.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ModelName {
    /// Learned positions, layer norms, GELU, a head tied to the token table.
    Gpt,
    /// Rotary positions, root-mean-square norms, gated SiLU, grouped heads, a head of its own.
    Llama,
}

/// The engine that runs the ranks and carries what they send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EngineName {
    /// Threads of this process, as many as the mesh has ranks.
    Threads,
    /// Processes on CPUs that mpirun or srun starts, as many as the mesh has ranks.
    Mpi,
    /// A GPU per rank: threads of this process, or processes if a launcher starts them.
    Nccl,
    /// One step of one rank without data: counts its calls, bytes, memory and modelled time, for any number of ranks.
    Dry,
}

/// The order in which sums over several ranks are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ReductionName {
    /// Every mesh gives the bits of a single rank.
    Exact,
    /// Correct up to rounding, which differs between meshes; uneven shards send fewer bytes.
    Fast,
}

/// The vectors of a token that a block spares if cheap results are computed again: an activation of four, and two norms.
const CHEAP_VECTORS: u128 = 6;

/// The most bytes of a rank for which they are kept: smaller activations stay in caches, and nano would take 1.02 times as
/// long on an Intel Xeon.
const MIN_SPARED_BYTES: u128 = 32 << 20;

/// The activations that the backward pass computes again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RecomputeName {
    /// `cheap` on CPUs if it saves more than 32 MiB per rank, else `nothing`.
    Auto,
    /// All are kept.
    Nothing,
    /// Results of activation functions and norms: about as fast.
    Cheap,
    /// All within a block: takes the time of one more forward pass of the blocks, with its communication.
    Blocks,
}

/// The element type in which a model computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Compute {
    /// 24 bits of precision.
    F32,
    /// 8 bits of precision: activations are rounded, and so are parameters at each use.
    Bf16,
}

impl Compute {
    fn dtype(self) -> DType {
        match self {
            Compute::F32 => DType::F32,
            Compute::Bf16 => DType::BF16,
        }
    }
}

/// Sizes by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Config {
    /// 4 layers, 4 heads (a Llama: in 2 groups), width 128, block 64, batch 12.
    Nano,
    /// 6 layers, 6 heads (in 2 groups), width 384, block 256, batch 64.
    Baby,
    /// 12 layers, 12 heads (in 4 groups), width 768, block 1024, batch 16: the smallest GPT-2.
    Gpt2,
    /// Sizes that no mesh divides evenly: 3 layers, 4 heads, width 52, block 37, batch 7. A Llama has 8 heads of width
    /// 10 in 4 groups, width 37, hidden width 101.
    Odd,
}

impl Args {
    /// Returns the plan of a transformer on a mesh.
    ///
    /// # Errors
    /// Refuses an axis of another name than dp, fsdp and tp.
    pub fn plan(&self, mesh: &Mesh, (sizes, batch): (&Sizes, usize)) -> isoshard::Result<Plan> {
        let parallel = Parallel { heads: sizes.whole_heads(), sequence: self.sequence_parallel };
        let plan = Plan::transformer(mesh, parallel)?;
        Ok(match self.recomputed(mesh, (sizes, batch)) {
            RecomputeName::Auto | RecomputeName::Nothing => plan,
            RecomputeName::Cheap => plan.recompute_cheap("h.*"),
            RecomputeName::Blocks => plan.recompute("h.*"),
        })
    }

    /// Returns what is computed again: `Auto` says it by the device and the bytes.
    fn recomputed(&self, mesh: &Mesh, (sizes, batch): (&Sizes, usize)) -> RecomputeName {
        let (_, layers, width) = sizes.least();
        let tokens = batch as u128 * sizes.block() as u128;
        let bytes = product([tokens, width, layers, CHEAP_VECTORS, self.compute().size_bytes() as u128]);
        let is_much = bytes / mesh.rank_len().max(1) as u128 > MIN_SPARED_BYTES;
        match self.recompute {
            RecomputeName::Auto if is_much && self.device == Device::Cpu => RecomputeName::Cheap,
            RecomputeName::Auto => RecomputeName::Nothing,
            named => named,
        }
    }

    /// Returns the model's sizes for a vocabulary, and the rows of a batch.
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
        if let Some(dir) = &self.from {
            let sizes = PretrainedSizes::read(dir, block, dropout)?;
            return Ok((Sizes::Pretrained(Box::new(sizes)), self.batch.unwrap_or(batch)));
        }
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

    /// Returns the tokenizer: that of --tokenizer, or the tokenizer.json of --from.
    pub fn tokenizer(&self) -> Option<TokenizerChoice> {
        let of_model = || {
            let path = self.from.as_ref()?.join("tokenizer.json");
            path.exists().then_some(TokenizerChoice::Load(path))
        };
        self.tokenizer.clone().or_else(of_model)
    }

    /// Refuses --from without a tokenizer that was trained with the model: the rows of its table are of those tokens.
    ///
    /// # Errors
    /// Refuses a folder without a tokenizer.json, and a tokenizer that is to be trained. A dry run needs none.
    pub fn check_tokenizer(&self) -> isoshard::Result<()> {
        let Some(dir) = self.from.as_ref().filter(|_| self.engine != EngineName::Dry) else { return Ok(()) };
        let refused = |rule: &str, given: String| {
            let remedy = "put the model's tokenizer.json there, or name it by --tokenizer FILE";
            Err(Error::invalid("from", rule, given, remedy))
        };
        match self.tokenizer() {
            Some(TokenizerChoice::Load(_)) => Ok(()),
            Some(TokenizerChoice::Train(tokens)) => {
                let given = format!("--tokenizer {tokens} for {}", dir.display());
                refused(
                    "a model that was trained has its own tokens, and not those of a new tokenizer",
                    given,
                )
            }
            None => {
                let rule =
                    "the model's folder has no tokenizer.json, and the model's tokens are no characters";
                refused(rule, dir.display().to_string())
            }
        }
    }

    /// Returns the dtype of [`Args::dtype`].
    pub fn compute(&self) -> DType {
        self.dtype.dtype()
    }

    /// Returns the mode in which sums over several ranks are taken.
    pub fn reduction(&self) -> isoshard::Result<Reduction> {
        match (self.reduction, self.groups, self.wire) {
            (ReductionName::Exact, None, None) => Ok(Reduction::Exact),
            (ReductionName::Fast, None, None) => Ok(Reduction::Fast),
            (ReductionName::Exact, Some(parts), wire) => Ok(Reduction::Grouped(
                SumGroups::new(parts)?.with_wire(wire.unwrap_or(Compute::F32).dtype())?,
            )),
            (ReductionName::Fast, ..) => {
                let given = "--reduction fast with --groups or --wire";
                Err(Error::invalid("sums", "fast sums have no groups", given, "leave out --reduction fast"))
            }
            (ReductionName::Exact, None, Some(_)) => {
                Err(Error::invalid("sums", "parts of groups are rounded", "--wire", "add --groups"))
            }
        }
    }

    /// True if every mesh gives the bits of a single rank.
    pub fn is_exact(&self) -> bool {
        self.reduction == ReductionName::Exact
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

fn tokenizer(text: &str) -> Result<TokenizerChoice, String> {
    if text.bytes().all(|b| b.is_ascii_digit()) {
        return up_to::<1_000_000>(text).map(TokenizerChoice::Train);
    }
    Ok(TokenizerChoice::Load(text.into()))
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err("expected a whole number of at least 1".into()),
    }
}

/// Returns a count that a run can end with, and whose products with others do not overflow.
fn up_to<const MOST: usize>(text: &str) -> Result<usize, String> {
    positive(text).ok().filter(|&n| n <= MOST).ok_or_else(|| {
        format!("expected a whole number from 1 to {MOST}; a larger one would not end or not fit into memory")
    })
}

fn rate(text: &str) -> Result<f64, String> {
    number_in(text, 0.0..f64::INFINITY, "expected a number of at least 0")
}

fn probability(text: &str) -> Result<f64, String> {
    number_in(text, 0.0..1.0, "expected a probability of at least 0 and less than 1")
}

fn number_in(text: &str, range: Range<f64>, expected: &str) -> Result<f64, String> {
    text.parse().ok().filter(|x| range.contains(x)).ok_or_else(|| expected.into())
}

/// Returns a mesh's text if it can be read and a transformer's plan knows its axes.
fn mesh(text: &str) -> Result<String, String> {
    let any = Parallel { heads: usize::MAX, sequence: false };
    let known = Mesh::parse(text, 0).and_then(|mesh| Plan::transformer(&mesh, any));
    known.map(|_| text.into()).map_err(|e| format!("{e}; e.g. fsdp=4, dp=2,tp=2 or 1"))
}

fn step_and_rank(text: &str) -> Result<(usize, usize), String> {
    let pair = text.split_once(':').and_then(|(step, rank)| Some((step.parse().ok()?, rank.parse().ok()?)));
    pair.ok_or_else(|| "expected STEP:RANK".into())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn help_shows_every_option_and_the_meshes_of_its_examples_are_read() {
        Args::command().debug_assert();
        let help = Args::command().render_long_help().to_string();
        for option in Args::command().get_arguments().filter(|a| !a.is_hide_set()) {
            let name = option.get_long().expect("every option has a long name");
            assert!(help.contains(&format!("--{name}")), "{name}");
        }
        let mut read = 0;
        for line in EXAMPLES.lines().filter(|l| l.contains("train_gpt")) {
            let words = line.split("  ").find(|part| part.contains("train_gpt")).expect("the command");
            let command = words.trim_start_matches("mpirun -n 4 ").split_whitespace();
            Args::try_parse_from(command).unwrap_or_else(|e| panic!("{words}: {e}"));
            read += 1;
        }
        assert_eq!(read, 11);
    }

    #[test]
    fn cheap_results_are_computed_again_where_they_take_much_memory() {
        let plan = |words: &str| {
            let args = Args::try_parse_from(format!("train_gpt {words}").split_whitespace()).expect(words);
            let (sizes, batch) = args.sizes(65).expect("sizes of a model");
            let mesh = Mesh::parse(&args.mesh, 0).expect("a mesh");
            format!("{:?}", args.plan(&mesh, (&sizes, batch)).expect("axes of a plan"))
        };
        for (words, chosen) in [
            ("--mesh 1 --config baby --batch 4", "cheap"), // 1,024 tokens of 384 f32 in 6 blocks, six times: 54 MiB
            ("--mesh fsdp=2 --config baby --batch 4", "nothing"),
            ("--mesh fsdp=2 --config baby", "cheap"),
            ("--mesh 1 --config baby --batch 4 --dtype bf16", "nothing"),
            ("--mesh 1 --config nano", "nothing"),
            ("--mesh 1 --config baby --device cuda:0", "nothing"),
        ] {
            assert_eq!(plan(words), plan(&format!("{words} --recompute {chosen}")), "{words}");
        }
        let named = ["nothing", "cheap", "blocks"].map(|name| plan(&format!("--recompute {name}")));
        assert!(named[0] != named[1] && named[0] != named[2] && named[1] != named[2]);
    }
}
