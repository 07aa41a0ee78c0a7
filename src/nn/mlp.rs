//! The feed-forward layers of transformers.

use super::forward::Forward;
use super::layers::{AdaptedLinear, FusedLinear, Linear};
use super::module::Module;
use super::pieces::FusedMaps;
use super::scope::Scope;
use crate::comm::ModulePath;
use crate::dtensor::DTensor;
use crate::error::Result;
use crate::ops::Activation;
use crate::rng::Init;
use crate::tensor::LEAF;

/// A feed-forward layer: `down(f(up(x)))` with an activation `f`, then dropout.
#[derive(Clone, Debug)]
pub struct Mlp {
    up: Linear,
    down: Linear,
    activation: Activation,
    dropout: f64,
    path: ModulePath,
    input: String,
}

impl Mlp {
    /// Declares the maps `up` `[hidden, width]` and `down` `[width, hidden]`, filled by `init` and `down_init`, and the
    /// site `input`. `dropout` is the probability of dropping an element of the result. The activation is
    /// [`Activation::Gelu`].
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
            activation: Activation::Gelu,
            dropout,
            path: scope.module_path(),
            input: scope.site("input"),
        })
    }

    /// Takes another activation.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, rng::Init, tensor::DType};
    /// use isoshard::nn::{Activation, Forward, Mlp, Module, Params, Plan};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let mut params = Params::new(&mesh, Plan::default(), 7)?;
    ///     let inits = (Init::Constant(-1.0), Init::Ones);
    ///     let mlp = Mlp::new(params.root().child("mlp"), (2, 3), false, 0.0, inits)?.activation(Activation::Relu);
    ///     let x = DTensor::full(&mesh, DType::F32, [1, 2], 1.0, "()".parse()?)?;
    ///     assert_eq!(mlp.forward(&Forward::eval(&params), &x)?.full_tensor()?.to_vec::<f32>()?, [0.0, 0.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn activation(self, activation: Activation) -> Mlp {
        Mlp { activation, ..self }
    }

    pub(super) fn linear_maps(&mut self) -> [AdaptedLinear<'_>; 2] {
        [AdaptedLinear::One(&mut self.up), AdaptedLinear::One(&mut self.down)]
    }
}

impl Module for Mlp {
    /// Maps `x` `[.., width]` to the same shape.
    ///
    /// # Errors
    /// Refuses an `x` of another width; returns an error if a rank fails.
    fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        let _scope = self.path.enter();
        let x = cx.site(&self.input, x.clone())?;
        let y = self.down.forward(cx, &self.up.forward_then(cx, &x, Some(self.activation))?)?;
        cx.dropout(y, self.dropout)
    }
}

/// A gated feed-forward layer: `down(f(gate(x)) · up(x))` with an activation `f`, then dropout (Shazeer 2020).
///
/// The maps `gate` and `up` are one parameter `gate_up.weight` `[hidden / b, 2 b, width]`, where `b` is the largest
/// divisor of the hidden width that is at most 32: a group holds `b` rows of `gate`, then the same rows of `up`. The
/// pieces are `gate.weight` and `up.weight`. Tensor parallelism shards the groups. If their number is no multiple of the
/// ranks, and `b` is not 1, the hidden activations move before `down`.
#[derive(Clone, Debug)]
pub struct GatedMlp {
    gate_up: FusedLinear,
    down: Linear,
    hidden: usize,
    /// The rows of each map in a group.
    rows: usize,
    activation: Activation,
    dropout: f64,
    path: ModulePath,
    input: String,
}

