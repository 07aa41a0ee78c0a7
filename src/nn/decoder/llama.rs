//! Llama: the decoder-only transformer of Touvron et al. 2023.

use crate::dtensor::DTensor;
use crate::error::Result;
use crate::nn::decoder::decoder_config::{DecoderConfig, DecoderLayer, FeedForwardConfig};
use crate::nn::decoder::model::Decoder;
use crate::nn::forward::Forward;
use crate::nn::layers::mlp::MlpConfig;
use crate::nn::layers::module::Module;
use crate::nn::layers::norm_config::NormConfig;
use crate::nn::layers::rotary_config::RotaryConfig;
use crate::nn::layers::self_attention::SelfAttentionConfig;
use crate::nn::params::Params;
use crate::ops::Activation;

/// The sizes of a Llama.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LlamaConfig {
    /// The number of different tokens.
    pub vocabulary: usize,
    /// The longest sequence.
    pub block: usize,
    /// The number of blocks.
    pub layers: usize,
    /// The number of query heads.
    pub heads: usize,
    /// The number of key and value heads, a divisor of `heads`. Tensor parallelism gives each rank whole heads, with
    /// the query heads that share them.
    pub kv_heads: usize,
    /// The width of a head: an even number, usually `width / heads`.
    pub head_width: usize,
    /// The width of the residual stream.
    pub width: usize,
    /// The hidden width of the MLPs.
    pub hidden: usize,
    /// The base of the rotary angles, usually 10000.
    pub base: f64,
    /// The probability of dropping embeddings, attention probabilities and the blocks' outputs; 0 in Touvron et al.
    pub dropout: f64,
}

/// A Llama: root-mean-square norms before each part, rotary positions, grouped-query attention, SiLU-gated MLPs, no
/// biases, and a head of its own. A [`Decoder`] that keeps ids only; the values are in its [`Params`].
#[derive(Clone, Debug)]
pub struct Llama {
    config: LlamaConfig,
    decoder: Decoder,
}

impl Llama {
    /// Declares all parameters in `params`, drawn from a normal distribution with standard deviation 0.02, divided by
    /// `sqrt(2 · layers)` for the two maps of each block that write to the residual stream.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{LlamaConfig, Llama, Params, Plan}};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let config = LlamaConfig {
    ///         vocabulary: 11, block: 6, layers: 2, heads: 4, kv_heads: 2, head_width: 2, width: 8, hidden: 20,
    ///         base: 1e4, dropout: 0.0,
    ///     };
    ///     let model = Llama::new(&mut params, config)?;
    ///     assert!(params.find("h.1.attn.out.weight").is_some() && model.config().layers == 2);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses sizes that do not fit one another, and a plan that cannot shard them. A refusal leaves the parameters as
    /// they were.
    pub fn new(params: &mut Params, config: LlamaConfig) -> Result<Llama> {
        let LlamaConfig { vocabulary, block, layers, heads, kv_heads, head_width, .. } = config;
        let LlamaConfig { width, hidden, base, dropout, .. } = config;
        let attention = SelfAttentionConfig {
            rotary: Some(RotaryConfig::plain(base)),
            attention_dropout: dropout,
            dropout,
            ..SelfAttentionConfig::new(heads, kv_heads, head_width)
        };
        let mlp = MlpConfig { hidden, gated: true, activation: Activation::Silu, bias: false, dropout };
        let layer = DecoderLayer { attention, feed_forward: FeedForwardConfig::Mlp(mlp) };
        let norm = NormConfig::Rms { eps: 1e-6, unit_offset: false };
        let of_decoder = DecoderConfig {
            dropout,
            ..DecoderConfig::new(vocabulary, block, width, norm, vec![layer; layers])
        };
        Ok(Llama { config, decoder: Decoder::named(params, of_decoder, "llama")? })
    }

