//! Modules, parameters and plans, written on distributed tensors alone.
//!
//! A model names its [`Params`] by path and never names a mesh. A [`Plan`], outside the model, says by path pattern how
//! parameters lie on the mesh and where activations change layout; data parallel, FSDP, tensor and sequence parallel
//! and their products are plans for one and the same model.
//!
//! Missing: pipeline and expert parallelism.

mod attention;
mod check;
mod forward;
mod gpt;
mod grouped_attention;
mod layers;
mod llama;
mod mlp;
mod params;
mod plan;

pub use attention::CausalAttention;
pub use forward::Forward;
pub use gpt::{Gpt, GptConfig};
pub use grouped_attention::{GroupedAttention, GroupedHeads};
pub use layers::{Embedding, LayerNorm, Linear, RmsNorm};
pub use llama::{Llama, LlamaConfig};
pub use mlp::{GatedMlp, Mlp};
pub use params::{ParamId, Params, Scope, Update};
pub use plan::{Parallel, Plan};
