//! A GPT: the decoder-only transformer of Radford et al. 2019, with the head tied to the token table.

use super::attention::CausalAttention;
use super::forward::Forward;
use super::layers::{Embedding, LayerNorm};
use super::mlp::Mlp;
use super::params::{Params, Scope};
use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::placement::Layout;
use crate::rng::Init;
use crate::tensor::Tensor;

/// A GPT's sizes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GptConfig {
    /// The number of tokens there are.
    pub vocabulary: usize,
    /// The longest sequence.
    pub block: usize,
    /// The number of blocks.
    pub layers: usize,
    /// The number of attention heads; it divides the width.
    pub heads: usize,
    /// The width of the residual stream.
    pub width: usize,
    /// The probability of dropping embeddings, attention probabilities and the blocks' outputs.
    pub dropout: f64,
    /// Whether linear maps and normalisations have biases.
    pub bias: bool,
}

/// A GPT. It holds no values: they are in its [`Params`].
#[derive(Clone, Debug)]
pub struct Gpt {
    config: GptConfig,
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    /// After the embedding, and before the head.
    sites: [String; 2],
}

#[derive(Clone, Debug)]
struct Block {
    attn_norm: LayerNorm,
    attn: CausalAttention,
    mlp_norm: LayerNorm,
    mlp: Mlp,
}

impl Gpt {
    /// Declares all parameters in `params`: normal with deviation 0.02, divided by `sqrt(2 layers)` for the two maps of
    /// each block that write to the residual stream.
    ///
    /// # Errors
    /// Refuses sizes that do not fit one another, and a plan that cannot split them.
    pub fn new(params: &mut Params, config: GptConfig) -> Result<Gpt> {
        let GptConfig { vocabulary, block, layers, heads, width, dropout, bias } = config;
        let init = Init::Normal { mean: 0.0, std: 0.02 };
        let residual = Init::Normal { mean: 0.0, std: 0.02 / (2.0 * layers as f64).sqrt() };
        let mut root = params.root();
        let sites = [root.site("embedding"), root.site("head.input")];
        let tokens = Embedding::new(root.child("wte"), vocabulary, width, init)?;
        let positions = Embedding::new(root.child("wpe"), block, width, init)?;
        let one = |mut scope: Scope<'_>| -> Result<Block> {
            let inits = (init, residual);
            Ok(Block {
                attn_norm: LayerNorm::new(scope.child("ln_1"), width, bias)?,
                attn: CausalAttention::new(scope.child("attn"), (width, heads), bias, dropout, inits)?,
                mlp_norm: LayerNorm::new(scope.child("ln_2"), width, bias)?,
                mlp: Mlp::new(scope.child("mlp"), (width, 4 * width), bias, dropout, inits)?,
            })
        };
        let mut h = root.child("h");
        let blocks = (0..layers).map(|i| one(h.child(i))).collect::<Result<_>>()?;
        let norm = LayerNorm::new(root.child("ln_f"), width, bias)?;
        Ok(Gpt { config, tokens, positions, blocks, norm, sites })
    }

    /// The sizes.
    pub fn config(&self) -> &GptConfig {
        &self.config
    }

    /// The scores `[batch, time, vocabulary]` of the token that follows each of `tokens` `[batch, time]` (i64).
    ///
    /// # Errors
    /// Refuses tokens outside the vocabulary and sequences longer than the block; a fault of communication.
    pub fn forward(&self, cx: &Forward, tokens: &DTensor) -> Result<DTensor> {
        let &[_, time] = &tokens.shape()[..] else {
            let rule = "wants tokens of two dims: batch, time";
            return Err(Error::invalid("gpt", rule, tokens.spec().to_string(), "reshape them first"));
        };
        if time > self.config.block {
            return Err(Error::invalid(
                "gpt",
                "the sequence is longer than the block",
                tokens.spec().to_string(),
                format!("pass at most {} tokens", self.config.block),
            ));
        }
        let positions = Tensor::build([time], |out: &mut [i64]| (0..).zip(out).for_each(|(i, p)| *p = i));
        let everywhere = Layout::replicated(tokens.mesh().mesh().ndim());
        let positions = DTensor::distribute(tokens.mesh(), &positions, everywhere)?;
        let x = self.tokens.forward(cx, tokens)?;
        let x = cx.site(&self.sites[0], x)?.add(&self.positions.forward(cx, &positions)?)?;
        let mut x = cx.dropout(x, self.config.dropout)?;
        for block in &self.blocks {
            x = block.forward(cx, x)?;
        }
        let x = cx.site(&self.sites[1], self.norm.forward(cx, &x)?)?;
        self.tokens.scores(cx, &x)
    }

    /// The mean cross entropy of predicting `targets` from `tokens`, both `[batch, time]` (i64); shape `[]`.
    ///
    /// # Errors
    /// As [`Gpt::forward`].
    pub fn loss(&self, cx: &Forward, tokens: &DTensor, targets: &DTensor) -> Result<DTensor> {
        self.forward(cx, tokens)?.cross_entropy(targets)?.mean_all()
    }
}

impl Block {
    fn forward(&self, cx: &Forward, x: DTensor) -> Result<DTensor> {
        let x = self.attn.forward(cx, self.attn_norm.forward(cx, &x)?)?.add(&x)?;
        self.mlp.forward(cx, self.mlp_norm.forward(cx, &x)?)?.add(&x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::spmd;
    use crate::dtensor::DeviceMesh;
    use crate::nn::Plan;
    use crate::tensor::DType;

    #[test]
    fn refuses_operands_of_other_dims() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[])?;
            let mut params = Params::new(&mesh, Plan::default(), 1)?;
            let config = GptConfig {
                vocabulary: 5,
                block: 4,
                layers: 1,
                heads: 1,
                width: 2,
                dropout: 0.0,
                bias: true,
            };
            let model = Gpt::new(&mut params, config)?;
            let cx = Forward::eval(&params);
            let zeros = |dtype, shape: &[usize]| DTensor::zeros(&mesh, dtype, shape, Layout::replicated(0));
            for shape in [&[3][..], &[], &[1, 2, 3], &[1, 5]] {
                let e = model.forward(&cx, &zeros(DType::I64, shape)?).unwrap_err().to_string();
                assert!(e.starts_with("gpt: "), "{e}");
            }
            let e = model.blocks[0].attn.forward(&cx, zeros(DType::F32, &[3, 2])?).unwrap_err().to_string();
            assert_eq!(
                e,
                "attention: wants three dims: batch, time, width; got f32[3, 2]@() at h.0.attn; reshape it first"
            );
            assert_eq!(model.forward(&cx, &zeros(DType::I64, &[2, 0])?)?.shape()[..], [2, 0, 5]);
            Ok(())
        };
        spmd(1, run).unwrap_or_else(|e| panic!("{e}"));
    }
}
