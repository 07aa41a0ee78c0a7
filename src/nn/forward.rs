//! One forward pass: parameters as they are used, activations where the plan wants them, randomness in order.

use std::cell::RefCell;

use super::params::{ParamId, Params};
use super::plan::nearest;
use crate::dtensor::{DTensor, PendingRedistribution, Regather};
use crate::error::{Error, Result};
use crate::rng::Generator;

/// What a module's `forward` gets: the parameters and the plan, without their names.
///
/// Parameters that lie otherwise than they are used (FSDP) are gathered unit by unit, the next unit's while this one's
/// are used, and let go of when the next unit begins; the backward pass gathers them again, likewise a unit ahead. So
/// are those that are computed with in another dtype ([`Params::compute_in`]), on every mesh alike: a parameter that is
/// used twice is rounded once, and its gradients are added in the same place.
pub struct Forward<'a> {
    params: &'a Params,
    /// Draws for dropout; none in evaluation.
    generator: Option<RefCell<&'a mut Generator>>,
    slots: RefCell<Vec<Slot>>,
    current: RefCell<Current>,
}

enum Slot {
    Idle,
    /// The parameter at rest, as it is computed with, and its way to where it is used.
    InFlight(Box<(DTensor, PendingRedistribution)>),
    Ready(DTensor),
}

/// The unit whose parameters are in use, and how the one before it can be had again.
#[derive(Default)]
struct Current {
    unit: Option<usize>,
    before: Vec<Regather>,
}