    /// Returns the model's sizes.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{LlamaConfig, Llama, Params, Plan}};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let config = LlamaConfig {
    ///         vocabulary: 11, block: 6, layers: 2, heads: 4, kv_heads: 2, head_width: 2, width: 8, hidden: 20,
    ///         base: 1e4, dropout: 0.0,
    ///     };
    ///     let model = Llama::new(&mut params, config)?;
    ///     assert_eq!(*model.config(), config);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// Returns the mean cross entropy, of shape `[]`, of predicting `targets` from `tokens`, both `[batch, time]`
    /// (i64).
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// use isoshard::nn::{Forward, Llama, LlamaConfig, Params, Plan};
    /// let losses = spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let config = LlamaConfig {
    ///         vocabulary: 11, block: 6, layers: 2, heads: 4, kv_heads: 2, head_width: 2, width: 8, hidden: 20,
    ///         base: 1e4, dropout: 0.0,
    ///     };
    ///     let model = Llama::new(&mut params, config)?;
    ///     let tokens = DTensor::zeros(&mesh, DType::I64, [3, 6], "(S0)")?;
    ///     model.loss(&Forward::eval(&params), &tokens, &tokens)?.item()
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

impl Module for Llama {
    /// Returns the scores `[batch, time, vocabulary]` of the token that follows each of `tokens` `[batch, time]` (i64).
    ///
    /// # Errors
    /// Refuses tokens outside the vocabulary and sequences longer than the block; returns an error if a rank fails.
    fn forward(&self, cx: &Forward, tokens: &DTensor) -> Result<DTensor> {
        self.decoder.forward(cx, tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::spmd;
    use crate::dtensor::DeviceMesh;
    use crate::nn::Plan;
    use crate::placement::Layout;
    use crate::tensor::{DType, Tensor};

    const CONFIG: LlamaConfig = LlamaConfig {
        vocabulary: 5,
        block: 4,
        layers: 1,
        heads: 3,
        kv_heads: 1,
        head_width: 2,
        width: 7,
        hidden: 5,
        base: 1e4,
        dropout: 0.0,
    };

    fn alone(f: impl Fn(&DeviceMesh, &mut Params) -> Result<()> + Send + Sync + 'static) {
        let run = move |rank| {
            let mesh = DeviceMesh::new(&rank, &[])?;
            f(&mesh, &mut Params::new(&mesh, Plan::default(), 1)?)
        };
        spmd(1, run).unwrap_or_else(|e| panic!("{e}"));
    }

    #[test]
    fn refuses_what_does_not_fit() {
        alone(|mesh, params| {
            let model = Llama::new(params, CONFIG)?;
            let cx = Forward::eval(params);
            let zeros = |dtype, shape: &[usize]| DTensor::zeros(mesh, dtype, shape, Layout::replicated(0));
            for shape in [&[3][..], &[], &[1, 2, 3], &[1, 5]] {
                let e = model.forward(&cx, &zeros(DType::I64, shape)?).unwrap_err().to_string();
                assert!(e.starts_with("llama: "), "{e}");
            }
            assert_eq!(model.forward(&cx, &zeros(DType::I64, &[2, 0])?)?.shape()[..], [2, 0, 5]);
            Ok(())
        });
        for (config, want) in [
            (
                LlamaConfig { kv_heads: 2, ..CONFIG },
                "attention: the heads are not a multiple of those of keys and values; got 3 heads, 2 of keys and values",
            ),
            (
                LlamaConfig { head_width: 3, ..CONFIG },
                "attention: rotary positions turn pairs: a head's width is even; got width 3",
            ),
        ] {
            alone(move |_, params| {
                assert_eq!(Llama::new(params, config).unwrap_err().to_string(), want);
                Ok(())
            });
        }
    }

    /// The scores of a token depend on the tokens up to it, in their order; all parameters get gradients.
    #[test]
    fn looks_back_only_and_learns_everywhere() {
        alone(|mesh, params| {
            let model = Llama::new(params, CONFIG)?;
            let scores = |tokens: [i64; 4]| -> Result<Vec<f64>> {
                let tokens = Tensor::from_slice(&tokens, [1, 4])?;
                let tokens = DTensor::distribute(mesh, &tokens, Layout::replicated(0))?;
                Ok(model.forward(&Forward::eval(params), &tokens)?.full_tensor()?.to_f64_vec())
            };
            let (a, b, c) = (scores([1, 2, 3, 4])?, scores([1, 2, 3, 0])?, scores([2, 1, 3, 4])?);
            assert_eq!(a[..15], b[..15]);
            assert_ne!(a[15..], b[15..]);
            assert_ne!(a[15..], c[15..], "positions count");
            let tokens = Tensor::from_slice(&[0i64, 1, 2, 3], [2, 2])?;
            let tokens = DTensor::distribute(mesh, &tokens, Layout::replicated(0))?;
            let grads = model.loss(&Forward::train_without_dropout(params), &tokens, &tokens)?.backward()?;
            for id in params.ids() {
                let grad = grads.get(params.value(id)).expect("a gradient").full_tensor()?;
                assert!(grad.to_f64_vec().iter().any(|&g| g != 0.0), "{}", params.path(id));
            }
            Ok(())
        });
    }
}
