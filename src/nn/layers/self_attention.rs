//! Self-attention with the options of today's decoders.

use crate::comm::ModulePath;
use crate::dtensor::{AttentionOptions, DTensor};
use crate::error::{Error, Result};
use crate::nn::forward::Forward;
use crate::nn::layers::linear::{AdaptedLinear, FusedLinear, Linear};
use crate::nn::layers::map_inits::MapInits;
use crate::nn::layers::module::Module;
use crate::nn::layers::norm_config::{Norm, NormConfig};
use crate::nn::layers::rotary_config::RotaryConfig;
use crate::nn::layers::sequences::Sequences;
use crate::nn::params::pieces::FusedMaps;
use crate::nn::params::scope::Scope;

/// The sizes and options of a [`SelfAttention`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SelfAttentionConfig {
    /// The number of query heads.
    pub heads: usize,
    /// The number of key and value heads, each shared by `heads / kv_heads` neighbouring query heads. Tensor parallelism
    /// gives each rank whole heads of keys and values, with the query heads that share them.
    pub kv_heads: usize,
    /// The width of a head.
    pub head_width: usize,
    /// The rotary positions of queries and keys, if they have any.
    pub rotary: Option<RotaryConfig>,
    /// `true` if the maps to queries, keys and values have biases.
    pub qkv_bias: bool,
    /// `true` if the map of the result has a bias.
    pub out_bias: bool,
    /// A normalisation of each head's queries and keys, before the rotation, as in Qwen3 and Gemma 3.
    pub head_norm: Option<NormConfig>,
    /// The factor of the scores, or `None` for `1 / sqrt(head_width)`.
    pub scale: Option<f64>,
    /// The number of keys that a query sees, its own position included: a sliding window. `None` for all earlier keys.
    pub window: Option<usize>,
    /// The soft cap of the scores ([`AttentionOptions::soft_cap`]).
    pub soft_cap: Option<f64>,
    /// The probability of dropping an attention probability.
    pub attention_dropout: f64,
    /// The probability of dropping an element of the result.
    pub dropout: f64,
}

impl SelfAttentionConfig {
    /// Returns the sizes of heads, without any of the options.
    ///
    /// ```
    /// use isoshard::nn::{RotaryConfig, SelfAttentionConfig};
    /// let llama = SelfAttentionConfig { rotary: Some(RotaryConfig::plain(5e5)), ..SelfAttentionConfig::new(32, 8, 128) };
    /// assert!(llama.kv_heads == 8 && llama.window.is_none() && !llama.qkv_bias);
    /// ```
    pub fn new(heads: usize, kv_heads: usize, head_width: usize) -> SelfAttentionConfig {
        SelfAttentionConfig {
            heads,
            kv_heads,
            head_width,
            rotary: None,
            qkv_bias: false,
            out_bias: false,
            head_norm: None,
            scale: None,
            window: None,
            soft_cap: None,
            attention_dropout: 0.0,
            dropout: 0.0,
        }
    }

    fn check(&self) -> Result<()> {
        let SelfAttentionConfig { heads, kv_heads, head_width, rotary, window, .. } = *self;
        let refused = |rule: &str, given: String| Err(Error::invalid("attention", rule, given, ""));
        if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
            let given = format!("{heads} heads, {kv_heads} of keys and values");
            return refused("the heads are not a multiple of those of keys and values", given);
        }
        if head_width == 0 {
            return refused("a head has one or more elements", format!("width {head_width}"));
        }
        if let Some(rotary) = rotary {
            let width = rotary.width.unwrap_or(head_width);
            if !width.is_multiple_of(2) {
                return refused(
                    "rotary positions turn pairs: a head's width is even",
                    format!("width {width}"),
                );
            }
            rotary.frequencies(head_width)?;
        }
        if window == Some(0) {
            return refused("a window holds one or more keys", "a window of 0".into());
        }
        Ok(())
    }
}

