//! An optimizer in a training loop: an update rule with a learning-rate schedule and a clipping limit.

use std::fmt;

use super::clip::Clipping;
use super::groups::group_of_each;
use super::rates::Rates;
use super::schedule::Schedule;
use crate::checkpoint::{Checkpoint, StateTree};
use crate::dtensor::{DTensor, Gradients};
use crate::error::{Error, Result};
use crate::nn::Params;
use crate::tensor::MappedFile;

/// The rule by which an optimizer changes parameters: [`AdamW`](super::AdamW), [`Sgd`](super::Sgd), or one of your own.
///
/// [`Params::update_by`] makes a rule of operators in a few lines; `examples/07_own_optimizer.rs` has one with a kernel of its own.
pub trait UpdateRule {
    /// Makes one step at these learning rates, with gradients multiplied by `scale`, a replicated tensor of shape
    /// `[]`. Takes the gradients that it uses out of `grads`; leaves parameters without a gradient as they are.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, nn::{Params, Plan}, optim::{Sgd, UpdateRule}};
    /// use isoshard::{placement::Layout, rng::Init, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let w = params.root().param("w", [3], Init::Ones)?;
    ///     let mut gradients = params.value(w).sum_all()?.backward()?;
    ///     let half = DTensor::full(&mesh, DType::F32, [], Layout::replicated(1), 0.5)?;
    ///     UpdateRule::step(&mut Sgd::new(), &mut params, &mut gradients, &half, &0.5.into())?;
    ///     assert_eq!(params.value(w).full_tensor()?.to_vec::<f32>()?, [0.75; 3]); // 1 - 0.5 * 0.5 * 1
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses operands that do not fit; returns an error if a rank fails.
    fn step(
        &mut self,
        params: &mut Params,
        grads: &mut Gradients,
        scale: &DTensor,
        rates: &Rates,
    ) -> Result<()>;

    /// Returns the rule's state, such as moments by the parameters' paths, for a checkpoint.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::{AdamW, UpdateRule}};
    /// spmd(1, |rank| {
    ///     let params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     assert_eq!(AdamW::new().betas(0.9, 0.95).decay(0.1).state(&params)?.value("steps").expect("there"), 0);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a rule that does not implement this.
    fn state(&self, _params: &Params) -> Result<StateTree> {
        Err(Error::unsupported("state", "the update rule has no `state`", "", "implement UpdateRule::state"))
    }

    /// Moves the rule's state to a file that is mapped into memory, and keeps it there
    /// ([`ParamStates::offload`](super::ParamStates::offload)).
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::{Sgd, UpdateRule}, tensor::MappedFile};
    /// spmd(1, |rank| {
    ///     let params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     Sgd::new().momentum(0.9).nesterov().offload(&params, &MappedFile::in_dir(std::env::temp_dir())?)
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a rule that does not implement this, and parameters without elements; returns an error if the disk
    /// is full.
    fn offload(&mut self, _params: &Params, _file: &MappedFile) -> Result<()> {
        let rule = "the update rule has no `offload`";
        Err(Error::unsupported("offload", rule, "", "implement UpdateRule::offload"))
    }

    /// Replaces the rule's state by a saved one, in the layouts of `params`.
    ///
    /// ```
    /// use isoshard::{checkpoint::{self, Checkpoint}, comm::spmd, dtensor::DeviceMesh};
    /// use isoshard::{nn::{Params, Plan}, optim::{AdamW, UpdateRule}};
    /// let dir = std::env::temp_dir().join(format!("isoshard-rule-{}", std::process::id()));
    /// # let also = dir.clone();
    /// spmd(1, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let params = Params::new(&mesh, Plan::default(), 7)?;
    ///     let mut rule = AdamW::new().betas(0.9, 0.95).decay(0.1);
    ///     checkpoint::save(&mesh, &dir, &rule.state(&params)?)?;
    ///     rule.load_state(&params, &Checkpoint::open(&dir)?)
    /// })?;
    /// # std::fs::remove_dir_all(also).unwrap();
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a rule that does not implement this, and a state of another rule or model; the state is unchanged then.
    fn load_state(&mut self, _params: &Params, _saved: &Checkpoint) -> Result<()> {
        let rule = "the update rule has no `load_state`";
        Err(Error::unsupported("load_state", rule, "", "implement UpdateRule::load_state"))
    }
}

