//! The architectures that are read and written.

use super::VERB;
use super::values::ConfigValues;
use crate::error::{Error, Result};

/// An architecture of `transformers`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Architecture {
    Gpt2,
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Gemma,
    Gemma2,
    Gemma3,
    Mixtral,
    Qwen2Moe,
    Qwen3Moe,
}

impl Architecture {
    pub const ALL: [Architecture; 11] = [
        Architecture::Gpt2,
        Architecture::Llama,
        Architecture::Mistral,
        Architecture::Qwen2,
        Architecture::Qwen3,
        Architecture::Gemma,
        Architecture::Gemma2,
        Architecture::Gemma3,
        Architecture::Mixtral,
        Architecture::Qwen2Moe,
        Architecture::Qwen3Moe,
    ];

    /// Returns the name in `architectures`.
    pub fn name(self) -> &'static str {
        match self {
            Architecture::Gpt2 => "GPT2LMHeadModel",
            Architecture::Llama => "LlamaForCausalLM",
            Architecture::Mistral => "MistralForCausalLM",
            Architecture::Qwen2 => "Qwen2ForCausalLM",
            Architecture::Qwen3 => "Qwen3ForCausalLM",
            Architecture::Gemma => "GemmaForCausalLM",
            Architecture::Gemma2 => "Gemma2ForCausalLM",
            Architecture::Gemma3 => "Gemma3ForCausalLM",
            Architecture::Mixtral => "MixtralForCausalLM",
            Architecture::Qwen2Moe => "Qwen2MoeForCausalLM",
            Architecture::Qwen3Moe => "Qwen3MoeForCausalLM",
        }
    }

    /// Returns the name in `model_type`.
    pub fn model_type(self) -> &'static str {
        match self {
            Architecture::Gpt2 => "gpt2",
            Architecture::Llama => "llama",
            Architecture::Mistral => "mistral",
            Architecture::Qwen2 => "qwen2",
            Architecture::Qwen3 => "qwen3",
            Architecture::Gemma => "gemma",
            Architecture::Gemma2 => "gemma2",
            Architecture::Gemma3 => "gemma3_text",
            Architecture::Mixtral => "mixtral",
            Architecture::Qwen2Moe => "qwen2_moe",
            Architecture::Qwen3Moe => "qwen3_moe",
        }
    }

    /// Reads the architecture of a config.json: the only name in `architectures`, or `model_type` without the list.
    pub fn read(values: &ConfigValues<'_>) -> Result<Architecture> {
        let kind = values.text("model_type")?;
        let names = values.texts("architectures")?.unwrap_or_default();
        let found = match (&names[..], kind) {
            ([name], _) => Architecture::ALL.into_iter().find(|a| a.name() == *name),
            ([], Some(kind)) => Architecture::ALL.into_iter().find(|a| a.model_type() == kind),
            _ => None,
        };
        let given = match (&names[..], kind) {
            ([], Some(kind)) => format!("model_type {kind}"),
            ([], None) => "neither architectures nor model_type".into(),
            (names, _) => names.join(", "),
        };
        match found {
            Some(found) if names.is_empty() || kind.is_none_or(|kind| kind == found.model_type()) => {
                Ok(found)
            }
            Some(found) => {
                let given = format!("{given} with model_type {}", kind.unwrap_or_default());
                let rule = format!("{} has model_type {}", found.name(), found.model_type());
                Err(Error::invalid(VERB, rule, given, ""))
            }
            None => {
                let built: Vec<&str> = Architecture::ALL.iter().map(|a| a.name()).collect();
                let remedy = format!("those that are built are {}", built.join(", "));
                Err(Error::unsupported(VERB, "the architecture is not built", given, remedy))
            }
        }
    }
}
