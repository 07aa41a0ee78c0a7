//! AdamW (Loshchilov & Hutter 2019, algorithm 2).

use super::groups::{ParamGroup, ParamGroups, expect_reduced, expect_sound};
use super::optimizer::{Optimizer, UpdateRule, next_step, saved_steps};
use super::param_states::ParamStates;
use super::param_tensors::expect_kind;
use super::rates::Rates;
use super::schedule::Schedule;
use super::update_states::update_states;
use crate::checkpoint::{Checkpoint, StateTree};
use crate::dtensor::{DTensor, Gradients};
use crate::error::{Error, Result};
use crate::nn::{ParamId, Params};
use crate::ops;
use crate::tensor::MappedFile;

/// The rule's name in checkpoints.
const KIND: &str = "adamw";

/// AdamW: Adam with decoupled weight decay (Loshchilov & Hutter 2019). It decays parameters of two or more dims, so
/// neither biases nor the weights of normalisations, unless a [group](AdamW::group_decay) says otherwise; PyTorch's decays all.
///
/// Each parameter has two moments in its own layout: under FSDP, a rank holds the moments of its shard only.
#[derive(Debug)]
pub struct AdamW {
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    groups: ParamGroups,
    steps: u64,
    /// The first moments, and the second ones.
    moments: [ParamStates; 2],
}

