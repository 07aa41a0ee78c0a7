//! The models that can be trained, behind one type.

use std::path::{Path, PathBuf};

use isoshard::Result;
use isoshard::dtensor::DTensor;
use isoshard::fsdp::{BlockPolicy, Sharding, fully_shard};
use isoshard::hugging_face::{HuggingFaceConfig, HuggingFaceFormat};
use isoshard::nn::{
    Decoder, DecoderConfig, DecoderLayer, FeedForwardConfig, Forward, Gpt, GptConfig, Llama, LlamaConfig,
    Module, Params,
};

/// A model's sizes.
#[derive(Clone, Debug, PartialEq)]
pub enum Sizes {
    /// The sizes of a GPT.
    Gpt(GptConfig),
    /// The sizes of a Llama.
    Llama(LlamaConfig),
    /// A model of Hugging Face's format.
    Pretrained(Box<PretrainedSizes>),
}

/// The sizes of a model of Hugging Face's format, with the place of its weights.
#[derive(Clone, Debug, PartialEq)]
pub struct PretrainedSizes {
    dir: PathBuf,
    architecture: &'static str,
    kv_heads: usize,
    block: usize,
    config: DecoderConfig,
}

impl PretrainedSizes {
    /// Reads the sizes of the model in `dir`, for rows of at most `block` tokens.
    pub fn read(dir: &Path, block: usize, dropout: f64) -> Result<PretrainedSizes> {
        let read = HuggingFaceConfig::read(dir)?;
        let mut config = read.decoder();
        config.dropout = dropout;
        for layer in &mut config.layers {
            (layer.attention.attention_dropout, layer.attention.dropout) = (dropout, dropout);
            match &mut layer.feed_forward {
                FeedForwardConfig::Mlp(mlp) => mlp.dropout = dropout,
                FeedForwardConfig::Moe(moe) => moe.dropout = dropout,
            }
        }
        let [_, kv_heads] = read.heads();
        let block = block.min(config.context);
        Ok(PretrainedSizes { dir: dir.into(), architecture: read.architecture(), kv_heads, block, config })
    }
}

/// A model whose parameters are declared.
pub enum Model {
    /// Learned positions, layer norms, GELU.
    Gpt(Gpt),
    /// Rotary positions, root-mean-square norms, gated SiLU, grouped heads.
    Llama(Llama),
    /// A model of Hugging Face's format.
    Decoder(Decoder),
}

/// Returns a product, or the largest number if it overflows.
pub fn product<const N: usize>(factors: [u128; N]) -> u128 {
    factors.into_iter().fold(1, u128::saturating_mul)
}

impl Sizes {
    /// Returns the length of the longest sequence.
    pub fn block(&self) -> usize {
        match self {
            Sizes::Gpt(c) => c.block,
            Sizes::Llama(c) => c.block,
            Sizes::Pretrained(c) => c.block,
        }
    }

    /// Describes the sizes in a line.
    pub fn describe(&self) -> String {
        match self {
            Sizes::Gpt(c) => {
                format!("GPT of {} layers, {} heads, width {}, block {}", c.layers, c.heads, c.width, c.block)
            }
            Sizes::Llama(c) => format!(
                "Llama of {} layers, {} heads in {} groups, width {}, block {}",
                c.layers, c.heads, c.kv_heads, c.width, c.block
            ),
            Sizes::Pretrained(c) => {
                let (layers, width) = (c.config.layers.len(), c.config.width);
                format!("{} of {layers} layers, width {width}, block {}", c.architecture, c.block)
            }
        }
    }

    /// Returns the number of different tokens.
    pub fn vocabulary(&self) -> usize {
        match self {
            Sizes::Gpt(c) => c.vocabulary,
            Sizes::Llama(c) => c.vocabulary,
            Sizes::Pretrained(c) => c.config.vocabulary,
        }
    }