impl<'a> Forward<'a> {
    /// A pass that trains: dropout draws from `generator`, which every rank must have in the same state. That is
    /// checked when it first draws on a mesh ([`IntoDraw`](crate::dtensor::IntoDraw)).
    pub fn train(params: &'a Params, generator: &'a mut Generator) -> Forward<'a> {
        Self::new(params, Some(RefCell::new(generator)))
    }

    /// A pass that evaluates: no dropout.
    pub fn eval(params: &'a Params) -> Forward<'a> {
        Self::new(params, None)
    }

    fn new(params: &'a Params, generator: Option<RefCell<&'a mut Generator>>) -> Forward<'a> {
        let slots = RefCell::new(params.ids().map(|_| Slot::Idle).collect());
        Forward { params, generator, slots, current: RefCell::default() }
    }

    /// A parameter in the layout and the dtype that are computed with.
    ///
    /// Communicates nothing if it lies so, or is gathered already; else each rank receives what it lacks of its unit and
    /// of the next.
    ///
    /// # Errors
    /// Refuses another model's parameter, and a plan with a pattern that matches nothing; a fault of communication.
    pub fn param(&self, id: ParamId) -> Result<DTensor> {
        self.params.check_plan()?;
        self.params.expect_own("param", id)?;
        if self.params.is_used_as_stored(id) {
            return Ok(self.params.value(id).clone());
        }
        let unit = self.params.unit_of(id);
        self.enter(unit)?;
        if let Slot::Ready(t) = &self.slots.borrow()[id.index()] {
            return Ok(t.clone());
        }
        self.start(unit)?;
        let slot = std::mem::replace(&mut self.slots.borrow_mut()[id.index()], Slot::Idle);
        let ready = match slot {
            Slot::InFlight(flight) => {
                let (shard, pending) = *flight;
                shard.regathered(pending.wait()?, &self.before(unit))
            }
            Slot::Ready(ready) => ready,
            Slot::Idle => unreachable!("the unit was just started"),
        };
        self.slots.borrow_mut()[id.index()] = Slot::Ready(ready.clone());
        Ok(ready)
    }

    /// Returns the result of `f` for a [parameter](Forward::param). Its refusals name the parameter by its path.
    ///
    /// # Errors
    /// As [`Forward::param`]; what `f` refuses.
    pub fn with_param(&self, id: ParamId, f: impl FnOnce(&DTensor) -> Result<DTensor>) -> Result<DTensor> {
        f(&self.param(id)?).map_err(|e| e.at(self.params.path(id)))
    }

    /// `x` as the plan wants it at the site `path`.
    ///
    /// # Errors
    /// Refuses a path that no module declared ([`Scope::site`](super::Scope::site)), a plan with a pattern that matches
    /// nothing, and a layout that does not fit `x`; a fault of communication.
    pub fn site(&self, path: &str, x: DTensor) -> Result<DTensor> {
        self.params.check_plan()?;
        if !self.params.has_site(path) {
            let near = nearest(path, &self.params.sites().collect::<Vec<_>>()).join(", ");
            let remedy = format!("declare it with Scope::site; the nearest are {near}");
            return Err(Error::invalid("site", "no module declared the site", format!("{path:?}"), remedy));
        }
        let layout = self.params.plan().site_layout(x.mesh().mesh(), path, x.layout());
        if layout == *x.layout() { Ok(x) } else { x.redistribute(layout).map_err(|e| e.at(path)) }
    }

    /// `x` with elements dropped with probability `p`; `x` itself in evaluation.
    ///
    /// # Errors
    /// Refuses, in training, a `p` outside `[0, 1]`.
    pub fn dropout(&self, x: DTensor, p: f64) -> Result<DTensor> {
        match &self.generator {
            Some(g) if p != 0.0 => x.dropout(p, &mut **g.borrow_mut()),
            _ => Ok(x),
        }
    }

    /// Causal attention whose probabilities are dropped with probability `p`; none in evaluation.
    ///
    /// # Errors
    /// Refuses shapes that do not fit, and in training a `p` outside `[0, 1]`.
    pub fn attention(&self, q: &DTensor, k: &DTensor, v: &DTensor, scale: f64, p: f64) -> Result<DTensor> {
        match &self.generator {
            Some(g) if p != 0.0 => q.attention_dropout(k, v, scale, p, &mut **g.borrow_mut()),
            _ => q.attention(k, v, scale),
        }
    }

    /// On the first use of a unit: lets go of the one before, and asks for the next.
    fn enter(&self, unit: usize) -> Result<()> {
        let units = self.params.units();
        let current = self.current.borrow().unit;
        if current == Some(unit) || (units[unit].is_root() && current.is_some()) {
            return Ok(());
        }
        self.start(unit)?;
        // The backward pass comes to the root's parameters at its own beginning: nobody asks for them ahead.
        let previous = current.filter(|&p| !units[p].is_root());
        let before = previous.map(|p| self.ready(p)).unwrap_or_default();
        for id in previous.iter().flat_map(|&p| &units[p].members) {
            self.slots.borrow_mut()[id.index()] = Slot::Idle;
        }
        *self.current.borrow_mut() = Current { unit: Some(unit), before };
        match (unit + 1..units.len()).find(|&u| !units[u].is_root()) {
            Some(next) => self.start(next),
            None => Ok(()),
        }
    }

    /// What the backward pass needs after a parameter of `unit`, which is used now.
    fn before(&self, unit: usize) -> Vec<Regather> {
        let current = self.current.borrow();
        match current.unit {
            // Of the root, after a block: that block.
            Some(block) if block != unit => self.ready(block),
            _ => current.before.clone(),
        }
    }

    /// How the parameters of a unit that are gathered now can be had again.
    fn ready(&self, unit: usize) -> Vec<Regather> {
        let slots = self.slots.borrow();
        let again = |id: &ParamId| match &slots[id.index()] {
            Slot::Ready(t) => t.regather(),
            _ => None,
        };
        self.params.units()[unit].members.iter().filter_map(again).collect()
    }

    fn start(&self, unit: usize) -> Result<()> {
        for &id in &self.params.units()[unit].members {
            let slot = &mut self.slots.borrow_mut()[id.index()];
            if !matches!(slot, Slot::Idle) || self.params.is_used_as_stored(id) {
                continue;
            }
            let (leaf, used) = (self.params.value(id), self.params.used_layout(id));
            let shard = leaf.cast(self.params.compute_dtype()).map_err(|e| e.at(self.params.path(id)))?;
            *slot = if shard.layout() == used {
                Slot::Ready(shard)
            } else {
                let pending = shard.redistribute_async(used.clone())?;
                Slot::InFlight(Box::new((shard, pending)))
            };
        }
        Ok(())
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
            let cx = Forward::eval(&params);
            let state = || -> String {
                let of = |s: &Slot| match s {
                    Slot::Idle => '-',
                    Slot::InFlight(_) => '.',
                    Slot::Ready(_) => '#',
                };
                cx.slots.borrow().iter().map(of).collect()
            };
            let root = params.unit_of(ids[0]);
            let mut seen = Vec::new();
            for (id, before) in ids.into_iter().zip([0, 0, 0, 2, 2, 2]) {
                let value = cx.param(id)?;
                assert_eq!(value.local().to_vec::<f32>()?, [1.0; 6]);
                assert!(value.has_history() && value.regather().is_some());
                assert_eq!(cx.before(params.unit_of(id)).len(), before, "{}", params.path(id));
                seen.push(state());
            }
            assert_eq!(seen, ["#..--.", "##....", "###...", "#--#..", "#--##.", "#--###"]);
            assert_eq!(cx.before(root).len(), 2, "after the root comes the last block");
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
            let cx = Forward::eval(&params);
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