/// An update rule with a learning-rate schedule and, optionally, a limit for the gradients' norm: the optimizer of a
/// training loop.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, nn::{Forward, Linear, Module, Params, Plan}};
/// use isoshard::{optim::{AdamW, WarmupCosine}, placement::Layout, rng::Init, tensor::DType};
/// let losses = spmd(2, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
///     let model = Linear::new(params.root().child("map"), 3, 1, Init::Ones)?;
///     let schedule = WarmupCosine { peak: 0.1, floor: 0.01, warmup: 2, steps: 8 };
///     let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.1).rate(schedule).clip(1.0);
///     let x = DTensor::full(&mesh, DType::F32, [5, 3], Layout::replicated(1), 1.0)?;
///     let mut losses = Vec::new();
///     for _ in 0..8 {
///         let y = model.forward(&Forward::train_without_dropout(&params), &x)?;
///         let mut loss = y.mul(&y)?.mean_all()?;
///         optimizer.step(&mut params, &mut loss.backward()?)?;
///         losses.push(loss.item()?);
///     }
///     Ok(losses)
/// })?;
/// assert_eq!(losses[0], losses[1]); // the ranks agree
/// assert!(losses[0][0] == 9.0 && losses[0][7] < 6.0);
/// # Ok::<(), isoshard::Error>(())
/// ```
pub struct Optimizer<R> {
    rule: R,
    schedule: Box<dyn Schedule>,
    /// The schedules of parameters by path pattern.
    group_schedules: Vec<(String, Box<dyn Schedule>)>,
    clipping: Clipping,
    steps: usize,
}

/// The report of one [`Optimizer::step`].
#[derive(Clone, Debug)]
pub struct StepReport {
    /// The number of steps before this one.
    pub step: usize,
    /// The learning rate of this step, before the factors of parameter groups.
    pub rate: f64,
    /// The norm of all gradients before clipping, without those of [groups](Optimizer::clip_group), of shape `[]`; `None` without
    /// a limit. Reading it waits for the
    /// device: `norm.item()?`.
    pub norm: Option<DTensor>,
}

impl<R: UpdateRule> Optimizer<R> {
    /// Returns an optimizer that makes steps of `rule` at the rates of a schedule: a number, a closure from the step to
    /// its rate, or a [`WarmupCosine`](super::WarmupCosine). It clips nothing.
    ///
    /// ```
    /// use isoshard::optim::{Optimizer, Sgd};
    /// let optimizer = Optimizer::new(Sgd::new().momentum(0.9).nesterov(), |step: usize| 0.1 / (1.0 + step as f64));
    /// assert_eq!((optimizer.steps(), optimizer.next_rate()), (0, 0.1));
    /// ```
    pub fn new(rule: R, rate: impl Schedule + 'static) -> Optimizer<R> {
        Optimizer {
            rule,
            schedule: Box::new(rate),
            group_schedules: Vec::new(),
            clipping: Clipping::default(),
            steps: 0,
        }
    }

    /// Takes another schedule for the parameters whose path matches `pattern`. Factors of their groups multiply it too.
    ///
    /// ```
    /// use isoshard::{comm::spmd_first, dtensor::DeviceMesh, nn::{Params, Plan}, optim::Sgd, rng::Init};
    /// let values = spmd_first(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let ids = ["body.w", "head.w"].map(|path| params.root().param(path, [], Init::Ones));
    ///     let [body, head] = [ids[0].clone()?, ids[1].clone()?];
    ///     // The head learns from its second step on.
    ///     let mut optimizer = Sgd::new().rate(0.25).group_schedule("head.*", |step: usize| [0.0, 0.5][step]);
    ///     for _ in 0..2 {
    ///         let mut loss = params.value(body).add(params.value(head))?;
    ///         optimizer.step(&mut params, &mut loss.backward()?)?;
    ///     }
    ///     Ok([params.value(body).item()?, params.value(head).item()?])
    /// })?;
    /// assert_eq!(values, [1.0 - 2.0 * 0.25, 1.0 - 0.5]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// The first step refuses a pattern that matches no parameter, and a parameter with two schedules.
    pub fn group_schedule(mut self, pattern: &str, rate: impl Schedule + 'static) -> Optimizer<R> {
        self.group_schedules.push((pattern.into(), Box::new(rate)));
        self
    }

