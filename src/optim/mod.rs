//! Optimizers, learning-rate schedules and gradient clipping, built on distributed tensors.
//!
//! They work on parameters in any layout and communicate nothing but the gradients' norm. A training loop takes an
//! update rule, a schedule and a limit ([`Optimizer`]); parameter groups are path patterns, as in a
//! [`Plan`](crate::nn::Plan):
//!
//! ```
//! use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, nn::{Forward, Gpt, GptConfig, Parallel, Params, Plan}};
//! use isoshard::{optim::{AdamW, WarmupCosine}, rng::Generator, tensor::Tensor};
//!
//! # let losses =
//! spmd(2, |rank| {
//!     let mesh = DeviceMesh::parse(&rank, "fsdp=2")?;
//!     let plan = Plan::transformer(mesh.mesh(), Parallel { heads: 2, sequence: false })?;
//!     let (batch, mut params) = (plan.batch_layout(mesh.mesh()), Params::new(&mesh, plan, 7)?);
//!     let config = GptConfig { vocabulary: 11, block: 6, layers: 1, heads: 2, width: 8, dropout: 0.1, bias: true };
//!     let model = Gpt::new(&mut params, config)?;
//!     let schedule = WarmupCosine { peak: 1e-2, floor: 1e-3, warmup: 2, steps: 6 };
//!     let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.1).group_decay("wte.weight", 0.0).rate(schedule).clip(1.0);
//!     let mut dropout = Generator::new(7).child("dropout");
//!     # let text = |from: i64| Tensor::from_vec((from..from + 24).map(|i| i * i % 11).collect(), [4, 6]);
//!     # let tokens = DTensor::distribute(&mesh, &text(0)?, batch.clone())?;
//!     # let targets = DTensor::distribute(&mesh, &text(1)?, batch)?;
//!     # let mut losses = Vec::new();
//!     for _ in 0..6 {
//!         let mut loss = model.loss(&Forward::train(&params, &mut dropout), &tokens, &targets)?;
//!         let report = optimizer.step(&mut params, &mut loss.backward()?)?;
//!         // report.rate, report.norm
//!         # let _ = report;
//!         # losses.push(loss.item()?);
//!     }
//!     # Ok(losses)
//! })?;
//! # assert!(losses[0][5] < losses[0][0]);
//! # Ok::<(), isoshard::Error>(())
//! ```
//!
//! An optimizer of your own is an [`UpdateRule`]. [`Params::update_by`](crate::nn::Params::update_by) makes it of operators, in
//! 20 lines. For one pass over memory its arithmetic is an operator ([`Op`](crate::ops::Op)) on a
//! parameter, its gradient and the state that the optimizer keeps; [`Params::update`](crate::nn::Params::update)
//! applies it to many parameters in place, on a device in few launches ([`Batched`](crate::ops::Batched)).
//! [`ParamStates`] are its states by parameter, which are read, replaced and saved; [`ParamGroups`] its settings by path.
//! `examples/07_own_optimizer.rs` shows one.
//!
//! The [glossary](crate::glossary) defines the words used here.

mod adamw;
mod clip;
mod groups;
mod loss_scale;
mod optimizer;
mod param_states;
mod param_tensors;
mod rates;
mod schedule;
mod sgd;
#[cfg(test)]
mod thread_tests;
mod update_by;
mod update_states;

pub use adamw::AdamW;
pub use clip::{clip_scale, global_norm};
pub use groups::{ParamGroup, ParamGroups};
pub use loss_scale::LossScale;
pub use optimizer::{Optimizer, StepReport, UpdateRule};
pub use param_states::ParamStates;
pub use rates::Rates;
pub use schedule::{Schedule, WarmupCosine, WarmupLinear, WarmupRestarts, WarmupStableDecay};
pub use sgd::Sgd;
