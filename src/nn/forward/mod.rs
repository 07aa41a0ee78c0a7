//! One forward pass: gathers parameters ahead of their use, moves activations at sites, draws dropout in order.

mod evaluation;
mod gathers;
pub(in crate::nn) mod recompute;

use std::cell::{OnceCell, RefCell};
use std::rc::Rc;

use gathers::{GatherState, PassGathers};
use rustc_hash::FxHashSet;

use crate::comm::ModulePath;
use crate::dtensor::{AttentionOptions, DTensor, NoGrad, RecomputeInput};
use crate::error::{Error, Result};
use crate::nn::params::Params;
use crate::nn::params::param_id::ParamId;
use crate::nn::plan::pattern::nearest;
use crate::rng::Generator;

/// One forward pass of a model: the context from which [modules](crate::nn::Module) get parameters, layouts and dropout. It borrows the
/// parameters, so it ends before an optimizer changes them.
///
/// [`Forward::train`] keeps a history for the backward pass and draws dropout, [`Forward::train_without_dropout`] keeps
/// a history only, [`Forward::eval`] does neither, [`Forward::eval_gathered`] serves several batches.
///
/// Parameters that are stored sharded (FSDP) are gathered unit by unit, each unit in one call: the next unit while this
/// one is used, if both fit ([`Sharding::gather_at_most`](crate::fsdp::Sharding::gather_at_most)). A unit is freed when the
/// next one begins, and the backward pass gathers it again, also one unit ahead.
/// Parameters that are computed with in another dtype ([`Params::compute_in`]) are rounded when a unit is gathered. Their
/// gradients are added in the parameter's own dtype, use by use, whatever the sharding and the number of passes.
pub struct Forward<'a> {
    params: &'a Params,
    /// Draws dropout; `None` without dropout.
    generator: Option<RefCell<&'a mut Generator>>,
    gathers: PassGathers,
    /// The gathered parameters that running recomputed functions have read, those of the outermost function first.
    reads: RefCell<Vec<ParamReads>>,
    /// A copy of the parameters for recomputed functions.
    shared: OnceCell<Rc<Params>>,
    /// Set in the second run of a recomputed function: true if the backward pass is recorded.
    pub(in crate::nn) second_run: Option<bool>,
    /// Held by a pass that evaluates.
    _no_grad: Option<NoGrad>,
}

/// Gathered parameters in the order of their first reads.
#[derive(Default)]
pub(in crate::nn) struct ParamReads {
    pub first: Vec<(ParamId, DTensor)>,
    known: FxHashSet<ParamId>,
}