impl AdamW {
    /// Returns an AdamW with PyTorch's settings: betas 0.9 and 0.999, eps 1e-8, weight decay 0.01.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::AdamW, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let w = params.root().param("w", [2, 2], Init::Ones)?;
    ///     let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.5).rate(0.5);
    ///     let mut grads = params.value(w).sum_all()?.backward()?;
    ///     optimizer.step(&mut params, &mut grads)?;
    ///     // The first step moves by the rate: 1 · (1 - 0.5 · 0.5) - 0.5.
    ///     assert_eq!(params.value(w).full_tensor()?.to_vec::<f32>()?, [0.25; 4]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn new() -> AdamW {
        AdamW::default()
    }

    /// Takes other decay rates of the first and of the second moment.
    ///
    /// ```
    /// use isoshard::optim::AdamW;
    /// assert!(format!("{:?}", AdamW::new().betas(0.9, 0.95)).contains("betas: (0.9, 0.95)"));
    /// ```
    pub fn betas(self, first: f64, second: f64) -> AdamW {
        AdamW { betas: (first, second), ..self }
    }

    /// Adds another number to the root of the second moment, by which the first one is divided.
    ///
    /// ```
    /// use isoshard::{comm::spmd_first, dtensor::DeviceMesh, nn::{Params, Plan}, optim::AdamW, rng::Init};
    /// let value = spmd_first(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let w = params.root().param("w", [], Init::Ones)?;
    ///     let mut grads = params.value(w).mul_scalar(1.0)?.backward()?;
    ///     AdamW::new().eps(3.0).rate(1.0).step(&mut params, &mut grads)?;
    ///     params.value(w).item()
    /// })?;
    /// assert_eq!(value, 1.0 - 1.0 / (1.0 + 3.0));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn eps(self, eps: f64) -> AdamW {
        AdamW { eps, ..self }
    }

    /// Takes another weight decay: each step at rate `lr` multiplies decayed parameters by `1 - lr · weight_decay`.
    ///
    /// ```
    /// use isoshard::optim::AdamW;
    /// assert!(format!("{:?}", AdamW::new().decay(0.1)).contains("weight_decay: 0.1"));
    /// ```
    pub fn decay(self, weight_decay: f64) -> AdamW {
        AdamW { weight_decay, ..self }
    }

    /// Adds a group of parameters with settings of their own: those whose path matches `pattern`. A parameter is in one
    /// group at most.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
    /// use isoshard::optim::{AdamW, ParamGroup};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let body = params.root().child("h").child(0).param("weight", [2], Init::Ones)?;
    ///     let head = params.root().child("head").param("weight", [2], Init::Ones)?;
    ///     let slow = ParamGroup::new().rate(0.5).decay(0.0);
    ///     let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.1).group("head.**", slow).rate(0.5);
    ///     let mut loss = params.value(body).mul(params.value(head))?.sum_all()?;
    ///     optimizer.step(&mut params, &mut loss.backward()?)?;
    ///     assert_eq!(params.value(body).full_tensor()?.to_vec::<f32>()?, [0.5; 2]);
    ///     assert_eq!(params.value(head).full_tensor()?.to_vec::<f32>()?, [0.75; 2]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn group(mut self, pattern: &str, group: ParamGroup) -> AdamW {
        self.groups.add(pattern, group);
        self
    }

    /// Multiplies the learning rate by `factor` for parameters whose path matches `pattern`, whatever group they are in.
    ///
    /// A pattern is a path whose parts may be `*`, as in a [`Plan`](crate::nn::Plan): `h.*.attn.qkv.weight`. Among
    /// several such settings that match a path, the last one decides. The first step refuses a pattern that matches no
    /// parameter.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::AdamW, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let frozen = params.root().child("h").child(0).param("weight", [2], Init::Ones)?;
    ///     let free = params.root().child("h").child(1).param("weight", [2], Init::Ones)?;
    ///     let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.0).group_rate("h.0.*", 0.0).rate(0.5);
    ///     let mut loss = params.value(frozen).mul(params.value(free))?.sum_all()?;
    ///     optimizer.step(&mut params, &mut loss.backward()?)?;
    ///     assert_eq!(params.value(frozen).full_tensor()?.to_vec::<f32>()?, [1.0; 2]);
    ///     assert_eq!(params.value(free).full_tensor()?.to_vec::<f32>()?, [0.5; 2]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn group_rate(mut self, pattern: &str, factor: f64) -> AdamW {
        self.groups.adjust(pattern, ParamGroup::new().rate(factor));
        self
    }

    /// Sets the weight decay of parameters whose path matches `pattern`, however many dims they have. Patterns are
    /// those of [`AdamW::group_rate`].
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::AdamW, rng::Init};
    /// let error = spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let table = params.root().child("wte").param("weight", [2, 2], Init::Ones)?;
    ///     let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.1).group_decay("wte.wieght", 0.0).rate(0.5);
    ///     let mut grads = params.value(table).sum_all()?.backward()?;
    ///     optimizer.step(&mut params, &mut grads).map(drop)
    /// });
    /// assert!(error.unwrap_err().to_string().ends_with("the nearest are wte.weight"));
    /// ```
    pub fn group_decay(mut self, pattern: &str, weight_decay: f64) -> AdamW {
        self.groups.adjust(pattern, ParamGroup::new().decay(weight_decay));
        self
    }

    /// Sets the moments' decay rates of parameters whose path matches `pattern`. Patterns are those of
    /// [`AdamW::group_rate`].
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::AdamW, rng::Init};
    /// let values = spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let scope = &mut params.root();
    ///     let ids = [scope.param("slow", [], Init::Ones)?, scope.param("fast", [], Init::Ones)?];
    ///     let mut optimizer = AdamW::new().betas(0.9, 0.99).decay(0.0).group_betas("fast", 0.5, 0.5).rate(0.125);
    ///     for sign in [1.0, -1.0] {
    ///         let mut loss = params.value(ids[0]).add(params.value(ids[1]))?.mul_scalar(sign)?;
    ///         optimizer.step(&mut params, &mut loss.backward()?)?;
    ///     }
    ///     ids.map(|id| params.value(id).item()).into_iter().collect::<Result<Vec<_>, _>>()
    /// })?;
    /// // Opposite gradients: the first moment with the smaller beta turns further.
    /// assert!(values[0][0] < values[0][1]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn group_betas(mut self, pattern: &str, first: f64, second: f64) -> AdamW {
        self.groups.adjust(pattern, ParamGroup::new().betas(first, second));
        self
    }

    /// Returns this rule as the [`Optimizer`] of a training loop, at the rates of a schedule: a number, a closure, or a
    /// [`WarmupCosine`](super::WarmupCosine).
    ///
    /// ```
    /// let optimizer = isoshard::optim::AdamW::new().betas(0.9, 0.95).decay(0.1).rate(|step: usize| 1e-3 / (step + 1) as f64);
    /// assert_eq!(optimizer.next_rate(), 1e-3);
    /// ```
    pub fn rate(self, rate: impl Schedule + 'static) -> Optimizer<AdamW> {
        Optimizer::new(self, rate)
    }

    /// Makes one step at the learning rate `lr`, with gradients multiplied by the scalar `scale`; [`Optimizer::step`]
    /// finds both by itself. Parameters without a gradient stay as they are. Communicates nothing if `scale` is
    /// replicated.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, nn::{Params, Plan}, optim::AdamW};
    /// use isoshard::{placement::Layout, rng::Init, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let w = params.root().param("w", [3], Init::Ones)?;
    ///     let one = DTensor::full(&mesh, DType::F32, [], Layout::replicated(1), 1.0)?;
    ///     let mut grads = params.value(w).sum_all()?.backward()?;
    ///     AdamW::new().betas(0.9, 0.95).decay(0.1).step(&mut params, &mut grads, &one, 0.25)?;
    ///     assert_eq!(params.value(w).full_tensor()?.to_vec::<f32>()?, [0.75; 3]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a `scale` that is not of shape `[]` and the moments' dtype, unreduced gradients
    /// ([`DeviceMesh::no_sync`](crate::dtensor::DeviceMesh::no_sync)), a group whose pattern matches no parameter, a rate
    /// or decay that is negative or not finite, and betas outside [0, 1). Parameters, moments, the number of steps and
    /// `grads` are unchanged then. If a rank fails, the parameter that was being updated and all later ones are unchanged.
    pub fn step(
        &mut self,
        params: &mut Params,
        grads: &mut Gradients,
        scale: &DTensor,
        lr: impl Into<Rates>,
    ) -> Result<()> {
        UpdateRule::step(self, params, grads, scale, &lr.into())
    }

    /// Returns the first moments and the second ones.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, optim::AdamW, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let w = params.root().param("w", [2], Init::Ones)?;
    ///     let mut optimizer = AdamW::new().betas(0.5, 0.75).decay(0.0).rate(0.5);
    ///     let mut gradients = params.value(w).sum_all()?.backward()?;
    ///     optimizer.step(&mut params, &mut gradients)?;
    ///     let [first, second] = optimizer.rule().moments();
    ///     assert_eq!(first.get(w).expect("one step").full_tensor()?.to_vec::<f32>()?, [0.5; 2]);
    ///     assert_eq!(second.get(w).expect("one step").full_tensor()?.to_vec::<f32>()?, [0.25; 2]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn moments(&self) -> &[ParamStates; 2] {
        &self.moments
    }

    /// Returns the first moments and the second ones, to replace some. A parameter has both or none.
    ///
    /// ```
    /// use isoshard::optim::AdamW;
    /// let [first, second] = AdamW::new().betas(0.9, 0.95).decay(0.1).moments_mut();
    /// ```
    pub fn moments_mut(&mut self) -> &mut [ParamStates; 2] {
        &mut self.moments
    }
}

