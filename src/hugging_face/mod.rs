//! Models as Hugging Face has them: config.json and safetensors files, read and written.
//!
//! A folder that `save_pretrained` of Python's `transformers` wrote has `config.json` and `model.safetensors`, or several
//! shards and `model.safetensors.index.json`. [`HuggingFaceConfig`] is the config, with its architecture and sizes.
//! [`HuggingFaceFormat`] is the list of the files' tensors, and the pieces of parameters that each of them holds. Loading
//! copies each rank's shards from the mapped files; saving writes the files again, with equal names, dtypes, shapes and
//! bytes.
//!
//! The architectures are GPT-2, Llama (2, 3, 3.1), Mistral, Qwen2 and Qwen2.5, Qwen3, Gemma (1, 2, and 3 for text),
//! Mixtral, Qwen2-MoE and Qwen3-MoE. Sources in f32, f16 and bf16 become f32 parameters; export rounds back.
//!
//! Missing, and refused by name: other architectures, quantized weights, pickled weights (`pytorch_model.bin`), rotary
//! scalings other than linear, Llama 3's and YaRN, and partly turned heads.

mod architecture;
mod config;
mod decoder;
mod export;
mod format;
mod load;
mod names;
mod pretrained;
mod rope;
#[cfg(test)]
mod tests;
mod values;
mod weight_files;

pub use config::HuggingFaceConfig;
pub use format::HuggingFaceFormat;
pub use pretrained::PretrainedDecoder;

/// The verb of errors about files that are read.
const VERB: &str = "from_hugging_face";
