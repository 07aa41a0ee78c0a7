//! Feed-forward layers.

use crate::comm::ModulePath;
use crate::dtensor::DTensor;
use crate::error::Result;
use crate::nn::forward::Forward;
use crate::nn::layers::linear::{AdaptedLinear, FusedLinear, Linear};
use crate::nn::layers::map_inits::MapInits;
use crate::nn::layers::module::Module;
use crate::nn::params::pieces::FusedMaps;
use crate::nn::params::scope::Scope;
use crate::ops::Activation;
use crate::tensor::LEAF;

/// The configuration of a feed-forward layer ([`Mlp`]).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MlpConfig {
    /// The hidden width.
    pub hidden: usize,
    /// `true` for `down(f(gate(x)) · up(x))`, `false` for `down(f(up(x)))`, where `f` is the activation.
    pub gated: bool,
    /// The activation.
    pub activation: Activation,
    /// `true` if the maps have biases.
    pub bias: bool,
    /// The probability of dropping an element of the result.
    pub dropout: f64,
}

impl MlpConfig {
    /// Returns a layer `down(gelu(up(x)))` with biases and without dropout, as in GPT-2.
    ///
    /// ```
    /// use isoshard::nn::{Activation, MlpConfig};
    /// let relu = MlpConfig { activation: Activation::Relu, ..MlpConfig::new(64) };
    /// assert!(relu.bias && !relu.gated);
    /// ```
    pub fn new(hidden: usize) -> MlpConfig {
        MlpConfig { hidden, gated: false, activation: Activation::Gelu, bias: true, dropout: 0.0 }
    }

    /// Returns a layer `down(silu(gate(x)) · up(x))` without biases and dropout, as in Llama.
    ///
    /// ```
    /// use isoshard::nn::{Activation, MlpConfig};
    /// let gemma = MlpConfig { activation: Activation::GeluTanh, ..MlpConfig::gated(64) };
    /// assert!(gemma.gated && !gemma.bias);
    /// ```
    pub fn gated(hidden: usize) -> MlpConfig {
        MlpConfig { hidden, gated: true, activation: Activation::Silu, bias: false, dropout: 0.0 }
    }
}

/// A feed-forward layer: `down(f(up(x)))`, or gated `down(f(gate(x)) · up(x))` (Shazeer 2020), with an activation `f`, then
/// dropout.
///
/// If it is gated, the maps `gate` and `up` are one parameter `gate_up.weight` `[hidden / b, 2 b, width]`, where `b` is the
/// largest divisor of the hidden width that is at most 32: a group holds `b` rows of `gate`, then the same rows of `up`. The
/// pieces are `gate.weight` and `up.weight`. Tensor parallelism shards the groups. If their number is no multiple of the
/// ranks, and `b` is not 1, the hidden activations move before `down`.
#[derive(Clone, Debug)]
pub struct Mlp {
    up: UpMap,
    down: Linear,
    activation: Activation,
    dropout: f64,
    path: ModulePath,
    input: String,
}

/// The map to the hidden width.
#[derive(Clone, Debug)]
enum UpMap {
    Plain(Linear),
    Gated {
        gate_up: FusedLinear,
        hidden: usize,
        /// The rows of each map in a group.
        rows: usize,
    },
}

impl Mlp {
    /// Declares the maps `up` `[hidden, width]`, or `gate_up` if the layer is gated, and `down` `[width, hidden]`, and the site
    /// `input`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}};
    /// use isoshard::{placement::Placement, rng::Init, tensor::DType};
    /// use isoshard::nn::{Forward, Mlp, MlpConfig, Module, Params, Plan};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     // Tensor parallelism: the hidden width is sharded, so the result is reduced once.
    ///     let plan = Plan::default().shard("mlp.up.*", "tp", 0).shard("mlp.down.weight", "tp", 1);
    ///     let plan = plan.site("mlp.down", "tp", Placement::Replicate);
    ///     let mut params = Params::new(&mesh, plan, 7)?;
    ///     let config = MlpConfig { dropout: 0.1, ..MlpConfig::new(16) };
    ///     let mlp = Mlp::new(params.root().child("mlp"), 4, config, Init::Ones)?;
    ///     let x = DTensor::ones(&mesh, DType::F32, [2, 5, 4], "(R)")?;
    ///     assert_eq!(mlp.forward(&Forward::eval(&params), &x)?.spec().to_string(), "f32[2, 5, 4]@(tp:R)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// A gated layer, as in Llama:
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}};
    /// use isoshard::{placement::Placement, rng::Init, tensor::DType};
    /// use isoshard::nn::{Forward, Mlp, MlpConfig, Module, Params, Plan};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let plan = Plan::default().shard("mlp.gate_up.weight", "tp", 0).shard("mlp.down.weight", "tp", 1);
    ///     let mut params = Params::new(&mesh, plan.site("mlp.down", "tp", Placement::Replicate), 7)?;
    ///     let mlp = Mlp::new(params.root().child("mlp"), 4, MlpConfig::gated(64), Init::Ones)?;
    ///     let gate_up = params.find("mlp.gate_up.weight").expect("it is declared");
    ///     assert_eq!(params.value(gate_up).shape()[..], [2, 64, 4]); // two groups of 32 rows of each map
    ///     let x = DTensor::ones(&mesh, DType::F32, [2, 5, 4], "(R)")?;
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
        width: usize,
        config: MlpConfig,
        inits: impl Into<MapInits>,
    ) -> Result<Mlp> {
        let MlpConfig { hidden, gated, activation, bias, dropout } = config;
        let MapInits { inner, out } = inits.into();
        let up = if gated {
            let rows = (1..=LEAF).rev().find(|b| hidden.is_multiple_of(*b)).expect("1 divides all widths");
            let maps = FusedMaps::new(hidden / rows, [("gate", rows), ("up", rows)])?;
            let gate_up = FusedLinear::declare(scope.child("gate_up"), width, &maps, bias, inner)?;
            UpMap::Gated { gate_up, hidden, rows }
        } else {
            UpMap::Plain(Linear::declare(scope.child("up"), width, hidden, bias, inner)?)
        };
        Ok(Mlp {
            up,
            down: Linear::declare(scope.child("down"), hidden, width, bias, out)?,
            activation,
            dropout,
            path: scope.module_path(),
            input: scope.site("input"),
        })
    }

    pub(in crate::nn) fn linear_maps(&mut self) -> [AdaptedLinear<'_>; 2] {
        let up = match &mut self.up {
            UpMap::Plain(up) => AdaptedLinear::One(up),
            UpMap::Gated { gate_up, .. } => AdaptedLinear::Fused(gate_up),
        };
        [up, AdaptedLinear::One(&mut self.down)]
    }

    /// Returns the hidden activations.
    fn hidden(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        match &self.up {
            UpMap::Plain(up) => up.forward_then(cx, x, Some(self.activation)),
            UpMap::Gated { gate_up, hidden, rows } => {
                let parts = gate_up.forward(cx, x)?.split(&[*rows, *rows], -1)?;
                let gated = self.activation.apply(&parts[0])?.mul(&parts[1])?;
                let mut shape = x.shape().clone();
                *shape.last_mut().expect("the maps refuse tensors without dims") = *hidden;
                gated.reshape(shape)
            }
        }
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
        let y = self.down.forward(cx, &self.hidden(cx, &x)?)?;
        cx.leave(cx.dropout(y, self.dropout)?)
    }
}