/// Causal self-attention (Vaswani et al. 2017), with heads of keys and values for groups of query heads (Ainslie et al.
/// 2023) and the options of [`SelfAttentionConfig`].
///
/// The maps to queries, keys and values are one parameter `qkv.weight` `[kv_heads, rows, width]`: a group holds the rows
/// of its query heads, then those of its keys and of its values. A shard of whole groups has the queries, keys and
/// values that belong together. The pieces are `q.weight`, `k.weight` and `v.weight`.
#[derive(Clone, Debug)]
pub struct SelfAttention {
    config: SelfAttentionConfig,
    qkv: FusedLinear,
    /// The normalisations of queries and keys.
    norms: Option<[Norm; 2]>,
    out: Linear,
    input: String,
    path: ModulePath,
}

impl SelfAttention {
    /// Declares the maps `qkv` and `out` `[width, heads · head_width]`, the
    /// normalisations `q_norm` and `k_norm` `[head_width]` if the options ask for them, and the site `input`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::Layout, rng::Init, tensor::DType};
    /// use isoshard::nn::{Forward, Module, Params, Plan, RotaryConfig, SelfAttention, SelfAttentionConfig};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let plan = Plan::default().shard_blocks("attn.qkv.weight", "tp", 0, 2);
    ///     let mut params = Params::new(&mesh, plan.shard_blocks("attn.out.weight", "tp", 1, 2), 7)?;
    ///     let config = SelfAttentionConfig {
    ///         rotary: Some(RotaryConfig::plain(1e4)), window: Some(3), ..SelfAttentionConfig::new(6, 2, 4)
    ///     };
    ///     let init = Init::Normal { mean: 0.0, std: 0.02 };
    ///     let attention = SelfAttention::new(params.root().child("attn"), 10, config, init)?;
    ///     let (qkv, k) = params.find_piece("attn.k.weight").expect("it is declared");
    ///     assert_eq!(k.shape()[..], [8, 10]); // two heads of width 4
    ///     assert_eq!(params.value(qkv).spec().to_string(), "f32[2, 20, 10]@(tp:S0)");
    ///     let x = DTensor::full(&mesh, DType::F32, [3, 5, 10], Layout::replicated(1), 1.0)?;
    ///     assert_eq!(attention.forward(&Forward::eval(&params), &x)?.shape()[..], [3, 5, 10]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses heads that are not a multiple of `kv_heads`, a rotation of an odd number of elements, a window of no key,
    /// and what [`Scope::param`] refuses.
    pub fn new(
        scope: Scope<'_>,
        width: usize,
        config: SelfAttentionConfig,
        inits: impl Into<MapInits>,
    ) -> Result<SelfAttention> {
        SelfAttention::declare(scope, width, config, inits.into())
    }

    fn declare(
        mut scope: Scope<'_>,
        width: usize,
        config: SelfAttentionConfig,
        inits: MapInits,
    ) -> Result<SelfAttention> {
        config.check()?;
        let SelfAttentionConfig { heads, kv_heads, head_width: d, head_norm, .. } = config;
        let maps = FusedMaps::new(kv_heads, [("q", heads / kv_heads * d), ("k", d), ("v", d)])?;
        let qkv = FusedLinear::declare(scope.child("qkv"), width, &maps, config.qkv_bias, inits.inner)?;
        let norms = match head_norm {
            Some(norm) => {
                Some([Norm::new(scope.child("q_norm"), d, norm)?, Norm::new(scope.child("k_norm"), d, norm)?])
            }
            None => None,
        };
        Ok(SelfAttention {
            config,
            qkv,
            norms,
            out: Linear::declare(scope.child("out"), heads * d, width, config.out_bias, inits.out)?,
            input: scope.site("input"),
            path: scope.module_path(),
        })
    }

