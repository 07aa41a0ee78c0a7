//! Models as Hugging Face has them: config.json and safetensors files, read and written.
//!
//! A folder that `save_pretrained` of Python's `transformers` wrote has `config.json` and `model.safetensors`, or several
//! shards and `model.safetensors.index.json`. [`HuggingFaceConfig`] is the config, with its architecture and sizes.
//! [`HuggingFaceFormat`] is the list of the files' tensors, and the pieces of parameters that each of them holds. Loading
//! copies each rank's shards from the mapped files; saving writes the files again, with equal names, dtypes, shapes and
//! bytes.
//!
//! ```
//! use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::Layout, tensor::Tensor};
//! use isoshard::nn::{Decoder, Forward, Module, Plan};
//! let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hugging_face/gpt2");
//! let scores = |mesh: &'static str, ranks| spmd(ranks, move |rank| {
//!     let mesh = DeviceMesh::parse(&rank, mesh)?;
//!     let gpt = Decoder::from_hugging_face(&mesh, dir, Plan::default().fsdp("fsdp"))?;
//!     let tokens = Tensor::from_vec(vec![5i64, 7, 11], [1, 3])?;
//!     let tokens = DTensor::distribute(&mesh, &tokens, Layout::replicated(1))?;
//!     gpt.model.forward(&Forward::eval(&gpt.params), &tokens)?.full_tensor()?.to_vec::<f32>()
//! });
//! // The same bits on one rank, and on two that store half of the parameters each.
//! assert_eq!(scores("fsdp=1", 1)?[0], scores("fsdp=2", 2)?[1]);
//! # Ok::<(), isoshard::Error>(())
//! ```
//!
//! The architectures are GPT-2, Llama (2, 3, 3.1), Mistral, Qwen2 and Qwen2.5, Qwen3, Gemma (1, 2, and 3 for text),
//! Mixtral, Qwen2-MoE and Qwen3-MoE. Sources in f32, f16 and bf16 become f32 parameters; export rounds back.
//!
//! A model that is trained from its first step needs no files: [`HuggingFaceConfig::parse`] reads a config that you
//! write, [`HuggingFaceConfig::decoder`] gives the configuration of its [`Decoder`](crate::nn::Decoder), and
//! [`HuggingFaceFormat::new`] the names under which [`HuggingFaceFormat::save`] writes the parameters.
//!
//! Missing, and refused by name: other architectures, quantized weights, pickled weights (`pytorch_model.bin`), rotary
//! scalings other than linear, Llama 3's and YaRN, and partly turned heads.

mod agreement;
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
mod unread_keys;
mod values;
mod weight_files;
mod windows;

pub use config::HuggingFaceConfig;
pub use format::HuggingFaceFormat;
pub use pretrained::PretrainedDecoder;

/// The verb of errors about files that are read.
const VERB: &str = "from_hugging_face";
