//! The decoder that a config.json describes.

use super::architecture::Architecture;
use super::config::HuggingFaceConfig;
use crate::comm::DryRun;
use crate::dtensor::DeviceMesh;
use crate::error::Result;
use crate::nn::{
    Decoder, DecoderConfig, DecoderLayer, ExpertWeights, FeedForwardConfig, MlpConfig, MoeConfig, NormConfig,
    Params, Plan, SelfAttentionConfig,
};

impl HuggingFaceConfig {
    /// Returns the paths of the linear maps that match a pattern, such as `h.*.attn.q`: those to which
    /// [`Decoder::add_lora`] would add adapters. So a pattern can be tried before any weight is read. Communicates
    /// nothing; a dry run of the calling thread begins to count its memory anew.
    ///
    /// ```
    /// use isoshard::hugging_face::HuggingFaceConfig;
    /// let text = r#"{"model_type": "gpt2", "vocab_size": 11, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 6}"#;
    /// let config = HuggingFaceConfig::parse(text)?;
    /// assert_eq!(config.linear_maps("h.*.attn.out")?, ["h.0.attn.out", "h.1.attn.out"]);
    /// assert_eq!(config.linear_maps("o_proj")?, ["h.0.attn.out", "h.1.attn.out"]); // as PEFT names it
    /// let refused = config.linear_maps("h.*.attn.o").unwrap_err().to_string();
    /// assert!(refused.starts_with("lora: a pattern matches no linear map; got \"h.*.attn.o\""), "{refused}");
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a pattern that matches no map, and names the nearest.
    pub fn linear_maps(&self, pattern: &str) -> Result<Vec<String>> {
        let mesh = DeviceMesh::new(&DryRun::new(1, 0)?.rank()?, &[])?;
        let mut params = Params::blank(&mesh, Plan::default())?;
        Decoder::new(&mut params, self.decoder())?.matching_maps(pattern)
    }

    /// Returns the decoder that computes what this model computes. Probabilities of dropout are those of the config; the
    /// factors of routers' losses are the caller's.
    ///
    /// ```
    /// use isoshard::{hugging_face::HuggingFaceConfig, nn::NormConfig};
    /// let text = r#"{"model_type": "gpt2", "vocab_size": 11, "n_embd": 8, "n_layer": 3, "n_head": 2, "n_positions": 6}"#;
    /// let decoder = HuggingFaceConfig::parse(text)?.decoder();
    /// assert!(decoder.learned_positions && decoder.tied_head && decoder.layers.len() == 3);
    /// assert_eq!(decoder.norm, NormConfig::Layer { eps: 1e-5, bias: true });
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn decoder(&self) -> DecoderConfig {
        use Architecture::{Gemma, Gemma2, Gemma3, Gpt2, Qwen3, Qwen3Moe};
        let is_gpt = self.architecture == Gpt2;
        let is_gemma = matches!(self.architecture, Gemma | Gemma2 | Gemma3);
        let norm = match is_gpt {
            true => NormConfig::Layer { eps: self.eps, bias: true },
            false => NormConfig::Rms { eps: self.eps, unit_offset: is_gemma },
        };
        let head_norm = matches!(self.architecture, Qwen3 | Qwen3Moe | Gemma3).then_some(norm);
        let layer = |i: usize| {
            let window = self.windows[i];
            let attention = SelfAttentionConfig {
                rotary: self.rope.map(|[full, sliding]| if self.slides[i] { sliding } else { full }),
                qkv_bias: self.qkv_bias,
                out_bias: self.out_bias,
                head_norm,
                scale: Some(1.0 / self.query_scalar.sqrt()),
                window,
                soft_cap: self.attention_cap,
                attention_dropout: self.attention_dropout,
                dropout: self.residual_dropout,
                ..SelfAttentionConfig::new(self.heads, self.kv_heads, self.head_width)
            };
            let feed_forward = match &self.experts {
                Some(mixture) if mixture.layers[i] => FeedForwardConfig::Moe(MoeConfig {
                    width: self.width,
                    hidden: mixture.hidden,
                    experts: mixture.experts,
                    top_k: mixture.top_k,
                    capacity_factor: None,
                    gated: true,
                    activation: self.activation,
                    weights: match mixture.normalised {
                        true => ExpertWeights::SoftmaxOfChosen,
                        false => ExpertWeights::SoftmaxOfAll,
                    },
                    shared_hidden: mixture.shared_hidden,
                    shared_gate: mixture.shared_hidden.is_some(),
                    dropout: 0.0,
                }),
                _ => FeedForwardConfig::Mlp(MlpConfig {
                    hidden: self.hidden,
                    gated: !is_gpt,
                    activation: self.activation,
                    bias: self.mlp_bias,
                    dropout: self.residual_dropout,
                }),
            };
            DecoderLayer { attention, feed_forward }
        };
        let layers = (0..self.layers).map(layer).collect();
        DecoderConfig {
            norm_results: matches!(self.architecture, Gemma2 | Gemma3),
            learned_positions: is_gpt,
            embedding_scale: is_gemma.then(|| (self.width as f64).sqrt()),
            tied_head: self.tied_head,
            score_soft_cap: self.final_cap,
            dropout: self.embedding_dropout,
            init_std: self.init_std,
            ..DecoderConfig::new(self.vocabulary, self.positions, self.width, norm, layers)
        }
    }
}
