//! Stochastic gradient descent.

use super::groups::{ParamGroup, ParamGroups, expect_reduced, expect_sound};
use super::optimizer::{Optimizer, UpdateRule};
use super::param_states::ParamStates;
use super::param_tensors::expect_kind;
use super::rates::Rates;
use super::schedule::Schedule;
use super::update_states::update_states;
use crate::checkpoint::{Checkpoint, StateTree};
use crate::dtensor::{DTensor, Gradients};
use crate::error::{Error, Result};
use crate::nn::{ParamId, Params};
use crate::ops::{self, Bits, Unkeyed};
use crate::tensor::MappedFile;

/// The rule's name in checkpoints.
const KIND: &str = "sgd";

/// Stochastic gradient descent with momentum, optionally Nesterov's (Sutskever et al. 2013).
///
/// Each parameter has one momentum buffer in its own layout.
#[derive(Debug, Default)]
pub struct Sgd {
    momentum: f64,
    nesterov: bool,
    weight_decay: f64,
    groups: ParamGroups,
    momenta: ParamStates,
}

impl Sgd {
    /// Returns an SGD without momentum and without weight decay.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::Sgd, rng::Init};
    /// let value = spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let w = params.root().param("w", [], Init::Ones)?;
    ///     let mut optimizer = Sgd::new().momentum(0.5).rate(0.25);
    ///     for _ in 0..2 {
    ///         let mut grads = params.value(w).mul_scalar(1.0)?.backward()?;
    ///         optimizer.step(&mut params, &mut grads)?;
    ///     }
    ///     params.value(w).item()
    /// })?;
    /// assert_eq!(value, [1.0 - 0.25 - 0.25 * 1.5]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn new() -> Sgd {
        Sgd::default()
    }

    /// Multiplies the momentum by `momentum` at each step, before the gradient is added.
    ///
    /// ```
    /// use isoshard::optim::Sgd;
    /// let optimizer = Sgd::new().momentum(0.9).nesterov().decay(1e-4).rate(0.1);
    /// assert_eq!(optimizer.next_rate(), 0.1);
    /// ```
    pub fn momentum(self, momentum: f64) -> Sgd {
        Sgd { momentum, ..self }
    }

    /// Takes Nesterov's momentum.
    ///
    /// ```
    /// use isoshard::optim::Sgd;
    /// let rule = Sgd::new().momentum(0.9).nesterov();
    /// assert!(format!("{rule:?}").contains("nesterov: true"));
    /// ```
    pub fn nesterov(self) -> Sgd {
        Sgd { nesterov: true, ..self }
    }

    /// Adds `weight_decay · parameter` to the gradient at each step.
    ///
    /// ```
    /// use isoshard::optim::Sgd;
    /// assert!(format!("{:?}", Sgd::new().decay(0.5)).contains("weight_decay: 0.5"));
    /// ```
    pub fn decay(self, weight_decay: f64) -> Sgd {
        Sgd { weight_decay, ..self }
    }

    /// Adds a group of parameters with settings of their own, as [`AdamW::group`](super::AdamW::group) does. The first step
    /// refuses decay rates of moments.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
    /// use isoshard::optim::{ParamGroup, Sgd};
    /// let value = spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let w = params.root().param("w", [], Init::Ones)?;
    ///     let mut optimizer = Sgd::new().decay(0.5).group("w", ParamGroup::new().rate(2.0).decay(0.0)).rate(0.125);
    ///     let mut gradients = params.value(w).mul_scalar(1.0)?.backward()?;
    ///     optimizer.step(&mut params, &mut gradients)?;
    ///     params.value(w).item()
    /// })?;
    /// assert_eq!(value, [0.75]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn group(mut self, pattern: &str, group: ParamGroup) -> Sgd {
        self.groups.add(pattern, group);
        self
    }

    /// Multiplies the learning rate by `factor` for parameters whose path matches `pattern`, as
    /// [`AdamW::group_rate`](super::AdamW::group_rate) does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::Sgd, rng::Init};
    /// let values = spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let ids = ["a", "b"].map(|path| params.root().param(path, [], Init::Ones).expect("a free path"));
    ///     let mut optimizer = Sgd::new().group_rate("b", 0.5).rate(0.5);
    ///     let mut loss = params.value(ids[0]).add(params.value(ids[1]))?;
    ///     optimizer.step(&mut params, &mut loss.backward()?)?;
    ///     Ok([params.value(ids[0]).item()?, params.value(ids[1]).item()?])
    /// })?;
    /// assert_eq!(values, [[0.5, 0.75]]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn group_rate(mut self, pattern: &str, factor: f64) -> Sgd {
        self.groups.adjust(pattern, ParamGroup::new().rate(factor));
        self
    }

    /// Sets the weight decay of parameters whose path matches `pattern`; patterns are those of
    /// [`AdamW::group_rate`](super::AdamW::group_rate).
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::Sgd, rng::Init};
    /// let value = spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let bias = params.root().child("map").param("bias", [], Init::Ones)?;
    ///     let mut optimizer = Sgd::new().decay(0.5).group_decay("*.bias", 0.0).rate(0.25);
    ///     let mut grads = params.value(bias).mul_scalar(1.0)?.backward()?;
    ///     optimizer.step(&mut params, &mut grads)?;
    ///     params.value(bias).item()
    /// })?;
    /// assert_eq!(value, [0.75]); // with decay: 0.625
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn group_decay(mut self, pattern: &str, weight_decay: f64) -> Sgd {
        self.groups.adjust(pattern, ParamGroup::new().decay(weight_decay));
        self
    }

    /// Returns this rule as the [`Optimizer`] of a training loop, at the rates of a schedule: a number, a closure, or a
    /// [`WarmupCosine`](super::WarmupCosine).
    ///
    /// ```
    /// use isoshard::optim::{Sgd, WarmupCosine};
    /// let schedule = WarmupCosine { peak: 0.5, floor: 0.0, warmup: 2, steps: 10 };
    /// assert_eq!(Sgd::new().momentum(0.9).nesterov().rate(schedule).next_rate(), 0.25);
    /// ```
    pub fn rate(self, rate: impl Schedule + 'static) -> Optimizer<Sgd> {
        Optimizer::new(self, rate)
    }

    /// Makes one step at the learning rate `lr`, with gradients multiplied by the scalar `scale`; [`Optimizer::step`]
    /// finds both by itself. Parameters without a gradient stay as they are. Communicates nothing if `scale` is
    /// replicated.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, nn::{Params, Plan}, optim::Sgd};
    /// use isoshard::{placement::Layout, rng::Init, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().shard("w", "tp", 0), 7)?;
    ///     let w = params.root().param("w", [3], Init::Ones)?;
    ///     let half = DTensor::full(&mesh, DType::F32, [], Layout::replicated(1), 0.5)?;
    ///     let mut grads = params.value(w).sum_all()?.backward()?;
    ///     Sgd::new().step(&mut params, &mut grads, &half, 0.5)?;
    ///     assert_eq!(params.value(w).full_tensor()?.to_vec::<f32>()?, [0.75; 3]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a `scale` that is not of shape `[]` and the buffers' dtype, unreduced gradients
    /// ([`DeviceMesh::no_sync`](crate::dtensor::DeviceMesh::no_sync)), a group whose pattern matches no parameter, a rate
    /// or decay that is negative or not finite, and a momentum outside [0, 1). Parameters, buffers and `grads` are
    /// unchanged then. If a rank fails, the parameter that was being updated and all later ones are unchanged.
    pub fn step(
        &mut self,
        params: &mut Params,
        grads: &mut Gradients,
        scale: &DTensor,
        lr: impl Into<Rates>,
    ) -> Result<()> {
        UpdateRule::step(self, params, grads, scale, &lr.into())
    }

    /// Returns the momentum buffers.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::Sgd, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let w = params.root().param("w", [2], Init::Ones)?;
    ///     assert!(Sgd::new().momentum(0.9).nesterov().momenta().get(w).is_none()); // no step yet
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn momenta(&self) -> &ParamStates {
        &self.momenta
    }

    /// Returns the momentum buffers, to replace some ([`ParamStates::set`]).
    ///
    /// ```
    /// let mut sgd = isoshard::optim::Sgd::new().momentum(0.9).nesterov();
    /// *sgd.momenta_mut() = Default::default(); // forgets them
    /// ```
    pub fn momenta_mut(&mut self) -> &mut ParamStates {
        &mut self.momenta
    }
}

