//! The models that can be trained, as one.

use isoshard::Result;
use isoshard::dtensor::DTensor;
use isoshard::nn::{Forward, Gpt, GptConfig, Llama, LlamaConfig, Module, Params};

/// A model's sizes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sizes {
    /// A GPT's.
    Gpt(GptConfig),
    /// A Llama's.
    Llama(LlamaConfig),
}

/// A model.
pub enum Model {
    /// Learned positions, layer norms, GELU.
    Gpt(Gpt),
    /// Rotary positions, root-mean-square norms, gated SiLU, grouped heads.
    Llama(Llama),
}

impl Sizes {
    /// The longest sequence.
    pub fn block(&self) -> usize {
        match self {
            Sizes::Gpt(c) => c.block,
            Sizes::Llama(c) => c.block,
        }
    }

    /// The number of tokens there are.
    pub fn vocabulary(&self) -> usize {
        match self {
            Sizes::Gpt(c) => c.vocabulary,
            Sizes::Llama(c) => c.vocabulary,
        }
    }

    /// The heads that tensor parallelism must leave whole.
    pub fn whole_heads(&self) -> usize {
        match self {
            Sizes::Gpt(c) => c.heads,
            Sizes::Llama(c) => c.kv_heads,
        }
    }
}

impl Model {
    /// Declares its parameters.
    pub fn new(params: &mut Params, sizes: Sizes) -> Result<Model> {
        Ok(match sizes {
            Sizes::Gpt(config) => Model::Gpt(Gpt::new(params, config)?),
            Sizes::Llama(config) => Model::Llama(Llama::new(params, config)?),
        })
    }

    /// The scores of the token that follows each of `tokens`.
    pub fn forward(&self, cx: &Forward, tokens: &DTensor) -> Result<DTensor> {
        match self {
            Model::Gpt(model) => model.forward(cx, tokens),
            Model::Llama(model) => model.forward(cx, tokens),
        }
    }

    /// The mean cross entropy of predicting `targets` from `tokens`.
    pub fn loss(&self, cx: &Forward, tokens: &DTensor, targets: &DTensor) -> Result<DTensor> {
        match self {
            Model::Gpt(model) => model.loss(cx, tokens, targets),
            Model::Llama(model) => model.loss(cx, tokens, targets),
        }
    }
}
