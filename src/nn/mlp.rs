//! The feed-forward layers of transformers.

use super::forward::Forward;
use super::layers::Linear;
use super::module::Module;
use super::scope::Scope;
use crate::dtensor::DTensor;
use crate::error::Result;
use crate::rng::Init;

/// A feed-forward layer: `down(gelu(up(x)))`, then dropout.
#[derive(Clone, Debug)]
pub struct Mlp {
    up: Linear,
    down: Linear,
    dropout: f64,
    input: String,
}

impl Mlp {
    /// Declares the maps `up` `[hidden, width]` and `down` `[width, hidden]`, filled by `init` and `down_init`, and the
    /// site `input`. `dropout` is the probability of dropping an element of the result.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}};
    /// use isoshard::{placement::{Layout, Placement}, rng::Init, tensor::DType};
    /// use isoshard::nn::{Forward, Mlp, Module, Params, Plan};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     // Tensor parallelism: the hidden width is sharded, so the result is reduced once.
    ///     let plan = Plan::default().shard("mlp.up.*", "tp", 0).shard("mlp.down.weight", "tp", 1);
    ///     let plan = plan.site("mlp.down", "tp", Placement::Replicate);
    ///     let mut params = Params::new(&mesh, plan, 7)?;
    ///     let mlp = Mlp::new(params.root().child("mlp"), (4, 16), true, 0.1, (Init::Ones, Init::Ones))?;
    ///     let x = DTensor::full(&mesh, DType::F32, [2, 5, 4], 1.0, Layout::replicated(1))?;
    ///     assert_eq!(mlp.forward(&Forward::eval(&params), &x)?.spec().to_string(), "f32[2, 5, 4]@(tp:R)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`Scope::param`] refuses.
    pub fn new(
        mut scope: Scope<'_>,
        (width, hidden): (usize, usize),
        bias: bool,
        dropout: f64,
        (init, down_init): (Init, Init),
    ) -> Result<Mlp> {
        Ok(Mlp {
            up: Linear::new(scope.child("up"), width, hidden, bias, init)?,
            down: Linear::new(scope.child("down"), hidden, width, bias, down_init)?,
            dropout,
            input: scope.site("input"),
        })
    }
}

impl Module for Mlp {
    /// Maps `x` `[.., width]` to the same shape.
    ///
    /// # Errors
    /// Refuses an `x` of another width; returns an error if a rank fails.
    fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        let x = cx.site(&self.input, x.clone())?;
        let y = self.down.forward(cx, &self.up.forward(cx, &x)?.gelu()?)?;
        cx.dropout(y, self.dropout)
    }
}

/// A gated feed-forward layer: `down(silu(gate(x)) · up(x))`, then dropout (Shazeer 2020), as in Llama.
#[derive(Clone, Debug)]
pub struct GatedMlp {
    gate: Linear,
    up: Linear,
    down: Linear,
    dropout: f64,
    input: String,
}

impl GatedMlp {
    /// Declares the maps `gate` and `up` `[hidden, width]` and `down` `[width, hidden]`, filled by `init` and
    /// `down_init`, without biases, and the site `input`. `dropout` is the probability of dropping an element of the
    /// result.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}};
    /// use isoshard::{placement::{Layout, Placement}, rng::Init, tensor::DType};
    /// use isoshard::nn::{Forward, GatedMlp, Module, Params, Plan};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let plan = Plan::default().shard("mlp.gate.weight", "tp", 0).shard("mlp.up.weight", "tp", 0);
    ///     let plan = plan.shard("mlp.down.weight", "tp", 1).site("mlp.down", "tp", Placement::Replicate);
    ///     let mut params = Params::new(&mesh, plan, 7)?;
    ///     let mlp = GatedMlp::new(params.root().child("mlp"), (4, 6), 0.0, (Init::Ones, Init::Ones))?;
    ///     let x = DTensor::full(&mesh, DType::F32, [2, 5, 4], 1.0, Layout::replicated(1))?;
    ///     assert_eq!(mlp.forward(&Forward::eval(&params), &x)?.spec().to_string(), "f32[2, 5, 4]@(tp:R)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`Scope::param`] refuses.
    pub fn new(
        mut scope: Scope<'_>,
        (width, hidden): (usize, usize),
        dropout: f64,
        (init, down_init): (Init, Init),
    ) -> Result<GatedMlp> {
        Ok(GatedMlp {
            gate: Linear::new(scope.child("gate"), width, hidden, false, init)?,
            up: Linear::new(scope.child("up"), width, hidden, false, init)?,
            down: Linear::new(scope.child("down"), hidden, width, false, down_init)?,
            dropout,
            input: scope.site("input"),
        })
    }
}

impl Module for GatedMlp {
    /// Maps `x` `[.., width]` to the same shape.
    ///
    /// # Errors
    /// Refuses an `x` of another width; returns an error if a rank fails.
    fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        let x = cx.site(&self.input, x.clone())?;
        let gated = self.gate.forward(cx, &x)?.silu()?.mul(&self.up.forward(cx, &x)?)?;
        let y = self.down.forward(cx, &gated)?;
        cx.dropout(y, self.dropout)
    }
}
