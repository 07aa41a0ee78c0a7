//! Keys of config.json by which other models compute something else, and that no model of this crate reads.

use super::architecture::Architecture;
use super::rope::top_level_context;
use super::values::ConfigValues;
use crate::error::Result;
use crate::nn::RotaryConfig;

/// The values of a key that change nothing. An absent key and null change nothing either.
#[derive(Clone, Copy)]
enum Neutral {
    Null,
    Flag(bool),
    Number(f64),
    Text(&'static str),
    /// Lists of this number.
    Each(f64),
}

use Neutral::{Each, Flag, Null, Number, Text};

/// The keys, from the configs of `transformers` and of models whose code stands beside their weights.
const KEYS: [(&str, Neutral); 56] = [
    // Attention: tokens that a query sees.
    ("is_causal", Flag(true)),
    ("causal", Flag(true)),
    ("is_bidirectional", Flag(false)),
    ("bidirectional", Flag(false)),
    ("use_bidirectional_attention", Flag(false)),
    ("is_encoder_decoder", Flag(false)),
    ("add_cross_attention", Flag(false)),
    ("prefix_lm", Flag(false)),
    ("attention_chunk_size", Null),
    ("dual_chunk_attention_config", Null),
    ("sparse_attention_config", Null),
    ("use_attention_sinks", Flag(false)),
    // Attention: scores, heads and their norms.
    ("clip_qkv", Null),
    ("attn_logit_softcapping", Null),
    ("attention_multiplier", Null),
    ("attn_temperature_tuning", Flag(false)),
    ("scale_attn_weights", Flag(true)),
    ("scale_attn_by_inverse_layer_idx", Flag(false)),
    ("multi_query", Flag(false)),
    ("num_kv_shared_layers", Number(0.0)),
    // Positions.
    ("position_embedding_type", Text("absolute")),
    ("alibi", Flag(false)),
    ("use_alibi", Flag(false)),
    ("no_rope_layers", Each(1.0)),
    ("no_rope_layer_interval", Null),
    ("nope_layer_interval", Null),
    ("rope_interleave", Flag(false)),
    ("rope_interleaved", Flag(false)),
    ("use_interleaved_rope", Flag(false)),
    ("rope_ratio", Number(1.0)),
    ("rotary_pct", Number(1.0)),
    ("rotary_emb_fraction", Number(1.0)),
    ("rotary_dim", Null),
    // Factors of embeddings, residuals and scores.
    ("embedding_multiplier", Number(1.0)),
    ("residual_multiplier", Number(1.0)),
    ("logits_scaling", Number(1.0)),
    ("logit_scale", Number(1.0)),
    ("lm_head_multiplier", Number(1.0)),
    ("scale_emb", Number(1.0)),
    ("scale_depth", Null),
    ("dim_model_base", Null),
    ("mup_scale_factor", Number(1.0)),
    ("mup_width_scale", Number(1.0)),
    ("mup_embeddings_scale", Number(1.0)),
    ("final_logit_softcapping", Null),
    ("logit_softcapping", Null),
    // Blocks and experts.
    ("use_parallel_residual", Flag(false)),
    ("parallel_attn", Flag(false)),
    ("apply_residual_connection_post_layernorm", Flag(false)),
    ("router_jitter_noise", Number(0.0)),
    ("routed_scaling_factor", Number(1.0)),
    ("scoring_func", Text("softmax")),
    ("first_k_dense_replace", Number(0.0)),
    ("moe_layer_freq", Number(1.0)),
    // Quantized weights.
    ("quantization", Null),
    ("compression_config", Null),
];

/// Refuses values by which other models compute something else than one of this architecture, positions and number that
/// scales scores.
pub(super) fn refuse_unread_keys(
    values: &ConfigValues<'_>,
    architecture: Architecture,
    positions: usize,
    query_scalar: f64,
    rope: &Option<[RotaryConfig; 2]>,
) -> Result<()> {
    use Architecture::{Gemma, Gemma2, Gemma3, Gpt2, Llama, Qwen2Moe, Qwen3, Qwen3Moe};
    let caps = ["attn_logit_softcapping", "final_logit_softcapping"];
    let read = |key: &&str| matches!(architecture, Gemma2 | Gemma3) && caps.contains(key);
    for (key, neutral) in KEYS.iter().filter(|(key, _)| !read(key)) {
        expect(values, key, neutral_of(key, *neutral, architecture))?;
    }
    let norms_heads = matches!(architecture, Qwen3 | Qwen3Moe | Gemma3);
    for key in ["use_qk_norm", "qk_norm", "qk_layernorm"] {
        expect(values, key, Flag(norms_heads))?;
    }
    if !matches!(architecture, Gemma2 | Gemma3) {
        expect(values, "query_pre_attn_scalar", Number(query_scalar))?;
    }
    if !matches!(architecture, Qwen2Moe | Qwen3Moe) {
        expect(values, "norm_topk_prob", Flag(true))?;
    }
    if let Some(context) = top_level_context(rope) {
        expect(values, "original_max_position_embeddings", Number(context))?;
    }
    if matches!(architecture, Gpt2 | Llama | Gemma) {
        refuse_windows(values, positions)?;
    }
    Ok(())
}

/// Refuses sliding windows in a config of an architecture that has none.
fn refuse_windows(values: &ConfigValues<'_>, positions: usize) -> Result<()> {
    let window = values.length_unless_null("sliding_window", None)?;
    let unused = values.get("use_sliding_window").is_some() && !values.flag("use_sliding_window", true)?;
    if window.is_some_and(|window| window < positions) && !unused {
        return Err(values.unread("sliding_window", "the architecture has no sliding windows"));
    }
    let kinds = values.texts("layer_types")?.unwrap_or_default();
    if kinds.iter().any(|kind| *kind != "full_attention") {
        return Err(values.unread("layer_types", "the architecture has full_attention alone"));
    }
    Ok(())
}

fn neutral_of(key: &str, neutral: Neutral, architecture: Architecture) -> Neutral {
    match key {
        "position_embedding_type" if architecture != Architecture::Gpt2 => Text("rope"),
        _ => neutral,
    }
}

fn expect(values: &ConfigValues<'_>, key: &str, neutral: Neutral) -> Result<()> {
    let Some(value) = values.get(key) else { return Ok(()) };
    let (is_neutral, text) = match neutral {
        Null => (false, "null".to_string()),
        Flag(flag) => (value.as_bool() == Some(flag), flag.to_string()),
        Number(number) => (value.as_f64() == Some(number), number.to_string()),
        Text(text) => (value.as_str() == Some(text), format!("{text:?}")),
        Each(number) => {
            let all = |list: &Vec<serde_json::Value>| list.iter().all(|x| x.as_f64() == Some(number));
            (value.as_array().is_some_and(all), format!("a list of {number}"))
        }
    };
    if is_neutral { Ok(()) } else { Err(values.unread(key, &format!("only {text} is built"))) }
}
