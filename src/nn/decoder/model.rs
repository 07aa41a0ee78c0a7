//! Decoder-only transformers of any configuration.

use std::sync::Arc;

use crate::dtensor::{CrossEntropyOptions, DTensor};
use crate::error::{Error, Result};
use crate::nn::decoder::decoder_config::{DecoderConfig, DecoderLayer, FeedForwardConfig};
use crate::nn::forward::Forward;
use crate::nn::layers::linear::{AdaptedLinear, Embedding, Linear};
use crate::nn::layers::map_inits::MapInits;
use crate::nn::layers::mlp::Mlp;
use crate::nn::layers::module::Module;
use crate::nn::layers::moe::Moe;
use crate::nn::layers::norm_config::Norm;
use crate::nn::layers::self_attention::SelfAttention;
use crate::nn::layers::sequences::Sequences;
use crate::nn::params::Params;
use crate::nn::params::scope::Scope;
use crate::rng::Init;

/// The target of tokens that [`Decoder::loss`] leaves out, as in PyTorch.
pub(in crate::nn) const IGNORED: i64 = -100;

/// A decoder-only transformer of any [`DecoderConfig`]. It keeps ids only; the values are in its [`Params`].
///
/// The parameters are `wte.weight`, `wpe.weight` for learned positions, for each layer `h.0.attn_norm`, `h.0.attn`
/// ([`SelfAttention`]), `h.0.mlp_norm` and `h.0.mlp` ([`Mlp`]) or `h.0.moe` ([`Moe`]), for normalised
/// results `h.0.attn_after_norm` and `h.0.mlp_after_norm`, and at the end `norm` and, unless it is tied, `head.weight`.
#[derive(Clone, Debug)]
pub struct Decoder {
    config: DecoderConfig,
    tokens: Embedding,
    positions: Option<Embedding>,
    blocks: Vec<Arc<DecoderBlock>>,
    norm: Norm,
    head: Option<Linear>,
    /// The sites after the embedding and before the head.
    sites: [String; 2],
    verb: &'static str,
}

#[derive(Clone, Debug)]
struct DecoderBlock {
    path: String,
    attn_norm: Norm,
    attn: SelfAttention,
    attn_after_norm: Option<Norm>,
    mlp_norm: Norm,
    mlp: FeedForward,
    mlp_after_norm: Option<Norm>,
}

#[derive(Clone, Debug)]
enum FeedForward {
    Mlp(Box<Mlp>),
    Moe(Box<Moe>),
}

impl Decoder {
    /// Declares all parameters in `params`. Weights are normal with the configuration's standard deviation, biases zero.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh};
    /// use isoshard::nn::{Activation, Decoder, DecoderConfig, DecoderLayer, FeedForwardConfig, MlpConfig, NormConfig};
    /// use isoshard::nn::{Params, Plan, RotaryConfig, SelfAttentionConfig};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let norm = NormConfig::Rms { eps: 1e-6, unit_offset: false };
    ///     // Qwen3 normalises the heads' queries and keys.
    ///     let attention = SelfAttentionConfig {
    ///         rotary: Some(RotaryConfig::plain(1e6)), head_norm: Some(norm), ..SelfAttentionConfig::new(4, 2, 6)
    ///     };
    ///     let activation = Activation::Silu;
    ///     let mlp = MlpConfig { hidden: 20, gated: true, activation, bias: false, dropout: 0.0 };
    ///     let layer = DecoderLayer { attention, feed_forward: FeedForwardConfig::Mlp(mlp) };
    ///     let config = DecoderConfig { tied_head: true, ..DecoderConfig::new(11, 6, 8, norm, vec![layer; 2]) };
    ///     let model = Decoder::new(&mut params, config)?;
    ///     assert!(params.find_piece("h.1.attn.v.weight").is_some() && params.find("head.weight").is_none());
    ///     assert!(params.find("h.0.attn.q_norm.weight").is_some() && model.config().layers.len() == 2);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses sizes that do not fit one another, and a plan that cannot shard them. A refusal leaves the parameters as
    /// they were.
    pub fn new(params: &mut Params, config: DecoderConfig) -> Result<Decoder> {
        Decoder::named(params, config, "decoder")
    }