    /// Returns the least number of parameters, the layers and the width. Products that overflow are the largest number.
    pub fn least(&self) -> (u128, u128, u128) {
        let n = |x: usize| x as u128;
        match self {
            Sizes::Gpt(c) => {
                let (layers, width) = (n(c.layers), n(c.width));
                let tables = (n(c.vocabulary) + n(c.block)) * width;
                (tables + 12 * layers * width * width, layers, width)
            }
            Sizes::Llama(c) => {
                let (layers, width) = (n(c.layers), n(c.width));
                let attention = 2 * (n(c.heads) + n(c.kv_heads)) * n(c.head_width) * width;
                let block = attention + 3 * n(c.hidden) * width;
                (2 * n(c.vocabulary) * width + layers * block, layers, width)
            }
            Sizes::Pretrained(c) => {
                let (config, width) = (&c.config, n(c.config.width));
                let layer = |layer: &DecoderLayer| {
                    let at = &layer.attention;
                    let heads = n(at.heads) + n(at.kv_heads);
                    let maps = |gated: bool| if gated { 3 } else { 2 };
                    let fed = match layer.feed_forward {
                        FeedForwardConfig::Mlp(mlp) => product([maps(mlp.gated), n(mlp.hidden), width]),
                        FeedForwardConfig::Moe(moe) => {
                            product([maps(moe.gated), n(moe.hidden), width, n(moe.experts)])
                        }
                    };
                    product([2, heads, n(at.head_width), width]).saturating_add(fed)
                };
                let tables = if config.tied_head { 1 } else { 2 };
                let tables = product([tables, n(config.vocabulary), width]);
                let layers = config.layers.iter().map(layer);
                (layers.fold(tables, u128::saturating_add), n(config.layers.len()), width)
            }
        }
    }

    /// Returns the number of heads that tensor parallelism distributes whole.
    pub fn whole_heads(&self) -> usize {
        match self {
            Sizes::Gpt(c) => c.heads,
            Sizes::Llama(c) => c.kv_heads,
            Sizes::Pretrained(c) => c.kv_heads,
        }
    }
}

impl Model {
    /// Declares the model's parameters.
    pub fn new(params: &mut Params, sizes: &Sizes) -> Result<Model> {
        Ok(match sizes {
            Sizes::Gpt(config) => Model::Gpt(Gpt::new(params, *config)?),
            Sizes::Llama(config) => Model::Llama(Llama::new(params, *config)?),
            Sizes::Pretrained(of) => Model::Decoder(Decoder::new(params, of.config.clone())?),
        })
    }

    /// Reads the weights of a model of Hugging Face's format, each rank its shards; leaves other models as they are.
    pub fn load(params: &mut Params, sizes: &Sizes) -> Result<()> {
        match sizes {
            Sizes::Gpt(_) | Sizes::Llama(_) => Ok(()),
            Sizes::Pretrained(of) => HuggingFaceFormat::read(&of.dir)?.load(&of.dir, params),
        }
    }

    /// Places parameters, gradients and the optimizer's states by the mesh's data-parallel axes, a unit per block.
    pub fn shard(params: &mut Params) -> Result<()> {
        let mesh = params.mesh().mesh();
        let sharding = match ["dp", "fsdp"].map(|axis| mesh.axis(axis).is_ok()) {
            [true, true] => Sharding::hsdp("dp", "fsdp"),
            [false, true] => Sharding::zero3("fsdp"),
            [true, false] => Sharding::ddp("dp"),
            [false, false] => return Ok(()),
        };
        fully_shard(params, &["h.*"], &sharding, &BlockPolicy::default()).map(drop)
    }

    /// Returns the scores, per position, of the token that follows.
    pub fn forward(&self, cx: &Forward, tokens: &DTensor) -> Result<DTensor> {
        match self {
            Model::Gpt(model) => model.forward(cx, tokens),
            Model::Llama(model) => model.forward(cx, tokens),
            Model::Decoder(model) => model.forward(cx, tokens),
        }
    }

    /// Returns the mean cross entropy of predicting `targets` from `tokens`.
    pub fn loss(&self, cx: &Forward, tokens: &DTensor, targets: &DTensor) -> Result<DTensor> {
        match self {
            Model::Gpt(model) => model.loss(cx, tokens, targets),
            Model::Llama(model) => model.loss(cx, tokens, targets),
            Model::Decoder(model) => model.loss(cx, tokens, targets),
        }
    }
}
