//! GPT: the decoder-only transformer of Radford et al. 2019. Its head shares the token table.

use super::attention::CausalAttention;
use super::forward::Forward;
use super::layers::{Embedding, LayerNorm};
use super::mlp::Mlp;
use super::module::Module;
use super::params::Params;
use super::scope::Scope;
use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::placement::Layout;
use crate::rng::Init;
use crate::tensor::Tensor;

/// The sizes of a GPT.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GptConfig {
    /// The number of different tokens.
    pub vocabulary: usize,
    /// The longest sequence.
    pub block: usize,
    /// The number of blocks.
    pub layers: usize,
    /// The number of attention heads, a divisor of the width.
    pub heads: usize,
    /// The width of the residual stream.
    pub width: usize,
    /// The probability of dropping embeddings, attention probabilities and the blocks' outputs.
    pub dropout: f64,
    /// `true` if linear maps and normalisations have biases.
    pub bias: bool,
}

/// A GPT (Radford et al. 2019) with learned positions. It keeps ids only; the values are in its [`Params`].
#[derive(Clone, Debug)]
pub struct Gpt {
    config: GptConfig,
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<GptBlock>,
    norm: LayerNorm,
    /// The sites after the embedding and before the head.
    sites: [String; 2],
}

#[derive(Clone, Debug)]
struct GptBlock {
    attn_norm: LayerNorm,
    attn: CausalAttention,
    mlp_norm: LayerNorm,
    mlp: Mlp,
}

impl Gpt {
    /// Declares all parameters in `params`, drawn from a normal distribution with standard deviation 0.02, divided by
    /// `sqrt(2 · layers)` for the two maps of each block that write to the residual stream.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{GptConfig, Gpt, Params, Plan}};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let config = GptConfig {
    ///         vocabulary: 11, block: 6, layers: 2, heads: 2, width: 8, dropout: 0.1, bias: true,
    ///     };
    ///     let model = Gpt::new(&mut params, config)?;
    ///     assert!(params.find("h.1.attn.out.weight").is_some() && model.config().layers == 2);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses sizes that do not fit one another, and a plan that cannot shard them.
    pub fn new(params: &mut Params, config: GptConfig) -> Result<Gpt> {
        let GptConfig { vocabulary, block, layers, heads, width, dropout, bias } = config;
        let init = Init::Normal { mean: 0.0, std: 0.02 };
        let residual = Init::Normal { mean: 0.0, std: 0.02 / (2.0 * layers as f64).sqrt() };
        let mut root = params.root();
        let sites = [root.site("embedding"), root.site("head.input")];
        let tokens = Embedding::new(root.child("wte"), vocabulary, width, init)?;
        let positions = Embedding::new(root.child("wpe"), block, width, init)?;
        let one = |mut scope: Scope<'_>| -> Result<GptBlock> {
            let inits = (init, residual);
            Ok(GptBlock {
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

    /// Returns the model's sizes.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{GptConfig, Gpt, Params, Plan}};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let config = GptConfig {
    ///         vocabulary: 11, block: 6, layers: 2, heads: 2, width: 8, dropout: 0.1, bias: true,
    ///     };
    ///     let model = Gpt::new(&mut params, config)?;
    ///     assert_eq!(*model.config(), config);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn config(&self) -> &GptConfig {
        &self.config
    }

    /// Returns the mean cross entropy, of shape `[]`, of predicting `targets` from `tokens`, both `[batch, time]`
    /// (i64).
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// use isoshard::nn::{Forward, Gpt, GptConfig, Params, Plan};
    /// let losses = spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let config = GptConfig {
    ///         vocabulary: 11, block: 6, layers: 2, heads: 2, width: 8, dropout: 0.0, bias: true,
    ///     };
    ///     let model = Gpt::new(&mut params, config)?;
    ///     let tokens = DTensor::zeros(&mesh, DType::I64, [3, 6], "(S0)".parse()?)?;
    ///     model.loss(&Forward::eval(&params), &tokens, &tokens)?.full_tensor()?.item()
    /// })?;
    /// assert!((losses[0] - 11f64.ln()).abs() < 0.1); // an untrained model guesses among 11 tokens
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses tokens outside the vocabulary and sequences longer than the block; returns an error if a rank fails.
    pub fn loss(&self, cx: &Forward, tokens: &DTensor, targets: &DTensor) -> Result<DTensor> {
        self.forward(cx, tokens)?.cross_entropy(targets)?.mean_all()
    }
}

impl Module for Gpt {
    /// Returns the scores `[batch, time, vocabulary]` of the token that follows each of `tokens` `[batch, time]` (i64).
    ///
    /// # Errors
    /// Refuses tokens outside the vocabulary and sequences longer than the block; returns an error if a rank fails.
    fn forward(&self, cx: &Forward, tokens: &DTensor) -> Result<DTensor> {
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
        let x = self.blocks.forward(cx, &cx.dropout(x, self.config.dropout)?)?;
        let x = cx.site(&self.sites[1], self.norm.forward(cx, &x)?)?;
        self.tokens.scores(cx, &x)
    }
}

impl Module for GptBlock {
    fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        let x = &self.attn.forward(cx, &self.attn_norm.forward(cx, x)?)?.add(x)?;
        self.mlp.forward(cx, &self.mlp_norm.forward(cx, x)?)?.add(x)
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
            let e = model.blocks[0].attn.forward(&cx, &zeros(DType::F32, &[3, 2])?).unwrap_err().to_string();
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