impl Default for AdamW {
    fn default() -> AdamW {
        AdamW {
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 0.01,
            groups: ParamGroups::default(),
            steps: 0,
            moments: Default::default(),
        }
    }
}

impl UpdateRule for AdamW {
    fn step(
        &mut self,
        params: &mut Params,
        grads: &mut Gradients,
        scale: &DTensor,
        rates: &Rates,
    ) -> Result<()> {
        let steps = next_step(self.steps)?;
        expect_reduced("adamw", params, grads)?;
        if !(self.eps.is_finite() && self.eps >= 0.0) {
            let rule = "eps is finite and at least 0";
            return Err(Error::invalid("adamw", rule, self.eps.to_string(), ""));
        }
        let settings = self.groups.settings("adamw", params)?;
        for (id, own) in params.ids().zip(settings) {
            let (first, second) = own.betas_or(self.betas);
            expect_sound(
                "adamw",
                own.rate_at(rates.of(id)),
                own.decay_or(self.weight_decay),
                &[first, second],
            )?;
        }
        let (betas, eps, weight_decay) = (self.betas, self.eps, self.weight_decay);
        let op_of = |params: &Params, id: ParamId| {
            let own = settings[id.index()];
            let decays = own.weight_decay().is_some() || params.value(id).shape().len() >= 2;
            let decay = if decays { own.decay_or(weight_decay) } else { 0.0 };
            ops::AdamWStep::at_step(steps, own.rate_at(rates.of(id)), own.betas_or(betas), eps, decay)
        };
        update_states(params, grads, &mut self.moments, scale, settings, op_of)?;
        self.steps = steps;
        Ok(())
    }