impl<'a> Forward<'a> {
    /// Returns a pass for training with dropout, which `generator` draws. The generator must have the same state on
    /// every rank; the first draw on a mesh checks that ([`IntoDraw`](crate::dtensor::IntoDraw)).
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, nn::{Forward, Params, Plan}};
    /// use isoshard::{placement::Layout, rng::Generator, tensor::DType};
    /// let kept = spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let params = Params::new(&mesh, Plan::default().batch("dp"), 7)?;
    ///     let mut generator = Generator::new(7).child("dropout");
    ///     let x = DTensor::full(&mesh, DType::F32, [1000], "(S0)", 1.0)?;
    ///     Forward::train(&params, &mut generator).dropout(x, 0.5)?.sum_all()?.item()
    /// })?;
    /// assert!(kept[0] == kept[1] && (800.0..1200.0).contains(&kept[0])); // about half, each doubled
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn train(params: &'a Params, generator: &'a mut Generator) -> Forward<'a> {
        Self::new(params, Some(RefCell::new(generator)), None)
    }

    /// Returns a pass for training without dropout: it keeps a history for the backward pass and draws nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Forward, Params, Plan}, rng::Init};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let w = params.root().param("w", [3], Init::Ones)?;
    ///     let mut loss = Forward::train_without_dropout(&params).param(w)?.sum_all()?;
    ///     assert!(loss.backward()?.get(params.value(w)).is_some());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn train_without_dropout(params: &'a Params) -> Forward<'a> {
        Self::new(params, None, None)
    }

    /// Returns a pass for evaluation: no dropout and no history, so activations and gathered parameters are freed after
    /// their last use. While it lives, no operator on this mesh keeps a history
    /// ([`DeviceMesh::no_grad`](crate::dtensor::DeviceMesh)).
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Forward, Params, Plan}, rng::Init};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let w = params.root().param("w", [3], Init::Ones)?;
    ///     let mut sum = Forward::eval(&params).with_param(w, |w| w.sum_all())?;
    ///     assert!(!sum.has_history() && sum.backward().is_err());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn eval(params: &'a Params) -> Forward<'a> {
        Self::new(params, None, Some(params.mesh().no_grad()))
    }

    fn new(
        params: &'a Params,
        generator: Option<RefCell<&'a mut Generator>>,
        no_grad: Option<NoGrad>,
    ) -> Forward<'a> {
        Forward {
            params,
            generator,
            gathers: PassGathers::default(),
            reads: RefCell::default(),
            shared: OnceCell::new(),
            second_run: None,
            _no_grad: no_grad,
        }
    }

    /// Returns the pass of a recomputed function's second run. It has the parameters that the first run read.
    pub(in crate::nn) fn again(
        params: &'a Rc<Params>,
        generator: Option<&'a mut Generator>,
        saved: &[(ParamId, Rc<RecomputeInput>)],
        recorded: bool,
    ) -> Result<Forward<'a>> {
        let mut cx = Self::new(params, generator.map(RefCell::new), None);
        cx.shared = OnceCell::from(params.clone());
        cx.second_run = Some(recorded);
        cx.gathers.states.get_mut().is_second_run = true;
        RecomputeInput::prefetch(saved.iter().map(|(_, saved)| &**saved))?;
        for (id, saved) in saved {
            cx.gathers.states.get_mut().set(*id, GatherState::Saved(saved.clone()));
        }
        Ok(cx)
    }

    /// Returns the result of `f`, and the gathered parameters that it has read.
    pub(in crate::nn) fn reads_of<T>(
        &self,
        f: impl FnOnce() -> Result<T>,
    ) -> Result<(T, Vec<(ParamId, DTensor)>)> {
        self.reads.borrow_mut().push(ParamReads::default());
        let result = f();
        let reads = self.reads.borrow_mut().pop().expect("pushed above").first;
        reads.iter().for_each(|(id, value)| self.note_read(*id, value));
        Ok((result?, reads))
    }

    fn note_read(&self, id: ParamId, value: &DTensor) {
        if let Some(reads) = self.reads.borrow_mut().last_mut()
            && reads.known.insert(id)
        {
            reads.first.push((id, value.clone()));
        }
    }

    /// Returns a copy of the parameters that outlives this pass. The values are shared.
    pub(in crate::nn) fn shared_params(&self) -> Rc<Params> {
        self.shared.get_or_init(|| Rc::new(self.params.snapshot())).clone()
    }

    pub(in crate::nn) fn params(&self) -> &Params {
        self.params
    }

    /// Returns a copy of the generator of dropout.
    pub(in crate::nn) fn generator(&self) -> Option<Generator> {
        self.generator.as_ref().map(|generator| generator.borrow().clone())
    }

    /// Returns a parameter in the layout and dtype that modules compute in.
    ///
    /// Communicates nothing if the parameter is stored so, or is gathered already. Otherwise each rank receives the
    /// elements that it lacks of the parameter's unit, and starts to receive the next unit.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Forward, Params, Plan}, rng::Init};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let w = params.root().param("w", [3], Init::Ones)?;
    ///     let gathered = Forward::eval(&params).param(w)?;
    ///     assert_eq!(gathered.local().to_vec::<f32>()?, [1.0; 3]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses another model's parameter, and a plan with a pattern that matches nothing; returns an error if a rank
    /// fails.
    pub fn param(&self, id: ParamId) -> Result<DTensor> {
        self.params.check_plan()?;
        self.params.expect_own("param", id)?;
        if self.params.is_used_as_stored(id) {
            return Ok(self.params.value(id).clone());
        }
        let _scope = self.params.module_of(id).enter();
        if let Some(recorded) = self.second_run {
            return self.param_again(id, recorded);
        }
        let unit = self.params.unit_of(id);
        self.gathers.enter(self.params, unit)?;
        let is_started = match self.gathers.states.borrow().get(id) {
            Some(GatherState::Ready(t)) => {
                self.note_read(id, t);
                return Ok(t.clone());
            }
            state => state.is_some(),
        };
        if !is_started {
            self.gathers.start(self.params, unit)?;
        }
        let state = self.gathers.states.borrow_mut().take(id);
        let ready = match state {
            Some(GatherState::InFlight(gather)) => {
                let (shard, pending) = *gather;
                let gathered = pending.wait()?;
                if self.params.holds_as_used(id) {
                    self.params.hold(id, &gathered);
                    gathered
                } else if self.params.units()[unit].stays_gathered {
                    gathered
                } else {
                    let of_unit = self.gathers.states.borrow_mut().of_unit(unit);
                    let ready =
                        shard.regathered(gathered, &self.gathers.previous_of(self.params, unit), &of_unit);
                    ready.hold_gathered();
                    ready
                }
            }
            Some(GatherState::Ready(ready)) => ready,
            None | Some(GatherState::Saved(_)) => unreachable!("the unit was just started"),
        };
        self.note_read(id, &ready);
        self.gathers.states.borrow_mut().set(id, GatherState::Ready(ready.clone()));
        Ok(ready)
    }

    /// Returns a gathered parameter in the second run of a recomputed function.
    fn param_again(&self, id: ParamId, recorded: bool) -> Result<DTensor> {
        let saved = match self.gathers.states.borrow().get(id) {
            Some(GatherState::Ready(t)) => {
                self.note_read(id, t);
                return Ok(t.clone());
            }
            Some(GatherState::Saved(saved)) => saved.clone(),
            None | Some(GatherState::InFlight(_)) => {
                let rule = "the second run of a function reads the parameters that the first run read";
                let remedy = "let the function depend on its operands alone, not on the number of its calls";
                return Err(Error::invalid("recompute", rule, self.params.path(id), remedy));
            }
        };
        let ready = saved.value(recorded)?;
        self.note_read(id, &ready);
        self.gathers.states.borrow_mut().set(id, GatherState::Ready(ready.clone()));
        Ok(ready)
    }

    /// Returns the result of `f` for a [parameter](Forward::param). A refusal of `f` names the parameter by its path.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Forward, Params, Plan}, rng::Init};
    /// let error = spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     let w = params.root().child("head").param("weight", [3, 2], Init::Ones)?;
    ///     Forward::eval(&params).with_param(w, |w| w.reshape([5])).map(drop)
    /// });
    /// assert!(error.unwrap_err().to_string().contains("got f32[3, 2] to [5] at head.weight"));
    /// ```
    ///
    /// # Errors
    /// Refuses what [`Forward::param`] refuses, and what `f` refuses.
    pub fn with_param(&self, id: ParamId, f: impl FnOnce(&DTensor) -> Result<DTensor>) -> Result<DTensor> {
        f(&self.param(id)?).map_err(|e| e.at(self.params.path(id)))
    }

    /// Returns `x` in the layout that the plan gives the site `path`. Communicates a redistribution if the layouts
    /// differ.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, nn::{Forward, Params, Plan}};
    /// use isoshard::{placement::Placement, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().site("head.input", "tp", Placement::Replicate), 7)?;
    ///     let site = params.root().child("head").site("input");
    ///     let x = DTensor::zeros(&mesh, DType::F32, [4, 6], "(S1)")?;
    ///     assert_eq!(Forward::eval(&params).site(&site, x)?.spec().to_string(), "f32[4, 6]@(tp:R)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a path that no module declared ([`Scope::site`](crate::nn::Scope::site)), a plan with a pattern that matches
    /// nothing, and a layout that does not fit `x`; returns an error if a rank fails.
    pub fn site(&self, path: &str, x: DTensor) -> Result<DTensor> {
        self.params.check_plan()?;
        if !self.params.has_site(path) {
            let near = nearest(path, &self.params.sites().collect::<Vec<_>>()).join(", ");
            let near = if near.is_empty() { near } else { format!("; the nearest are {near}") };
            let remedy = format!("declare it with Scope::site{near}");
            return Err(Error::invalid("site", "no module declared the site", format!("{path:?}"), remedy));
        }
        let layout = self.params.plan().site_layout(x.mesh().mesh(), path, x.layout());
        if layout == *x.layout() { Ok(x) } else { x.redistribute(layout).map_err(|e| e.at(path)) }
    }

    /// Returns `x` with each element dropped with probability `p` and the others divided by `1 - p`; `x` itself in a
    /// pass without dropout. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, nn::{Forward, Params, Plan}};
    /// use isoshard::{placement::Layout, rng::Generator, tensor::DType};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let params = Params::new(&mesh, Plan::default(), 7)?;
    ///     let x = DTensor::full(&mesh, DType::F32, [2], Layout::replicated(0), 3.0)?;
    ///     let all_dropped = Forward::train(&params, &mut Generator::new(7)).dropout(x.clone(), 1.0)?;
    ///     assert_eq!(all_dropped.full_tensor()?.to_vec::<f32>()?, [0.0; 2]);
    ///     assert_eq!(Forward::eval(&params).dropout(x, 1.0)?.full_tensor()?.to_vec::<f32>()?, [3.0; 2]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a `p` outside `[0, 1]` in a pass with dropout.
    pub fn dropout(&self, x: DTensor, p: f64) -> Result<DTensor> {
        match &self.generator {
            Some(g) if p != 0.0 => x.dropout(p, &mut **g.borrow_mut()),
            _ => Ok(x),
        }
    }

    /// Returns the result of the module that is running, after tests that watch modules have seen it.
    pub(in crate::nn) fn leave(&self, y: DTensor) -> Result<DTensor> {
        self.params.mesh().note_module(ModulePath::current(), &y)?;
        Ok(y)
    }

    /// Returns causal attention ([`DTensor::attention`]). In a pass with dropout each attention probability is set to zero
    /// with probability `p`. `q`, `k` and `v` are `[batch, heads, time, head width]`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, nn::{Forward, Params, Plan}};
    /// use isoshard::{placement::Layout, tensor::{DType, Tensor}};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let params = Params::new(&mesh, Plan::default(), 7)?;
    ///     let q = DTensor::zeros(&mesh, DType::F32, [1, 1, 2, 1], Layout::replicated(0))?;
    ///     let v = Tensor::from_slice(&[1.0f32, 3.0], [1, 1, 2, 1])?;
    ///     let v = DTensor::distribute(&mesh, &v, Layout::replicated(0))?;
    ///     // Equal scores: the first query sees the first value, the second the mean of both.
    ///     let y = Forward::eval(&params).attention(&q, &q, &v, 1.0, 0.5)?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [1.0, 2.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses shapes that do not fit, and a `p` outside `[0, 1]` in a pass with dropout.
    pub fn attention(&self, q: &DTensor, k: &DTensor, v: &DTensor, scale: f64, p: f64) -> Result<DTensor> {
        match &self.generator {
            Some(g) if p != 0.0 => q.attention_dropout(k, v, scale, p, &mut **g.borrow_mut()),
            _ => q.attention(k, v, scale),
        }
    }

    /// Returns attention with masks and further operands ([`DTensor::attention_with`]). In a pass with dropout each
    /// attention probability is set to zero with probability `p`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{AttentionOptions, DTensor, DeviceMesh}, nn::{Forward, Params, Plan}};
    /// use isoshard::{placement::Layout, tensor::DType};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let params = Params::new(&mesh, Plan::default(), 7)?;
    ///     let x = DTensor::full(&mesh, DType::F32, [1, 1, 2, 1], Layout::replicated(0), 3.0)?;
    ///     let options = AttentionOptions::bidirectional(1.0);
    ///     let y = Forward::eval(&params).attention_with([&x, &x, &x], &options, 0.1)?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [3.0, 3.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`DTensor::attention_with_dropout`].
    pub fn attention_with(
        &self,
        [q, k, v]: [&DTensor; 3],
        options: &AttentionOptions,
        p: f64,
    ) -> Result<DTensor> {
        match &self.generator {
            Some(g) if p != 0.0 => q.attention_with_dropout(k, v, options, p, &mut **g.borrow_mut()),
            _ => q.attention_with(k, v, options),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::spmd;
    use crate::dtensor::DeviceMesh;
    use crate::nn::Plan;
    use crate::rng::Init;
    use crate::tensor::DType;

    #[test]
    fn units_are_gathered_in_turn_and_asked_for_again_in_reverse() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
            let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 1)?;
            let ids = ["wte", "h.0.a", "h.0.b", "h.1.a", "h.1.b", "norm"]
                .map(|path| params.root().param(path, [3, 2], Init::Ones).expect("paths differ"));
            let cx = Forward::train_without_dropout(&params);
            let state = || -> String {
                let sign = |id: ParamId| match cx.gathers.states.borrow().get(id) {
                    None => '-',
                    Some(GatherState::InFlight(_)) => '.',
                    Some(GatherState::Ready(_) | GatherState::Saved(_)) => '#',
                };
                ids.into_iter().map(sign).collect()
            };
            let root = params.unit_of(ids[0]);
            let mut seen = Vec::new();
            for (id, before) in ids.into_iter().zip([0, 0, 0, 2, 2, 2]) {
                let value = cx.param(id)?;
                assert_eq!(value.local().to_vec::<f32>()?, [1.0; 6]);
                assert!(value.has_history() && value.is_regathered());
                assert_eq!(
                    cx.gathers.previous_of(&params, params.unit_of(id)).len(),
                    before,
                    "{}",
                    params.path(id)
                );
                seen.push(state());
            }
            assert_eq!(seen, ["#..--.", "##....", "###...", "#--#..", "#--##.", "#--###"]);
            assert_eq!(cx.gathers.previous_of(&params, root).len(), 2, "after the root comes the last block");
            let again = cx.param(ids[0])?;
            assert_eq!(state(), "#--###", "the root stays");
            drop(again);
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }

    #[test]
    fn parameters_are_computed_with_in_bf16_and_learn_in_f32() {
        let run = |rank: crate::comm::Rank| {
            let ranks = rank.world_len();
            let mesh = DeviceMesh::new(&rank, &[("fsdp", ranks)])?;
            let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 1)?;
            params.compute_in(DType::BF16)?;
            assert!(params.compute_in(DType::I64).is_err());
            let init = Init::Normal { mean: 0.0, std: 1.0 };
            let id = params.root().param("h.0.w", [3, 2], init)?;
            let cx = Forward::train_without_dropout(&params);
            let (one, two) = (cx.param(id)?, cx.param(id)?);
            assert_eq!((one.dtype(), params.value(id).dtype()), (DType::BF16, DType::F32));
            let rounded = params.value(id).full_tensor()?.to_vec::<f32>()?;
            let rounded: Vec<f32> = rounded.into_iter().map(|x| half::bf16::from_f32(x).to_f32()).collect();
            assert_eq!(
                one.full_tensor()?.to_f64_vec(),
                rounded.iter().map(|&x| x.into()).collect::<Vec<f64>>()
            );
            let grads = one.mul(&two)?.sum_all()?.backward()?;
            let grad = grads.get(params.value(id)).expect("a gradient arrives at what is kept");
            assert_eq!((grad.dtype(), grad.layout()), (DType::F32, params.value(id).layout()));
            let twice: Vec<f32> = rounded.iter().map(|x| 2.0 * x).collect();
            assert_eq!(grad.full_tensor()?.to_vec::<f32>()?, twice);
            Ok(())
        };
        for ranks in [1, 2, 5] {
            spmd(ranks, run).unwrap_or_else(|e| panic!("{ranks} ranks: {e}"));
        }
    }
}
