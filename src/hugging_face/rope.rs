//! The rotary positions of a config.json: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` of 4.

use super::architecture::Architecture;
use super::values::ConfigValues;
use crate::error::Result;
use crate::nn::{RotaryConfig, RotaryScaling};
use crate::ops::{Llama3Scaling, YarnScaling};

/// Reads the rotary positions of layers with full attention, and of layers with a sliding window.
pub(super) fn read_rope(values: &ConfigValues<'_>, of: Architecture) -> Result<[RotaryConfig; 2]> {
    if values.number_or("partial_rotary_factor", 1.0)? != 1.0 {
        return Err(values.unsupported("partial_rotary_factor", "only whole heads are turned"));
    }
    let default = if of == Architecture::Mixtral || of == Architecture::Gemma3 { 1e6 } else { 1e4 };
    let base = values.number_or("rope_theta", default)?;
    let positions = values.length("max_position_embeddings")? as f64;
    if let Some(rope) = values.object("rope_parameters")? {
        if let (Some(full), Some(sliding)) =
            (rope.object("full_attention")?, rope.object("sliding_attention")?)
        {
            return Ok([one_rope(&full, base, positions)?, one_rope(&sliding, 1e4, positions)?]);
        }
        return Ok([one_rope(&rope, base, positions)?; 2]);
    }
    let full = match values.object("rope_scaling")? {
        Some(rope) => one_rope(&rope, base, positions)?,
        None => RotaryConfig::plain(base),
    };
    Ok(match of {
        // Gemma 3 scales the layers with full attention only.
        Architecture::Gemma3 => {
            let base = values.number_or("rope_local_base_freq", 1e4)?;
            [full, RotaryConfig::plain(base)]
        }
        _ => [full; 2],
    })
}

fn one_rope(rope: &ConfigValues<'_>, base: f64, positions: f64) -> Result<RotaryConfig> {
    let base = rope.number_or("rope_theta", base)?;
    if rope.number_or("partial_rotary_factor", 1.0)? != 1.0 {
        return Err(rope.unsupported("partial_rotary_factor", "only whole heads are turned"));
    }
    // Before 4.43, transformers wrote `type`.
    let key = if rope.get("rope_type").is_some() { "rope_type" } else { "type" };
    let scaling = match rope.text(key)?.unwrap_or("default") {
        "default" => RotaryScaling::Plain,
        "linear" => RotaryScaling::Linear(rope.number("factor")?),
        "llama3" => RotaryScaling::Llama3(Llama3Scaling {
            factor: rope.number("factor")?,
            low_frequency_factor: rope.number("low_freq_factor")?,
            high_frequency_factor: rope.number("high_freq_factor")?,
            original_context: rope.number("original_max_position_embeddings")?,
        }),
        "yarn" => {
            for key in ["mscale", "mscale_all_dim"] {
                if rope.get(key).is_some() {
                    return Err(
                        rope.unsupported(key, "YaRN's attention factor is the paper's or attention_factor")
                    );
                }
            }
            rope.expect_flag("truncate", true)?;
            RotaryScaling::Yarn(YarnScaling {
                factor: rope.number("factor")?,
                fast_turns: rope.number_or("beta_fast", 32.0)?,
                slow_turns: rope.number_or("beta_slow", 1.0)?,
                original_context: rope.number_or("original_max_position_embeddings", positions)?,
                attention_factor: rope.optional_number("attention_factor")?,
            })
        }
        _ => return Err(rope.unsupported(key, "the rotary scalings are default, linear, llama3 and yarn")),
    };
    Ok(RotaryConfig { base, width: None, scaling })
}
