//! The sliding windows of a config.json: the layers that have one, by architecture.

use super::architecture::Architecture;
use super::values::ConfigValues;
use crate::error::Result;

/// The window of the classes of `transformers` whose config.json has none.
const DEFAULT_WINDOW: usize = 4096;

/// Reads the sliding window of each layer, and whether the layer is of the kind that may have one.
pub(super) fn read_windows(
    values: &ConfigValues<'_>,
    architecture: Architecture,
    layers: usize,
) -> Result<(Vec<Option<usize>>, Vec<bool>)> {
    use Architecture::{
        Gemma, Gemma2, Gemma3, Gpt2, Llama, Mistral, Mixtral, Qwen2, Qwen2Moe, Qwen3, Qwen3Moe,
    };
    let is_qwen = matches!(architecture, Qwen2 | Qwen2Moe | Qwen3 | Qwen3Moe);
    let none = || Ok((vec![None; layers], vec![false; layers]));
    match architecture {
        Gpt2 | Llama | Gemma => return none(),
        Mistral | Qwen2 | Qwen3 | Gemma2 | Gemma3 | Mixtral | Qwen2Moe | Qwen3Moe => {}
    }
    // transformers writes a window of 0 or more beside use_sliding_window: false.
    if is_qwen && !values.flag("use_sliding_window", false)? {
        return none();
    }
    let default = if architecture == Mixtral { None } else { Some(DEFAULT_WINDOW) };
    let window = values.length_unless_null("sliding_window", default)?;
    // These three have one kind of layer; transformers does not read their layer_types.
    if matches!(architecture, Mistral | Mixtral | Qwen3Moe) {
        return Ok((vec![window; layers], vec![window.is_some(); layers]));
    }
    let listed = values.texts("layer_types")?;
    if window.is_none() {
        return match (architecture, listed) {
            (Qwen2 | Qwen3, None) => none(),
            _ => Err(values.unsupported("sliding_window", "layers with a sliding window need its length")),
        };
    }
    let slides: Vec<bool> = match listed {
        Some(kinds) if kinds.len() != layers => {
            return Err(values
                .unsupported("layer_types", &format!("the list has one text for each of {layers} layers")));
        }
        Some(kinds) => {
            let slides = |kind: &&str| match *kind {
                "full_attention" => Ok(false),
                "sliding_attention" => Ok(true),
                _ => {
                    Err(values.unsupported("layer_types", "layers have full_attention or sliding_attention"))
                }
            };
            kinds.iter().map(slides).collect::<Result<_>>()?
        }
        None => {
            let bound = || values.count_or("max_window_layers", 28);
            let every = |pattern: usize| (0..layers).map(|i| (i + 1) % pattern != 0).collect();
            match architecture {
                Qwen2 | Qwen3 => {
                    let first = bound()?;
                    (0..layers).map(|i| i >= first).collect()
                }
                Qwen2Moe => {
                    let end = bound()?;
                    (0..layers).map(|i| i % 2 == 0 && i < end).collect()
                }
                Gemma3 if values.get("_sliding_window_pattern").is_some() => {
                    every(values.size("_sliding_window_pattern")?)
                }
                Gemma3 => every(values.size_or("sliding_window_pattern", 6)?),
                Gemma2 => every(2),
                _ => unreachable!("other architectures have no sliding windows by layer"),
            }
        }
    };
    Ok((slides.iter().map(|&slides| window.filter(|_| slides)).collect(), slides))
}