    fn offload(&mut self, params: &Params, file: &MappedFile) -> Result<()> {
        self.moments.iter_mut().try_for_each(|moments| moments.offload(params, file))
    }

    fn state(&self, params: &Params) -> Result<StateTree> {
        let mut state = StateTree::new();
        state.insert_value("kind", KIND)?;
        state.insert_value("steps", self.steps)?;
        for (name, moments) in ["first", "second"].into_iter().zip(&self.moments) {
            state.insert_tree(name, moments.state(params)?)?;
        }
        Ok(state)
    }

    fn load_state(&mut self, params: &Params, saved: &Checkpoint) -> Result<()> {
        expect_kind(saved, KIND)?;
        let steps = saved_steps(saved)?;
        let mut moments = self.moments.each_ref().map(ParamStates::emptied);
        for (name, moments) in ["first", "second"].into_iter().zip(&mut moments) {
            moments.load_state(params, &saved.subtree(name))?;
        }
        if moments[0].has() != moments[1].has() {
            let rule = "each parameter has two moments or none";
            return Err(Error::invalid("load_state", rule, saved.dir().display().to_string(), ""));
        }
        (self.moments, self.steps) = (moments, steps);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{Rank, spmd};
    use crate::dtensor::DeviceMesh;
    use crate::nn::Plan;
    use crate::placement::Layout;
    use crate::rng::Init;
    use crate::tensor::DType;

    /// One parameter `w` of ones on a mesh of this one axis.
    fn one_param(rank: &Rank, axis: &str) -> Result<(Params, ParamId)> {
        let mesh = DeviceMesh::new(rank, &[(axis, rank.world_len())])?;
        let plan =
            if axis == "tp" { Plan::default().shard("w", "tp", 1) } else { Plan::default().fsdp(axis) };
        let mut params = Params::new(&mesh, plan, 1)?;
        let id = params.root().param("w", [3, 2], Init::Ones)?;
        Ok((params, id))
    }

    fn step(adam: &mut AdamW, params: &mut Params, id: ParamId, scale: &DTensor) -> Result<()> {
        let mut grads = params.value(id).sum_all()?.backward()?;
        adam.step(params, &mut grads, scale, 0.5)
    }

    fn scale(params: &Params, layout: Layout) -> Result<DTensor> {
        DTensor::full(params.mesh(), DType::F32, [], Layout::replicated(1), 1.0)?.redistribute(layout)
    }

    /// Steps are counted up to 2^64 - 1, also by a saved state; the next one is refused and changes nothing.
    #[test]
    fn steps_are_counted_to_the_last() {
        let run = |rank| {
            let (mut params, id) = one_param(&rank, "dp")?;
            let good = scale(&params, Layout::replicated(1))?;
            let mut adam = AdamW::new().betas(0.9, 0.99).decay(0.0);
            for steps in [1 << 63, u64::MAX - 1] {
                adam.steps = steps;
                step(&mut adam, &mut params, id, &good)?;
            }
            let held = params.value(id).full_tensor()?.to_f64_vec();
            assert!(held.iter().all(|x| x.is_finite()));
            let refused = step(&mut adam, &mut params, id, &good).unwrap_err().to_string();
            let text = "step: an optimizer counts no further step; got 18446744073709551615; begin with a new optimizer";
            assert_eq!(refused, text);
            assert_eq!((adam.steps, params.value(id).full_tensor()?.to_f64_vec()), (u64::MAX, held));
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }

    /// Refuses operands of a wrong shape, dtype or layout; the next step succeeds with valid ones.
    #[test]
    fn a_refused_step_changes_nothing() {
        let run = |rank: Rank| {
            let train = |refused: bool| -> Result<Vec<f64>> {
                let (mut params, id) = one_param(&rank, "fsdp")?;
                let late = params.root().param("late", [5], Init::Ones)?;
                let mut adam = AdamW::new().betas(0.9, 0.99).decay(0.1);
                let good = scale(&params, Layout::replicated(1))?;
                step(&mut adam, &mut params, id, &good)?;
                // The second parameter's first gradient comes with the step that is refused.
                let mut both = params.value(id).sum_all()?.add(&params.value(late).sum_all()?)?;
                let mut grads = both.backward()?;
                if refused {
                    let partial = scale(&params, "(P(sum))".parse()?)?;
                    params.mesh().set_strict(true);
                    let e = adam.step(&mut params, &mut grads, &partial, 0.5).unwrap_err().to_string();
                    params.mesh().set_strict(false);
                    assert!(e.starts_with("adamw: operand 4 would have to move"), "{e}");
                    let long = DTensor::full(params.mesh(), DType::F32, [1], Layout::replicated(1), 1.0)?;
                    let e = adam.step(&mut params, &mut grads, &long, 0.5).unwrap_err().to_string();
                    assert!(e.starts_with("adamw: the scale is f32[]"), "{e}");
                }
                adam.step(&mut params, &mut grads, &good, 0.5)?;
                assert_eq!(adam.steps, 2);
                let [m, v] =
                    adam.moments().each_ref().map(|moments| moments.get(late).expect("it had a step"));
                let all = [params.value(id), params.value(late), m, v];
                Ok(all
                    .map(|t| t.full_tensor().map(|t| t.to_f64_vec()))
                    .into_iter()
                    .collect::<Result<Vec<_>>>()?
                    .concat())
            };
            assert_eq!(train(true)?, train(false)?);
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }

    #[test]
    fn writes_in_place_and_never_into_what_is_shared() {
        let run = |rank: Rank| {
            let (mut params, id) = one_param(&rank, "fsdp")?;
            let mut adam = AdamW::new().betas(0.5, 0.5).decay(0.0);
            let good = scale(&params, Layout::replicated(1))?;
            let place =
                |p: &Params| -> Result<*const f32> { Ok(p.value(id).local().data::<f32>()?.as_ptr()) };
            let before = place(&params)?;
            step(&mut adam, &mut params, id, &good)?;
            assert_eq!(place(&params)?, before, "nobody shares it");
            let kept = params.value(id).clone();
            let value = kept.local().to_f64_vec();
            step(&mut adam, &mut params, id, &good)?;
            assert_eq!(kept.local().to_f64_vec(), value, "a clone keeps its values");
            assert_ne!(params.value(id).local().to_f64_vec(), value);
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }

    #[test]
    fn an_axis_of_one_rank_is_an_axis() {
        for axis in ["fsdp", "tp"] {
            let run = move |rank: Rank| {
                let (mut params, id) = one_param(&rank, axis)?;
                let layout = params.value(id).layout().clone();
                let good = scale(&params, Layout::replicated(1))?;
                step(&mut AdamW::new().betas(0.5, 0.5).decay(0.0), &mut params, id, &good)?;
                assert_eq!(*params.value(id).layout(), layout);
                Ok(())
            };
            spmd(1, run).unwrap_or_else(|e| panic!("{axis}: {e}"));
        }
    }
}
