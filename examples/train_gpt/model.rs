//! The models that can be trained, behind one type.

use isoshard::Result;
use isoshard::dtensor::DTensor;
use isoshard::nn::{Forward, Gpt, GptConfig, Llama, LlamaConfig, Module, Params};

/// A model's sizes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sizes {
    /// The sizes of a GPT.
    Gpt(GptConfig),
    /// The sizes of a Llama.
    Llama(LlamaConfig),
}

/// A model whose parameters are declared.
pub enum Model {
    /// Learned positions, layer norms, GELU.
    Gpt(Gpt),
    /// Rotary positions, root-mean-square norms, gated SiLU, grouped heads.
    Llama(Llama),
}

impl Sizes {
    /// Returns the length of the longest sequence.
    pub fn block(&self) -> usize {
        match self {
            Sizes::Gpt(c) => c.block,
            Sizes::Llama(c) => c.block,
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
        }
    }

    /// Returns the number of different tokens.
    pub fn vocabulary(&self) -> usize {
        match self {
            Sizes::Gpt(c) => c.vocabulary,
            Sizes::Llama(c) => c.vocabulary,
        }
    }

    /// Returns the number of heads that tensor parallelism distributes whole.
    pub fn whole_heads(&self) -> usize {
        match self {
            Sizes::Gpt(c) => c.heads,
            Sizes::Llama(c) => c.kv_heads,
        }
    }
}

impl Model {
    /// Declares the model's parameters.
    pub fn new(params: &mut Params, sizes: Sizes) -> Result<Model> {
        Ok(match sizes {
            Sizes::Gpt(config) => Model::Gpt(Gpt::new(params, config)?),
            Sizes::Llama(config) => Model::Llama(Llama::new(params, config)?),
        })
    }

    /// Returns the scores, per position, of the token that follows.
    pub fn forward(&self, cx: &Forward, tokens: &DTensor) -> Result<DTensor> {
        match self {
            Model::Gpt(model) => model.forward(cx, tokens),
            Model::Llama(model) => model.forward(cx, tokens),
        }
    }

    /// Returns the mean cross entropy of predicting `targets` from `tokens`.
    pub fn loss(&self, cx: &Forward, tokens: &DTensor, targets: &DTensor) -> Result<DTensor> {
        match self {
            Model::Gpt(model) => model.loss(cx, tokens, targets),
            Model::Llama(model) => model.loss(cx, tokens, targets),
        }
    }
}
