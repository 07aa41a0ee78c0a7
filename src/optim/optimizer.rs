//! An optimizer in a training loop: an update rule with a learning-rate schedule and a clipping limit.

use std::fmt;

use super::clip::clip_scale;
use super::schedule::Schedule;
use crate::checkpoint::{Checkpoint, StateTree};
use crate::dtensor::{DTensor, Gradients};
use crate::error::{Error, Result};
use crate::nn::Params;
use crate::placement::Layout;
use crate::tensor::MappedFile;

/// The rule by which an optimizer changes parameters: [`AdamW`](super::AdamW), [`Sgd`](super::Sgd), or one of your own.
///
/// `examples/07_own_optimizer.rs` implements Lion.
pub trait UpdateRule {
    /// Makes one step at the learning rate `lr`, with gradients multiplied by `scale`, a replicated tensor of shape
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
    ///     let half = DTensor::full(&mesh, DType::F32, [], 0.5, Layout::replicated(1))?;
    ///     UpdateRule::step(&mut Sgd::new(0.0, false, 0.0), &mut params, &mut gradients, &half, 0.5)?;
    ///     assert_eq!(params.value(w).full_tensor()?.to_vec::<f32>()?, [0.75; 3]); // 1 - 0.5 * 0.5 * 1
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses operands that do not fit; returns an error if a rank fails.
    fn step(&mut self, params: &mut Params, grads: &mut Gradients, scale: &DTensor, lr: f64) -> Result<()>;

    /// Returns the rule's state, such as moments by the parameters' paths, for a checkpoint.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::{AdamW, UpdateRule}};
    /// spmd(1, |rank| {
    ///     let params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     assert_eq!(AdamW::new((0.9, 0.95), 0.1).state(&params)?.value("steps").expect("there"), 0);
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
    ///     Sgd::new(0.9, true, 0.0).offload(&params, &MappedFile::in_dir(std::env::temp_dir())?)
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
    ///     let mut rule = AdamW::new((0.9, 0.95), 0.1);
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
///     let model = Linear::new(params.root().child("map"), 3, 1, true, Init::Ones)?;
///     let schedule = WarmupCosine { peak: 0.1, floor: 0.01, warmup: 2, steps: 8 };
///     let mut optimizer = AdamW::new((0.9, 0.95), 0.1).rate(schedule).clip(1.0);
///     let x = DTensor::full(&mesh, DType::F32, [5, 3], 1.0, Layout::replicated(1))?;
///     let mut losses = Vec::new();
///     for _ in 0..8 {
///         let y = model.forward(&Forward::train_without_dropout(&params), &x)?;
///         let mut loss = y.mul(&y)?.mean_all()?;
///         optimizer.step(&mut params, &mut loss.backward_freeing()?)?;
///         losses.push(loss.full_tensor()?.item()?);
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
    clip: Option<f64>,
    steps: usize,
}

/// The report of one [`Optimizer::step`].
#[derive(Clone, Debug)]
pub struct StepReport {
    /// The number of steps before this one.
    pub step: usize,
    /// The learning rate of this step, before the factors of parameter groups.
    pub rate: f64,
    /// The norm of all gradients before clipping, of shape `[]`; `None` without a limit. Reading it waits for the
    /// device: `norm.full_tensor()?.item()?`.
    pub norm: Option<DTensor>,
}

impl<R: UpdateRule> Optimizer<R> {
    /// Returns an optimizer that makes steps of `rule` at the rates of a schedule: a number, a closure from the step to
    /// its rate, or a [`WarmupCosine`](super::WarmupCosine). It clips nothing.
    ///
    /// ```
    /// use isoshard::optim::{Optimizer, Sgd};
    /// let optimizer = Optimizer::new(Sgd::new(0.9, true, 0.0), |step: usize| 0.1 / (1.0 + step as f64));
    /// assert_eq!((optimizer.steps(), optimizer.next_rate()), (0, 0.1));
    /// ```
    pub fn new(rule: R, rate: impl Schedule + 'static) -> Optimizer<R> {
        Optimizer { rule, schedule: Box::new(rate), clip: None, steps: 0 }
    }

    /// Limits the norm of all gradients together to `limit`: larger gradients are scaled down before the update.
    /// `f64::INFINITY` measures the norm and clips nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::Sgd, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let w = params.root().param("w", [1], Init::Zeros)?;
    ///     let mut optimizer = Sgd::new(0.0, false, 0.0).rate(1.0).clip(0.5);
    ///     let mut loss = params.value(w).mul_scalar(8.0)?.sum_all()?; // a gradient of 8
    ///     let report = optimizer.step(&mut params, &mut loss.backward_freeing()?)?;
    ///     assert_eq!(report.norm.expect("there is a limit").full_tensor()?.item()?, 8.0);
    ///     assert!((params.value(w).full_tensor()?.item()? + 0.5).abs() < 1e-6);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn clip(mut self, limit: f64) -> Optimizer<R> {
        self.clip = Some(limit);
        self
    }

    /// Makes one step: measures the norm and clips, if there is a limit, then updates all parameters that have a
    /// gradient.
    ///
    /// Communicates the norm ([`Params::grad_norm`]) and nothing else. Drop the loss before the step if memory is
    /// short: its history shares the parameters' buffers, so the step copies them instead of writing in place.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::Sgd, rng::Init};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let w = params.root().param("w", [3], Init::Ones)?;
    ///     let mut optimizer = Sgd::new(0.0, false, 0.0).rate(|step: usize| [0.5, 0.25][step]);
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
        let rate = self.next_rate();
        if !(rate.is_finite() && rate >= 0.0) {
            let given = format!("{rate} for step {}", self.steps);
            return Err(Error::invalid("step", "a learning rate is finite and at least 0", given, ""));
        }
        let norm = self.clip.map(|_| params.grad_norm(grads)).transpose()?;
        let scale = match (&norm, self.clip) {
            (Some(norm), Some(limit)) => clip_scale(norm, limit)?,
            _ => {
                let everywhere = Layout::replicated(params.mesh().mesh().ndim());
                DTensor::full(params.mesh(), dtype, [], 1.0, everywhere)?
            }
        };
        self.rule.step(params, grads, &scale, rate)?;
        let step = self.steps;
        self.steps = next as usize;
        Ok(StepReport { step, rate, norm })
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
    ///     let mut optimizer = AdamW::new((0.9, 0.95), 0.0).rate(1e-3);
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
    ///     let mut optimizer = AdamW::new((0.9, 0.95), 0.0).rate(1e-3);
    ///     let mut gradients = params.value(w).sum_all()?.backward()?;
    ///     optimizer.step(&mut params, &mut gradients)?;
    ///     checkpoint::save(&mesh, &dir, &optimizer.state(&params)?)?;
    ///
    ///     let mut fresh = AdamW::new((0.9, 0.95), 0.0).rate(1e-3);
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
    ///     let mut optimizer = AdamW::new((0.9, 0.95), 0.1).rate(0.5);
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
    /// let optimizer = AdamW::new((0.9, 0.95), 0.1).rate(3e-4);
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
    ///     let mut optimizer = AdamW::new((0.9, 0.95), 0.1).rate(3e-4);
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
    ///     let mut optimizer = AdamW::new((0.9, 0.95), 0.0).rate(1e-3);
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
    /// let optimizer = isoshard::optim::AdamW::new((0.9, 0.95), 0.1).rate(3e-4);
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
        let Optimizer { rule, clip, steps, .. } = self;
        let mut optimizer = f.debug_struct("Optimizer");
        optimizer.field("rule", rule).field("clip", clip).field("steps", steps).finish_non_exhaustive()
    }
}
