//! Decoder-only transformers: GPT, Llama, and any configuration of them, with adapters.

pub(super) mod decoder_config;
pub(super) mod gpt;
pub(super) mod llama;
pub(super) mod lora;
pub(super) mod model;