impl GatedMlp {
    /// Declares the maps `gate_up` and `down` `[width, hidden]`, filled by `init` and `down_init`, without biases, and
    /// the site `input`. `dropout` is the probability of dropping an element of the result. The activation is
    /// [`Activation::Silu`], as in Llama.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}};
    /// use isoshard::{placement::{Layout, Placement}, rng::Init, tensor::DType};
    /// use isoshard::nn::{Forward, GatedMlp, Module, Params, Plan};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let plan = Plan::default().shard("mlp.gate_up.weight", "tp", 0).shard("mlp.down.weight", "tp", 1);
    ///     let mut params = Params::new(&mesh, plan.site("mlp.down", "tp", Placement::Replicate), 7)?;
    ///     let mlp = GatedMlp::new(params.root().child("mlp"), (4, 64), 0.0, (Init::Ones, Init::Ones))?;
    ///     let gate_up = params.find("mlp.gate_up.weight").expect("it is declared");
    ///     assert_eq!(params.value(gate_up).shape()[..], [2, 64, 4]); // two groups of 32 rows of each map
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
        scope: Scope<'_>,
        sizes: (usize, usize),
        dropout: f64,
        inits: (Init, Init),
    ) -> Result<GatedMlp> {
        GatedMlp::declare(scope, sizes, false, dropout, inits)
    }

    /// Declares the maps of [`GatedMlp::new`] with biases: those of `gate_up` `[2 · hidden]` and of `down` `[width]`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{GatedMlp, Params, Plan}, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     GatedMlp::with_biases(params.root().child("mlp"), (4, 6), 0.0, (Init::Ones, Init::Ones))?;
    ///     assert_eq!(params.find_piece("mlp.up.bias").expect("it is declared").1.shape()[..], [6]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`Scope::param`] refuses.
    pub fn with_biases(
        scope: Scope<'_>,
        sizes: (usize, usize),
        dropout: f64,
        inits: (Init, Init),
    ) -> Result<GatedMlp> {
        GatedMlp::declare(scope, sizes, true, dropout, inits)
    }

    fn declare(
        mut scope: Scope<'_>,
        (width, hidden): (usize, usize),
        bias: bool,
        dropout: f64,
        (init, down_init): (Init, Init),
    ) -> Result<GatedMlp> {
        let rows = (1..=LEAF).rev().find(|b| hidden.is_multiple_of(*b)).expect("1 divides all widths");
        let maps = FusedMaps::new(hidden / rows, [("gate", rows), ("up", rows)])?;
        Ok(GatedMlp {
            gate_up: FusedLinear::new(scope.child("gate_up"), width, &maps, bias, init)?,
            down: Linear::new(scope.child("down"), hidden, width, bias, down_init)?,
            hidden,
            rows,
            activation: Activation::Silu,
            dropout,
            path: scope.module_path(),
            input: scope.site("input"),
        })
    }

    /// Takes another activation.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, rng::Init, tensor::DType};
    /// use isoshard::nn::{Activation, Forward, GatedMlp, Module, Params, Plan};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let mut params = Params::new(&mesh, Plan::default(), 7)?;
    ///     let mlp = GatedMlp::new(params.root().child("mlp"), (2, 3), 0.0, (Init::Ones, Init::Ones))?;
    ///     let x = DTensor::full(&mesh, DType::F32, [1, 2], 1.0, "()".parse()?)?;
    ///     let y = mlp.activation(Activation::Relu).forward(&Forward::eval(&params), &x)?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [12.0, 12.0]); // three times 2 · 2
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn activation(self, activation: Activation) -> GatedMlp {
        GatedMlp { activation, ..self }
    }

    pub(super) fn linear_maps(&mut self) -> [AdaptedLinear<'_>; 2] {
        [AdaptedLinear::Fused(&mut self.gate_up), AdaptedLinear::One(&mut self.down)]
    }
}

impl Module for GatedMlp {
    /// Maps `x` `[.., width]` to the same shape.
    ///
    /// # Errors
    /// Refuses an `x` of another width; returns an error if a rank fails.
    fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        let _scope = self.path.enter();
        let x = cx.site(&self.input, x.clone())?;
        let parts = self.gate_up.forward(cx, &x)?.split(-1, &[self.rows, self.rows])?;
        let gated = self.activation.apply(&parts[0])?.mul(&parts[1])?;
        let mut shape = x.shape().clone();
        *shape.last_mut().expect("the maps refuse tensors without dims") = self.hidden;
        let y = self.down.forward(cx, &gated.reshape(shape)?)?;
        cx.dropout(y, self.dropout)
    }
}