impl UpdateRule for Sgd {
    fn step(
        &mut self,
        params: &mut Params,
        grads: &mut Gradients,
        scale: &DTensor,
        rates: &Rates,
    ) -> Result<()> {
        expect_reduced("sgd", params, grads)?;
        let settings = self.groups.settings("sgd", params)?;
        for (id, own) in params.ids().zip(settings) {
            if own.has_betas() {
                let given = format!("betas at {}", params.path(id));
                return Err(Error::invalid("sgd", "a group has settings that the rule has", given, ""));
            }
            expect_sound(
                "sgd",
                own.rate_at(rates.of(id)),
                own.decay_or(self.weight_decay),
                &[self.momentum],
            )?;
        }
        let (momentum, nesterov, weight_decay) = (Bits(self.momentum), self.nesterov, self.weight_decay);
        let op_of = |_: &Params, id: ParamId| {
            let own = settings[id.index()];
            let weight_decay = Bits(own.decay_or(weight_decay));
            ops::SgdStep { momentum, weight_decay, nesterov, lr: Unkeyed(own.rate_at(rates.of(id))) }
        };
        update_states(params, grads, std::slice::from_mut(&mut self.momenta), scale, settings, op_of)
    }

    fn offload(&mut self, params: &Params, file: &MappedFile) -> Result<()> {
        self.momenta.offload(params, file)
    }

    fn state(&self, params: &Params) -> Result<StateTree> {
        let mut state = StateTree::new();
        state.insert_value("kind", KIND)?;
        state.insert_tree("momentum", self.momenta.state(params)?)?;
        Ok(state)
    }

    fn load_state(&mut self, params: &Params, saved: &Checkpoint) -> Result<()> {
        expect_kind(saved, KIND)?;
        self.momenta.load_state(params, &saved.subtree("momentum"))
    }
}
