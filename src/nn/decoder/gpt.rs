//! GPT: the decoder-only transformer of Radford et al. 2019. Its head shares the token table.

use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::nn::decoder::decoder_config::{DecoderConfig, DecoderLayer, FeedForwardConfig};
use crate::nn::decoder::model::Decoder;
use crate::nn::forward::Forward;
use crate::nn::layers::mlp::MlpConfig;
use crate::nn::layers::module::Module;
use crate::nn::layers::norm_config::NormConfig;
use crate::nn::layers::self_attention::SelfAttentionConfig;
use crate::nn::params::Params;
use crate::ops::Activation;

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

/// A GPT (Radford et al. 2019) with learned positions: a [`Decoder`] with a tied head. It keeps ids only; the values are
/// in its [`Params`].
#[derive(Clone, Debug)]
pub struct Gpt {
    config: GptConfig,
    decoder: Decoder,
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
    /// Refuses sizes that do not fit one another, and a plan that cannot shard them. A refusal leaves the parameters as
    /// they were.
    pub fn new(params: &mut Params, config: GptConfig) -> Result<Gpt> {
        let GptConfig { vocabulary, block, layers, heads, width, dropout, bias } = config;
        if heads == 0 || width % heads != 0 {
            let given = format!("width {width}, {heads} heads");
            return Err(Error::invalid("gpt", "the width is not a multiple of the heads", given, ""));
        }
        let attention = SelfAttentionConfig {
            qkv_bias: bias,
            out_bias: bias,
            attention_dropout: dropout,
            dropout,
            ..SelfAttentionConfig::new(heads, heads, width / heads)
        };
        let mlp = MlpConfig { hidden: 4 * width, gated: false, activation: Activation::Gelu, bias, dropout };
        let layer = DecoderLayer { attention, feed_forward: FeedForwardConfig::Mlp(mlp) };
        let norm = NormConfig::Layer { eps: 1e-5, bias };
        let of_decoder = DecoderConfig {
            learned_positions: true,
            tied_head: true,
            dropout,
            ..DecoderConfig::new(vocabulary, block, width, norm, vec![layer; layers])
        };
        Ok(Gpt { config, decoder: Decoder::named(params, of_decoder, "gpt")? })
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

impl Module for Gpt {
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
    use crate::nn::{Plan, SelfAttention};
    use crate::placement::Layout;
    use crate::rng::Init;
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
            let mut root = params.root();
            let scope = root.child("h.1.attn");
            let attention = SelfAttention::new(scope, 2, SelfAttentionConfig::new(1, 1, 2), Init::Ones)?;
            let cx = Forward::eval(&params);
            let e = attention.forward(&cx, &zeros(DType::F32, &[3, 2])?).unwrap_err().to_string();
            assert_eq!(
                e,
                "attention: wants three dims: batch, time, width; got f32[3, 2]@() at h.1.attn; reshape it first"
            );
            assert_eq!(model.forward(&cx, &zeros(DType::I64, &[2, 0])?)?.shape()[..], [2, 0, 5]);
            Ok(())
        };
        spmd(1, run).unwrap_or_else(|e| panic!("{e}"));
    }
}