    /// Attends over `x` `[batch, time, width]` as [`Module::forward`] does, with the positions and documents of
    /// `sequences`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, rng::Init, tensor::Tensor};
    /// use isoshard::nn::{Forward, Module, Params, Plan, SelfAttention, SelfAttentionConfig, Sequences};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let mut params = Params::new(&mesh, Plan::default(), 7)?;
    ///     let config = SelfAttentionConfig::new(1, 1, 2);
    ///     let attention = SelfAttention::new(params.root().child("attn"), 2, config, Init::Ones)?;
    ///     let whole = |x: Tensor| DTensor::distribute(&mesh, &x, "()");
    ///     let x = whole(Tensor::from_vec(vec![1.0f32, 0.0, 3.0, 0.0], [1, 2, 2])?)?;
    ///     let documents = whole(Tensor::from_vec(vec![0i64, 1], [1, 2])?)?;
    ///     let positions = whole(Tensor::from_vec(vec![0i64, 0], [1, 2])?)?;
    ///     let cx = Forward::eval(&params);
    ///     let y = attention.forward_in(&cx, &x, &Sequences::packed(&documents, &positions)?)?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [2.0, 2.0, 6.0, 6.0]); // each document by itself
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an `x` of other dims or another width, and sequences of another shape; returns an error if a rank fails.
    pub fn forward_in(&self, cx: &Forward, x: &DTensor, sequences: &Sequences) -> Result<DTensor> {
        let _scope = self.path.enter();
        let &[b, t, _] = &x.shape()[..] else {
            let rule = "wants three dims: batch, time, width";
            return Err(Error::invalid("attention", rule, x.spec().to_string(), "reshape it first")
                .at(self.path.as_str()));
        };
        let x = cx.site(&self.input, x.clone())?;
        let qkv = self.qkv.forward(cx, &x)?;
        let heads = self.config.heads * self.config.head_width;
        let attend = || self.attend(cx, &qkv, sequences)?.permute(&[0, 2, 1, 3])?.reshape([b, t, heads]);
        let y = attend().map_err(|e| e.at(self.path.as_str()))?;
        let y = self.out.forward(cx, &y)?;
        cx.leave(cx.dropout(y, self.config.dropout)?)
    }

    pub(in crate::nn) fn linear_maps(&mut self) -> [AdaptedLinear<'_>; 2] {
        [AdaptedLinear::Fused(&mut self.qkv), AdaptedLinear::One(&mut self.out)]
    }

    /// Attends with queries, keys and values `[batch, time, kv_heads, rows]`; the result is `[batch, heads, time, width]`.
    fn attend(&self, cx: &Forward, qkv: &DTensor, sequences: &Sequences) -> Result<DTensor> {
        let SelfAttentionConfig { heads, kv_heads, head_width: d, scale, attention_dropout, .. } =
            self.config;
        let &[b, t, ..] = &qkv.shape()[..] else { unreachable!("the map keeps the leading dims") };
        let shared_by = heads / kv_heads;
        let parts = qkv.permute(&[0, 2, 1, 3])?.split(&[shared_by * d, d, d], -1)?;
        let (mut q, mut k, v) = (parts[0].clone(), parts[1].clone(), &parts[2]);
        if shared_by > 1 {
            q = q.reshape([b, kv_heads, t, shared_by, d])?.permute(&[0, 1, 3, 2, 4])?;
        }
        if let Some([q_norm, k_norm]) = &self.norms {
            (q, k) = (q_norm.forward(cx, &q)?, k_norm.forward(cx, &k)?);
        }
        if let Some(rotary) = &self.config.rotary {
            (q, k) = (sequences.rotate(&q, rotary)?, sequences.rotate(&k, rotary)?);
        }
        if shared_by > 1 {
            q = q.reshape([b, heads, t, d])?;
        }
        let mut options = AttentionOptions::causal(scale.unwrap_or(1.0 / (d as f64).sqrt()));
        if let Some(window) = self.config.window {
            options = options.window(window - 1, 0);
        }
        if let Some(cap) = self.config.soft_cap {
            options = options.soft_cap(cap);
        }
        if let Some(documents) = sequences.documents() {
            options = options.documents(documents, documents);
        }
        cx.attention_with([&q, &k, v], &options, attention_dropout)
    }
}

impl Module for SelfAttention {
    /// Attends over `x` `[batch, time, width]`; the result has the same shape.
    ///
    /// # Errors
    /// Refuses an `x` of other dims or another width; returns an error if a rank fails.
    fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        self.forward_in(cx, x, &Sequences::default())
    }
}