    /// Does the same as [`Decoder::new`], with refusals in the name of `verb`.
    pub(in crate::nn) fn named(
        params: &mut Params,
        config: DecoderConfig,
        verb: &'static str,
    ) -> Result<Decoder> {
        params.all_or_none(|params| Decoder::declare(params, config, verb))
    }

    fn declare(params: &mut Params, config: DecoderConfig, verb: &'static str) -> Result<Decoder> {
        let DecoderConfig { vocabulary, context, width, norm, init_std: std, .. } = config;
        let init = Init::Normal { mean: 0.0, std };
        let residual = Init::Normal { mean: 0.0, std: std / (2.0 * config.layers.len() as f64).sqrt() };
        let mut root = params.root();
        let sites = [root.site("embedding"), root.site("head.input")];
        let tokens = Embedding::new(root.child("wte"), vocabulary, width, init)?;
        let positions = match config.learned_positions {
            true => Some(Embedding::new(root.child("wpe"), context, width, init)?),
            false => None,
        };
        let block = |mut scope: Scope<'_>, layer: &DecoderLayer| -> Result<DecoderBlock> {
            let inits = MapInits { inner: init, out: residual };
            let after = |scope: Scope<'_>| match config.norm_results {
                true => Norm::new(scope, width, norm).map(Some),
                false => Ok(None),
            };
            Ok(DecoderBlock {
                path: scope.block_here(),
                attn_norm: Norm::new(scope.child("attn_norm"), width, norm)?,
                attn: SelfAttention::new(scope.child("attn"), width, layer.attention, inits)?,
                attn_after_norm: after(scope.child("attn_after_norm"))?,
                mlp_norm: Norm::new(scope.child("mlp_norm"), width, norm)?,
                mlp: FeedForward::new(&mut scope, width, layer.feed_forward, inits)?,
                mlp_after_norm: after(scope.child("mlp_after_norm"))?,
            })
        };
        let mut h = root.child("h");
        let blocks =
            config.layers.iter().enumerate().map(|(i, layer)| block(h.child(i), layer).map(Arc::new));
        let blocks = blocks.collect::<Result<_>>()?;
        let norm = Norm::new(root.child("norm"), width, norm)?;
        let head = match config.tied_head {
            true => None,
            false => Some(Linear::without_bias(root.child("head"), width, vocabulary, init)?),
        };
        Ok(Decoder { config, tokens, positions, blocks, norm, head, sites, verb })
    }

    /// Returns the model's configuration.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Decoder, DecoderConfig, NormConfig, Params, Plan}};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let norm = NormConfig::Layer { eps: 1e-5, bias: true };
    ///     let model = Decoder::new(&mut params, DecoderConfig::new(11, 6, 8, norm, Vec::new()))?;
    ///     assert_eq!(model.config().vocabulary, 11);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Returns the scores of [`Module::forward`] for rows that may hold several documents.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// use isoshard::nn::{Decoder, DecoderConfig, Forward, Module, NormConfig, Params, Plan, Sequences};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let mut params = Params::new(&mesh, Plan::default(), 7)?;
    ///     let norm = NormConfig::Layer { eps: 1e-5, bias: true };
    ///     let config = DecoderConfig { learned_positions: true, ..DecoderConfig::new(11, 6, 8, norm, Vec::new()) };
    ///     let model = Decoder::new(&mut params, config)?;
    ///     let put = |x: Vec<i64>| DTensor::distribute(&mesh, &Tensor::from_vec(x, [1, 3])?, "()");
    ///     let (cx, tokens) = (Forward::eval(&params), put(vec![5, 7, 5])?);
    ///     let packed = Sequences::packed(&put(vec![0, 0, 1])?, &put(vec![0, 1, 0])?)?;
    ///     let scores = model.forward_in(&cx, &tokens, &packed)?.full_tensor()?.to_vec::<f32>()?;
    ///     assert_eq!(scores[..11], scores[22..]); // both documents begin with token 5
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`Module::forward`] refuses, and sequences of another shape.
    pub fn forward_in(&self, cx: &Forward, tokens: &DTensor, sequences: &Sequences) -> Result<DTensor> {
        let refused =
            |rule: &str, remedy: &str| Error::invalid(self.verb, rule, tokens.spec().to_string(), remedy);
        let &[_, time] = &tokens.shape()[..] else {
            return Err(refused("wants tokens of two dims: batch, time", "reshape them first"));
        };
        if time > self.config.context {
            let remedy = format!("pass at most {} tokens", self.config.context);
            return Err(refused("the sequence is longer than the context", &remedy));
        }
        let mut x = self.tokens.forward(cx, tokens)?;
        if let Some(scale) = self.config.embedding_scale {
            x = x.mul_scalar(scale)?;
        }
        let mut x = cx.site(&self.sites[0], x)?;
        if let Some(learned) = &self.positions {
            x = x.add(&learned.forward(cx, &sequences.positions(tokens, time)?)?)?;
        }
        let mut x = cx.dropout(x, self.config.dropout)?;
        for block in &self.blocks {
            let (part, sequences) = (block.clone(), sequences.clone());
            x = cx.block(&block.path, &[&x], move |cx, ins| part.forward(cx, &ins[0], &sequences))?;
        }
        let x = cx.site(&self.sites[1], self.norm.forward(cx, &x)?)?;
        let scores = match &self.head {
            Some(head) => head.forward(cx, &x)?,
            None => self.tokens.scores(cx, &x)?,
        };
        match self.config.score_soft_cap {
            Some(cap) => scores.div_scalar(cap)?.tanh()?.mul_scalar(cap),
            None => Ok(scores),
        }
    }

    /// Returns the mean cross entropy, of shape `[]`, of predicting `targets` from `tokens`, both `[batch, time]` (i64).
    /// Tokens with the target -100 are left out, and do not count in the mean. The losses of routers are not part of it.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// use isoshard::nn::{Decoder, DecoderConfig, Forward, NormConfig, Params, Plan};
    /// let losses = spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let norm = NormConfig::Rms { eps: 1e-6, unit_offset: false };
    ///     let model = Decoder::new(&mut params, DecoderConfig::new(11, 6, 8, norm, Vec::new()))?;
    ///     let put = |x: Vec<i64>| DTensor::distribute(&mesh, &Tensor::from_vec(x, [2, 2])?, "(S0)");
    ///     let loss = |targets| model.loss(&Forward::eval(&params), &put(vec![1, 2, 3, 4])?, &put(targets)?);
    ///     Ok([
    ///         loss(vec![2, 3, 4, 5])?.item()?,
    ///         loss(vec![-100, -100, -100, 5])?.item()?,
    ///     ])
    /// })?;
    /// assert!(losses[0].iter().all(|loss| (loss - 11f64.ln()).abs() < 0.2)); // a guess among 11 tokens
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`Module::forward`] refuses, and targets outside the vocabulary.
    pub fn loss(&self, cx: &Forward, tokens: &DTensor, targets: &DTensor) -> Result<DTensor> {
        self.loss_in(cx, tokens, targets, &Sequences::default())
    }

    /// Returns [`Decoder::loss`] for rows that may hold several documents.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// use isoshard::nn::{Decoder, DecoderConfig, Forward, NormConfig, Params, Plan, Sequences};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let mut params = Params::new(&mesh, Plan::default(), 7)?;
    ///     let norm = NormConfig::Rms { eps: 1e-6, unit_offset: false };
    ///     let model = Decoder::new(&mut params, DecoderConfig::new(11, 6, 8, norm, Vec::new()))?;
    ///     let put = |x: Vec<i64>| DTensor::distribute(&mesh, &Tensor::from_vec(x, [1, 3])?, "()");
    ///     let packed = Sequences::packed(&put(vec![0, 0, 1])?, &put(vec![0, 1, 0])?)?;
    ///     // The last token of the first document predicts nothing.
    ///     let (tokens, targets) = (put(vec![1, 2, 3])?, put(vec![2, -100, 4])?);
    ///     assert!(model.loss_in(&Forward::eval(&params), &tokens, &targets, &packed)?.shape().is_empty());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`Decoder::loss`] refuses, and sequences of another shape.
    pub fn loss_in(
        &self,
        cx: &Forward,
        tokens: &DTensor,
        targets: &DTensor,
        sequences: &Sequences,
    ) -> Result<DTensor> {
        let options = CrossEntropyOptions { ignore_index: Some(IGNORED), ..Default::default() };
        self.forward_in(cx, tokens, sequences)?.cross_entropy_with(targets, &options)
    }
}

