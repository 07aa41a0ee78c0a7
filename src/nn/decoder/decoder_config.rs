//! The sizes and kinds of a decoder's parts.

use crate::nn::layers::mlp::MlpConfig;
use crate::nn::layers::moe::MoeConfig;
use crate::nn::layers::norm_config::NormConfig;
use crate::nn::layers::self_attention::SelfAttentionConfig;

/// The configuration of a [`Decoder`](crate::nn::Decoder): GPT-2, Llama, Mistral, Qwen, Gemma and their mixtures of experts
/// are values of it.
///
/// ```
/// use isoshard::nn::{Activation, DecoderConfig, DecoderLayer, FeedForwardConfig, MlpConfig, NormConfig};
/// use isoshard::nn::{RotaryConfig, SelfAttentionConfig};
/// // Mistral: grouped heads, a sliding window, SiLU-gated MLPs.
/// let attention = SelfAttentionConfig {
///     rotary: Some(RotaryConfig::plain(1e4)), window: Some(4096), ..SelfAttentionConfig::new(32, 8, 128)
/// };
/// let mlp = MlpConfig { hidden: 14336, gated: true, activation: Activation::Silu, bias: false, dropout: 0.0 };
/// let layer = DecoderLayer { attention, feed_forward: FeedForwardConfig::Mlp(mlp) };
/// let norm = NormConfig::Rms { eps: 1e-5, unit_offset: false };
/// let mistral = DecoderConfig::new(32000, 32768, 4096, norm, vec![layer; 32]);
/// // Gemma 2 alternates windows, scales embeddings, caps scores, and normalises the parts' results.
/// let mut gemma = DecoderConfig {
///     embedding_scale: Some(4096f64.sqrt()), norm_results: true, score_soft_cap: Some(30.0), tied_head: true,
///     ..mistral
/// };
/// gemma.layers.iter_mut().skip(1).step_by(2).for_each(|layer| layer.attention.window = None);
/// assert_eq!(gemma.layers[2].attention.window, Some(4096));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// The number of different tokens.
    pub vocabulary: usize,
    /// The longest sequence.
    pub context: usize,
    /// The width of the residual stream.
    pub width: usize,
    /// The layers, each with its own configuration.
    pub layers: Vec<DecoderLayer>,
    /// The normalisations before each part of a layer and before the head, and those of `norm_results`.
    pub norm: NormConfig,
    /// `true` if the result of each part is normalised before it is added to the residual stream, as in Gemma 2.
    pub norm_results: bool,
    /// `true` if each of the `context` positions has a learned vector that is added to the token's, as in GPT-2.
    pub learned_positions: bool,
    /// The factor of the tokens' vectors: the square root of the width in Gemma.
    pub embedding_scale: Option<f64>,
    /// `true` if the head's weight is the table of tokens.
    pub tied_head: bool,
    /// The soft cap `c` of the scores, which become `c · tanh(score / c)`, as in Gemma 2.
    pub score_soft_cap: Option<f64>,
    /// The probability of dropping an element of the embeddings.
    pub dropout: f64,
    /// The standard deviation of new parameters; it is divided by `sqrt(2 · layers)` for the two maps of each layer that
    /// write to the residual stream.
    pub init_std: f64,
}

/// The configuration of one layer of a [`Decoder`](crate::nn::Decoder).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecoderLayer {
    /// The attention.
    pub attention: SelfAttentionConfig,
    /// The feed-forward layer after it.
    pub feed_forward: FeedForwardConfig,
}

/// The kind of a layer's feed-forward part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FeedForwardConfig {
    /// One MLP for all tokens.
    Mlp(MlpConfig),
    /// A mixture of experts. Its width is that of the decoder.
    Moe(MoeConfig),
}

impl DecoderConfig {
    /// Returns a configuration with a head of its own, without learned positions, scales, caps, dropout and
    /// normalisations of results, whose new parameters have the standard deviation 0.02.
    ///
    /// ```
    /// use isoshard::nn::{DecoderConfig, NormConfig};
    /// let config = DecoderConfig::new(97, 16, 8, NormConfig::Rms { eps: 1e-6, unit_offset: false }, Vec::new());
    /// assert!(!config.tied_head && config.score_soft_cap.is_none() && config.init_std == 0.02);
    /// ```
    pub fn new(
        vocabulary: usize,
        context: usize,
        width: usize,
        norm: NormConfig,
        layers: Vec<DecoderLayer>,
    ) -> DecoderConfig {
        DecoderConfig {
            vocabulary,
            context,
            width,
            layers,
            norm,
            norm_results: false,
            learned_positions: false,
            embedding_scale: None,
            tied_head: false,
            score_soft_cap: None,
            dropout: 0.0,
            init_std: 0.02,
        }
    }
}
