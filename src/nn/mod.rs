//! Modules, parameters by path, and plans that place them on a mesh.
//!
//! A model is a [`Module`] that declares its parameters by path in [`Params`] and never names a mesh. A [`Plan`],
//! outside the model, gives the layouts of parameters and activations by path pattern. Data parallelism, FSDP, tensor
//! parallelism, sequence parallelism and their products are different plans for the same model, and every plan trains
//! with the same bits:
//!
//! ```
//! use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}};
//! use isoshard::{placement::Placement, rng::Init, tensor::{DType, Tensor}};
//! use isoshard::nn::{Forward, Linear, Module, Params, Plan};
//!
//! let gradient_norm = |mesh: &'static str, ranks, plan: fn() -> Plan| spmd(ranks, move |rank| {
//!     let mesh = DeviceMesh::parse(&rank, mesh)?;
//!     let mut params = Params::new(&mesh, plan(), 7)?;
//!     let init = Init::Normal { mean: 0.0, std: 1.0 };
//!     let up = Linear::new(params.root().child("up"), 3, 8, init)?;
//!     let down = Linear::new(params.root().child("down"), 8, 1, init)?;
//!
//!     let x = Tensor::from_vec((0..15).map(|i| (i * i % 7) as f32).collect(), [5, 3])?;
//!     let x = params.batch(&x)?;
//!     let cx = Forward::train_without_dropout(&params);
//!     let mut loss = down.forward(&cx, &up.forward(&cx, &x)?.relu()?)?.mean_all()?;
//!     params.grad_norm(&loss.backward()?)?.item()
//! });
//! let tensor_parallel = || {
//!     let plan = Plan::default().shard("up.*", "tp", 0).shard("down.weight", "tp", 1);
//!     plan.site("down", "tp", Placement::Replicate).batch("dp")
//! };
//! let single = gradient_norm("1", 1, Plan::default)?[0];
//! assert_eq!(gradient_norm("fsdp=3", 3, || Plan::default().fsdp("fsdp"))?, [single; 3]);
//! assert_eq!(gradient_norm("dp=2,tp=2", 4, tensor_parallel)?, [single; 4]);
//! # Ok::<(), isoshard::Error>(())
//! ```
//!
//! `examples/08_own_model.rs` trains a user's own model on three meshes. [`optim`](crate::optim) has the optimizers.
//!
//! [`Decoder`] has the options of GPT-2, Llama, Mistral, Qwen, Gemma and mixtures of experts ([`DecoderConfig`]). Maps of
//! one input are stored as one parameter; [`Params::pieces`] names them one by one. [`Decoder::add_lora`] adds adapters.
//!
//! While a module runs, it enters its path ([`Scope::module_path`]), so that
//! [`DeviceMesh::explain`](crate::dtensor::DeviceMesh::explain), tallies and spans name the module of each call.
//!
//! Not built: pipeline parallelism; an all-to-all of tokens without a capacity ([`Moe`]).
//!
//! The [glossary](crate::glossary) defines the words used here.

mod decoder;
mod forward;
mod layers;
mod params;
mod plan;

pub use crate::ops::product::activation::Activation;
pub use decoder::decoder_config::{DecoderConfig, DecoderLayer, FeedForwardConfig};
pub use decoder::gpt::{Gpt, GptConfig};
pub use decoder::llama::{Llama, LlamaConfig};
pub use decoder::model::Decoder;
pub use forward::Forward;
pub use forward::recompute::recompute;
pub use layers::adapter::LoraConfig;
pub use layers::last_dim_norms::{LayerNorm, RmsNorm};
pub use layers::linear::{Embedding, FusedLinear, Linear};
pub use layers::map_inits::MapInits;
pub use layers::mlp::{Mlp, MlpConfig};
pub use layers::module::Module;
pub use layers::moe::{ExpertWeights, Moe, MoeConfig, MoeOutput};
pub use layers::norm_config::{Norm, NormConfig};
pub use layers::norms::{BatchNorm, GroupNorm};
pub use layers::rotary_config::{RotaryConfig, RotaryScaling};
pub use layers::self_attention::{SelfAttention, SelfAttentionConfig};
pub use layers::sequences::Sequences;
pub use params::param_id::ParamId;
pub(crate) use params::param_state::{load_like, refuse_names};
pub(crate) use params::param_unit::ParamUnit;
pub use params::pieces::{FusedMaps, ParamPiece, PieceRun};
pub use params::scope::Scope;
pub use params::update::Update;
pub(crate) use params::{ParamPlacement, PlacedUnit};
pub use params::{Params, PlanWarning};
pub use plan::rules::{Parallel, Plan};