impl Decoder {
    /// Returns the linear maps that can have adapters.
    pub(in crate::nn) fn linear_maps(&mut self) -> Vec<AdaptedLinear<'_>> {
        let mut maps = Vec::new();
        for block in self.blocks.iter_mut().map(Arc::make_mut) {
            maps.extend(block.attn.linear_maps());
            match &mut block.mlp {
                FeedForward::Mlp(mlp) => maps.extend(mlp.linear_maps()),
                FeedForward::Moe(moe) => maps.extend(moe.linear_maps()),
            }
        }
        maps.extend(self.head.as_mut().map(AdaptedLinear::One));
        maps
    }
}

impl Module for Decoder {
    /// Returns the scores `[batch, time, vocabulary]` of the token that follows each of `tokens` `[batch, time]` (i64).
    ///
    /// # Errors
    /// Refuses tokens outside the vocabulary and sequences longer than the context; returns an error if a rank fails.
    fn forward(&self, cx: &Forward, tokens: &DTensor) -> Result<DTensor> {
        self.forward_in(cx, tokens, &Sequences::default())
    }
}

impl DecoderBlock {
    fn forward(&self, cx: &Forward, x: &DTensor, sequences: &Sequences) -> Result<DTensor> {
        let y = self.attn.forward_in(cx, &self.attn_norm.forward(cx, x)?, sequences)?;
        let y = normalised(&self.attn_after_norm, cx, y)?;
        let (y, x) = self.mlp_norm.forward_sum(cx, &y, x)?;
        let y = self.mlp.forward(cx, &y)?;
        normalised(&self.mlp_after_norm, cx, y)?.add(&x)
    }
}

/// Returns `x` after a normalisation, if there is one.
fn normalised(norm: &Option<Norm>, cx: &Forward, x: DTensor) -> Result<DTensor> {
    match norm {
        Some(norm) => norm.forward(cx, &x),
        None => Ok(x),
    }
}

impl FeedForward {
    fn new(
        scope: &mut Scope<'_>,
        width: usize,
        config: FeedForwardConfig,
        inits: MapInits,
    ) -> Result<FeedForward> {
        Ok(match config {
            FeedForwardConfig::Mlp(mlp) => {
                FeedForward::Mlp(Box::new(Mlp::new(scope.child("mlp"), width, mlp, inits)?))
            }
            FeedForwardConfig::Moe(moe) if moe.width != width => {
                let given = format!("width {} in a decoder of width {width}", moe.width);
                return Err(Error::invalid("moe", "the experts have another width", given, ""));
            }
            FeedForwardConfig::Moe(moe) => {
                FeedForward::Moe(Box::new(Moe::new(scope.child("moe"), moe, inits)?))
            }
        })
    }

    fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        match self {
            FeedForward::Mlp(mlp) => mlp.forward(cx, x),
            FeedForward::Moe(moe) => moe.forward(cx, x),
        }
    }
}
