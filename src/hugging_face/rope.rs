//! The rotary positions of a config.json: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` of 4.

use super::architecture::Architecture;
use super::values::ConfigValues;
use crate::error::Result;
use crate::nn::{RotaryConfig, RotaryScaling};
use crate::ops::{Llama3Scaling, YarnScaling};

/// The largest number of positions.
const LONGEST: f64 = (1u64 << 31) as f64;

/// Reads the rotary positions of layers with full attention, and of layers with a sliding window.
pub(super) fn read_rope(values: &ConfigValues<'_>, architecture: Architecture) -> Result<[RotaryConfig; 2]> {
    if values.number_or("partial_rotary_factor", 1.0)? != 1.0 {
        return Err(values.unsupported("partial_rotary_factor", "only whole heads are turned"));
    }
    let default =
        if architecture == Architecture::Mixtral || architecture == Architecture::Gemma3 { 1e6 } else { 1e4 };
    let base = values.number_or("rope_theta", default)?;
    let positions = values.length("max_position_embeddings")? as f64;
    let sliding_base = match architecture {
        Architecture::Gemma3 => values.number_or("rope_local_base_freq", 1e4)?,
        _ => base,
    };
    let given = |key| values.object(key).map(|object| object.filter(|object| !object.is_empty()));
    let (new, old) = (given("rope_parameters")?, given("rope_scaling")?);
    let Some(rope) = new else {
        let full = match old {
            Some(rope) => one_rope(&rope, base, positions)?,
            None => RotaryConfig::plain(base),
        };
        // Gemma 3 scales the layers with full attention only.
        let is_gemma3 = architecture == Architecture::Gemma3;
        return Ok([full, if is_gemma3 { RotaryConfig::plain(sliding_base) } else { full }]);
    };
    if old.is_some() {
        let rule = "rope_parameters of transformers 5 excludes rope_scaling of transformers 4";
        return Err(values.unsupported("rope_scaling", rule));
    }
    let kinds = ["full_attention", "sliding_attention"];
    if architecture != Architecture::Gemma3 {
        if let Some(kind) = kinds.into_iter().find(|kind| rope.has(kind)) {
            return Err(rope.unsupported(kind, "only Gemma 3 has rotary positions for each kind of layer"));
        }
        return Ok([one_rope(&rope, base, positions)?; 2]);
    }
    if let Some(key) = rope.keys().find(|key| !kinds.contains(key)) {
        let rule = "Gemma 3 has rotary positions for full_attention and sliding_attention";
        return Err(rope.unsupported(key, rule));
    }
    let one = |kind, base| match rope.object(kind)? {
        Some(rope) => one_rope(&rope, base, positions),
        None => Ok(RotaryConfig::plain(base)),
    };
    Ok([one(kinds[0], base)?, one(kinds[1], sliding_base)?])
}

/// Returns the longest sequence of a model with rotary positions: YaRN serves `factor` times the context of the first
/// training, also if `max_position_embeddings` is that context.
pub(super) fn longest_sequence(positions: usize, rope: &[RotaryConfig; 2]) -> usize {
    let scaled = rope.iter().map(|rope| match rope.scaling {
        RotaryScaling::Yarn(yarn) => (yarn.factor * yarn.original_context).min(LONGEST) as usize,
        RotaryScaling::Plain | RotaryScaling::Linear(_) | RotaryScaling::Llama3(_) => 0,
    });
    scaled.fold(positions, usize::max)
}

/// Returns the context of the first training on which the angles depend, if they do.
pub(super) fn top_level_context(rope: &Option<[RotaryConfig; 2]>) -> Option<f64> {
    rope.iter().flatten().find_map(|rope| match rope.scaling {
        RotaryScaling::Yarn(yarn) => Some(yarn.original_context),
        RotaryScaling::Llama3(llama) => Some(llama.original_context),
        RotaryScaling::Plain | RotaryScaling::Linear(_) => None,
    })
}

/// Refuses keys that a scaling does not read, but for a number of 1.
fn refuse_other_keys(rope: &ConfigValues<'_>, kind: &str, read: &[&str]) -> Result<()> {
    let always = ["rope_theta", "rope_type", "type", "partial_rotary_factor", "finetuned"];
    let context = "original_max_position_embeddings";
    for key in rope.keys().filter(|key| !always.contains(key) && !read.contains(key) && *key != context) {
        if rope.get(key).is_some_and(|value| value.as_f64() != Some(1.0)) {
            return Err(rope.unread(key, &format!("the rotary scaling {kind} has no such key")));
        }
    }
    Ok(())
}

fn one_rope(rope: &ConfigValues<'_>, base: f64, positions: f64) -> Result<RotaryConfig> {
    let base = rope.number_or("rope_theta", base)?;
    if rope.number_or("partial_rotary_factor", 1.0)? != 1.0 {
        return Err(rope.unsupported("partial_rotary_factor", "only whole heads are turned"));
    }
    // Before 4.43, transformers wrote `type`.
    let key = if rope.get("rope_type").is_some() { "rope_type" } else { "type" };
    let kind = rope.text(key)?.unwrap_or("default");
    let mut read: &[&str] = &[];
    let scaling = match kind {
        "default" => RotaryScaling::Plain,
        "linear" => {
            read = &["factor"];
            RotaryScaling::Linear(rope.number("factor")?)
        }
        "llama3" => {
            read = &["factor", "low_freq_factor", "high_freq_factor"];
            RotaryScaling::Llama3(Llama3Scaling {
                factor: rope.number("factor")?,
                low_frequency_factor: rope.number("low_freq_factor")?,
                high_frequency_factor: rope.number("high_freq_factor")?,
                original_context: rope.number("original_max_position_embeddings")?,
            })
        }
        "yarn" => {
            for key in ["mscale", "mscale_all_dim"] {
                if rope.get(key).is_some() {
                    return Err(
                        rope.unsupported(key, "YaRN's attention factor is the paper's or attention_factor")
                    );
                }
            }
            rope.expect_flag("truncate", true)?;
            read = &["factor", "beta_fast", "beta_slow", "attention_factor", "truncate"];
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
    refuse_other_keys(rope, kind, read)?;
    Ok(RotaryConfig { base, width: None, scaling })
}