    /// Returns the rates of the next step.
    fn rates(&self, params: &Params) -> Result<Rates> {
        let checked = |rate: f64| {
            if rate.is_finite() && rate >= 0.0 {
                return Ok(rate);
            }
            let given = format!("{rate} for step {}", self.steps);
            Err(Error::invalid("step", "a learning rate is finite and at least 0", given, ""))
        };
        let mut rates = Rates::from(checked(self.next_rate())?);
        let schedules = &self.group_schedules;
        let schedule_of = group_of_each("step", params, schedules, "a parameter has two schedules", "")?;
        for (group, (_, schedule)) in schedules.iter().enumerate() {
            let own = params.ids().zip(&schedule_of).filter(|(_, of)| **of == Some(group));
            rates = rates.with(own.map(|(id, _)| id), checked(schedule.at(self.steps))?);
        }
        Ok(rates)
    }

    /// Limits the norm of all gradients together to `limit`: larger gradients are scaled down before the update.
    /// `f64::INFINITY` measures the norm and clips nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::Sgd, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let w = params.root().param("w", [1], Init::Zeros)?;
    ///     let mut optimizer = Sgd::new().rate(1.0).clip(0.5);
    ///     let mut loss = params.value(w).mul_scalar(8.0)?.sum_all()?; // a gradient of 8
    ///     let report = optimizer.step(&mut params, &mut loss.backward()?)?;
    ///     assert_eq!(report.norm.expect("there is a limit").item()?, 8.0);
    ///     assert!((params.value(w).item()? + 0.5).abs() < 1e-6);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn clip(self, limit: f64) -> Optimizer<R> {
        self.clip_norm(2.0, limit)
    }

    /// Limits the norm of order `order` of all gradients together, as [`Optimizer::clip`] does with the Euclidean norm: the sum of
    /// magnitudes if `order` is 1, the largest magnitude if it is `f64::INFINITY`.
    ///
    /// ```
    /// use isoshard::{optim::Sgd, prelude::*};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let w = params.root().param("w", [4], Init::Zeros)?;
    ///     let mut optimizer = Sgd::new().rate(1.0).clip_norm(1.0, 2.0);
    ///     let mut loss = params.value(w).sum_all()?; // four gradients of 1
    ///     let report = optimizer.step(&mut params, &mut loss.backward()?)?;
    ///     assert_eq!(report.norm.expect("there is a limit").item()?, 4.0);
    ///     assert!((params.value(w).full_tensor()?.to_vec::<f32>()?[0] + 0.5).abs() < 1e-6);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn clip_norm(mut self, order: f64, limit: f64) -> Optimizer<R> {
        self.clipping.norm = Some((order, limit));
        self
    }

    /// Limits each element of the gradients to `-limit..=limit`, before any norm is measured.
    ///
    /// ```
    /// use isoshard::{optim::Sgd, prelude::*};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let w = params.root().param("w", [1], Init::Zeros)?;
    ///     let mut loss = params.value(w).mul_scalar(8.0)?.sum_all()?; // a gradient of 8
    ///     Sgd::new().rate(1.0).clip_value(0.5).step(&mut params, &mut loss.backward()?)?;
    ///     assert_eq!(params.value(w).item()?, -0.5);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn clip_value(mut self, limit: f64) -> Optimizer<R> {
        self.clipping.value = Some(limit);
        self
    }

    /// Limits the Euclidean norm of the gradients of the parameters whose path matches `pattern`, apart from all others, which
    /// [`Optimizer::clip`] then does not count. A parameter is in one group at most.
    ///
    /// ```
    /// use isoshard::{comm::spmd_first, optim::Sgd, prelude::*};
    /// let values = spmd_first(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let (w, head) = (params.root().param("w", [], Init::Zeros)?, params.root().param("head", [], Init::Zeros)?);
    ///     let mut loss = params.value(w).add(params.value(head))?.mul_scalar(8.0)?; // gradients of 8
    ///     Sgd::new().rate(1.0).clip_group("head", 0.5).step(&mut params, &mut loss.backward()?)?;
    ///     Ok([params.value(w).item()?, params.value(head).item()?])
    /// })?;
    /// assert!(values[0] == -8.0 && (values[1] + 0.5).abs() < 1e-6);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn clip_group(mut self, pattern: &str, limit: f64) -> Optimizer<R> {
        self.clipping.groups.push((pattern.into(), limit));
        self
    }

    /// Makes one step: measures the norm and clips, if there is a limit, then updates all parameters that have a
    /// gradient.
    ///
    /// Communicates the norm ([`Params::grad_norm`]) and nothing else. Writes in place, unless a tape that was kept
    /// ([`DTensor::backward_keeping`]) shares the parameters' buffers.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::Sgd, rng::Init};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let w = params.root().param("w", [3], Init::Ones)?;
    ///     let mut optimizer = Sgd::new().rate(|step: usize| [0.5, 0.25][step]);
    ///     for rate in [0.5, 0.25] {
    ///         let mut grads = params.value(w).sum_all()?.backward()?;
    ///         assert_eq!(optimizer.step(&mut params, &mut grads)?.rate, rate);
    ///     }
    ///     assert_eq!(params.value(w).full_tensor()?.to_vec::<f32>()?, [0.25; 3]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses gradients if none belongs to these parameters: they were computed before the last step or from another
    /// model. Refuses a rate that is negative or not finite, and a limit that is not above 0. Refuses what the update rule refuses, and counts no step then. Returns an error if a rank fails.
    pub fn step(&mut self, params: &mut Params, grads: &mut Gradients) -> Result<StepReport> {
        let with_gradient = params.values().find(|value| grads.get(value).is_some());
        let Some(dtype) = with_gradient.map(|value| value.dtype()) else {
            return Err(Error::invalid(
                "step",
                "no parameter has a gradient",
                format!("{} parameter(s)", params.len()),
                "compute the loss from these parameters after the last step",
            ));
        };
        let next = next_step(self.steps as u64)?;
        let rates = self.rates(params)?;
        let (norm, scale) = self.clipping.apply(params, grads, dtype)?;
        self.rule.step(params, grads, &scale, &rates)?;
        let step = self.steps;
        self.steps = next as usize;
        Ok(StepReport { step, rate: rates.base(), norm })
    }

    /// Returns the optimizer's state for a checkpoint: the number of steps, by which the schedule goes on, and the rule's
    /// state. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::AdamW, rng::Init};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let w = params.root().param("w", [3], Init::Ones)?;
    ///     let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.0).rate(1e-3);
    ///     let mut gradients = params.value(w).sum_all()?.backward()?;
    ///     optimizer.step(&mut params, &mut gradients)?;
    ///     let state = optimizer.state(&params)?;
    ///     let names: Vec<&str> = state.tensors().map(|(name, _)| name).collect();
    ///     assert_eq!(names, ["rule.first.w", "rule.second.w"]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an update rule without [`UpdateRule::state`].
    pub fn state(&self, params: &Params) -> Result<StateTree> {
        let mut state = StateTree::new();
        state.insert_value("steps", self.steps)?;
        state.insert_tree("rule", self.rule.state(params)?)?;
        Ok(state)
    }

    /// Replaces the state by a saved one, in the layouts of `params`. All ranks call this together.
    ///
    /// ```
    /// use isoshard::{checkpoint::{self, Checkpoint}, comm::spmd, dtensor::DeviceMesh};
    /// use isoshard::{nn::{Params, Plan}, optim::AdamW, rng::Init};
    /// let dir = std::env::temp_dir().join(format!("isoshard-optimizer-{}", std::process::id()));
    /// # let also = dir.clone();
    /// spmd(2, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let w = params.root().param("w", [3], Init::Ones)?;
    ///     let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.0).rate(1e-3);
    ///     let mut gradients = params.value(w).sum_all()?.backward()?;
    ///     optimizer.step(&mut params, &mut gradients)?;
    ///     checkpoint::save(&mesh, &dir, &optimizer.state(&params)?)?;
    ///
    ///     let mut fresh = AdamW::new().betas(0.9, 0.95).decay(0.0).rate(1e-3);
    ///     fresh.load_state(&params, &Checkpoint::open(&dir)?)?;
    ///     assert_eq!(fresh.steps(), 1);
    ///     Ok(())
    /// })?;
    /// # std::fs::remove_dir_all(also).unwrap();
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a state of another rule or model, and files that are not those that were saved; the state is unchanged
    /// then.
    pub fn load_state(&mut self, params: &Params, saved: &Checkpoint) -> Result<()> {
        let steps = saved_steps(saved)?;
        self.rule.load_state(params, &saved.subtree("rule"))?;
        self.steps = usize::try_from(steps).map_err(|_| last_step(steps))?;
        Ok(())
    }

    /// Moves the optimizer's states, made so far and later, to a file that is mapped into memory, with the same bits.
    /// [`Params::offload`] shows an example. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::AdamW, rng::Init, tensor::MappedFile};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let w = params.root().param("w", [1000], Init::Ones)?;
    ///     let file = MappedFile::in_dir(std::env::temp_dir())?;
    ///     let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.1).rate(0.5);
    ///     optimizer.offload(&params, &file)?;
    ///     let mut gradients = params.value(w).sum_all()?.backward()?;
    ///     optimizer.step(&mut params, &mut gradients)?;
    ///     assert_eq!(file.live_bytes(), 2 * 4096); // two moments of 4000 bytes
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`UpdateRule::offload`] refuses.
    pub fn offload(&mut self, params: &Params, file: &MappedFile) -> Result<()> {
        self.rule.offload(params, file)
    }

    /// Returns the update rule, such as to read its state.
    ///
    /// ```
    /// use isoshard::optim::AdamW;
    /// let optimizer = AdamW::new().betas(0.9, 0.95).decay(0.1).rate(3e-4);
    /// let [first, second] = optimizer.rule().moments();
    /// ```
    pub fn rule(&self) -> &R {
        &self.rule
    }

    /// Returns the update rule, such as to replace a part of its state.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::AdamW, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let w = params.root().param("w", [2], Init::Ones)?;
    ///     let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.1).rate(3e-4);
    ///     for moments in optimizer.rule_mut().moments_mut() {
    ///         moments.set(&params, w, params.zeros_like(w)?)?;
    ///     }
    ///     assert_eq!(optimizer.state(&params)?.tensors().count(), 2);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn rule_mut(&mut self) -> &mut R {
        &mut self.rule
    }

    /// Returns the number of steps made.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::AdamW, rng::Init};
    /// let steps = spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let w = params.root().param("w", [2], Init::Ones)?;
    ///     let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.0).rate(1e-3);
    ///     let mut grads = params.value(w).sum_all()?.backward()?;
    ///     optimizer.step(&mut params, &mut grads)?;
    ///     // These gradients were used: a refused step does not count.
    ///     assert!(optimizer.step(&mut params, &mut grads).is_err());
    ///     Ok(optimizer.steps())
    /// })?;
    /// assert_eq!(steps, [1]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// Returns the learning rate of the next step.
    ///
    /// ```
    /// let optimizer = isoshard::optim::AdamW::new().betas(0.9, 0.95).decay(0.1).rate(3e-4);
    /// assert_eq!(optimizer.next_rate(), 3e-4);
    /// ```
    pub fn next_rate(&self) -> f64 {
        self.schedule.at(self.steps)
    }
}

/// Returns the number of steps of a saved state.
/// Returns the number of steps after one more.
pub(super) fn next_step(steps: u64) -> Result<u64> {
    steps.checked_add(1).ok_or_else(|| last_step(steps))
}

/// Returns the error of a number of steps after which none is counted.
fn last_step(steps: u64) -> Error {
    let remedy = "begin with a new optimizer";
    Error::invalid("step", "an optimizer counts no further step", steps.to_string(), remedy)
}

pub(super) fn saved_steps(saved: &Checkpoint) -> Result<u64> {
    let value = saved.value("steps");
    value.and_then(|value| value.as_u64()).ok_or_else(|| {
        let given = value.map_or("none".into(), |value| value.to_string());
        Error::invalid("load_state", "an optimizer's state has a number of steps", given, "")
    })
}

/// Omits the schedule, which may be a closure.
impl<R: fmt::Debug> fmt::Debug for Optimizer<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Optimizer { rule, clipping, steps, .. } = self;
        let mut optimizer = f.debug_struct("Optimizer");
        optimizer
            .field("rule", rule)
            .field("clipping", clipping)
            .field("steps", steps)
            .finish_non_exhaustive()
    }
}
