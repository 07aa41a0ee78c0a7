//! Gathers of units ahead of their use.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;

use rustc_hash::FxHashMap;

use crate::dtensor::{DTensor, PendingRedistribution, RecomputeInput, UnitGathers};
use crate::error::Result;
use crate::nn::params::Params;
use crate::nn::params::param_id::ParamId;

/// The gathers of a pass.
#[derive(Default)]
pub(super) struct PassGathers {
    pub states: RefCell<GatherStates>,
    current: RefCell<CurrentUnit>,
    /// The units that may have parameters in flight.
    started: RefCell<BTreeSet<usize>>,
    /// True if units stay gathered until the pass ends.
    pub keeps_units: bool,
}

/// The states of the parameters and units that the pass has reached.
#[derive(Default)]
pub(super) struct GatherStates {
    of_params: FxHashMap<ParamId, GatherState>,
    /// Per unit, the parameters that the backward pass gathers again.
    units: FxHashMap<usize, UnitGathers>,
    pub is_second_run: bool,
}

/// The progress of one parameter's gathering.
pub(super) enum GatherState {
    /// The stored parameter in the dtype that modules compute in, and its redistribution to the layout that they
    /// compute in.
    InFlight(Box<(DTensor, PendingRedistribution)>),
    Ready(DTensor),
    /// Read by the first run of a recomputed function, and gathered again for the second.
    Saved(Rc<RecomputeInput>),
}

/// The unit whose parameters are in use, and those of the unit before it that the backward pass gathers again.
#[derive(Default)]
struct CurrentUnit {
    unit: Option<usize>,
    previous: UnitGathers,
}

impl GatherStates {
    /// Returns the state of a parameter, or `None` if nothing was started.
    pub fn get(&self, id: ParamId) -> Option<&GatherState> {
        self.of_params.get(&id)
    }

    pub fn set(&mut self, id: ParamId, state: GatherState) {
        self.of_params.insert(id, state);
    }

    pub fn take(&mut self, id: ParamId) -> Option<GatherState> {
        self.of_params.remove(&id)
    }

    /// Returns the parameters of a unit that the backward pass gathers again. The list grows as they are read.
    pub fn of_unit(&mut self, unit: usize) -> UnitGathers {
        self.units.entry(unit).or_default().clone()
    }
}

/// Leaves the parameters that are still gathered, those of the last unit and of the root, to the backward pass, which
/// reads them first.
impl Drop for GatherStates {
    fn drop(&mut self) {
        for (_, state) in self.of_params.drain().filter(|_| !self.is_second_run) {
            if let GatherState::Ready(t) = state {
                t.leave_gathered();
            }
        }
    }
}

impl PassGathers {
    /// On the first use of a unit, frees the unit before it and starts to gather the next one, if both may be gathered at once.
    pub fn enter(&self, params: &Params, unit: usize) -> Result<()> {
        let units = params.units();
        let current = self.current.borrow().unit;
        if current == Some(unit) || (units[unit].is_root() && current.is_some()) {
            return Ok(());
        }
        // The backward pass begins with the root's parameters, so none of them is gathered ahead.
        let last = current.filter(|&p| !units[p].is_root());
        self.drop_skipped(params, unit, last);
        let ahead = last.filter(|&p| self.fit_together(params, p, unit));
        if last == ahead {
            self.start(params, unit)?;
        }
        let previous = ahead.map(|p| self.states.borrow_mut().of_unit(p)).unwrap_or_default();
        last.filter(|_| !self.keeps_units).into_iter().for_each(|p| self.free(params, p));
        *self.current.borrow_mut() = CurrentUnit { unit: Some(unit), previous };
        match (unit + 1..units.len()).find(|&u| !units[u].is_root()) {
            Some(next) if self.fit_together(params, unit, next) => self.start(params, next),
            _ => Ok(()),
        }
    }

    /// Returns true if two units may be gathered at once.
    fn fit_together(&self, params: &Params, a: usize, b: usize) -> bool {
        self.keeps_units || params.fit_together(a, b)
    }

    /// Frees the parameters of a unit. If the pass gathers them once more, the backward pass does so too, apart from these.
    fn free(&self, params: &Params, unit: usize) {
        let mut gathers = self.states.borrow_mut();
        self.started.borrow_mut().remove(&unit);
        gathers.units.remove(&unit);
        for id in params.units()[unit].members.iter() {
            if let Some(GatherState::Ready(t)) = gathers.take(*id) {
                t.drop_gathered();
            }
        }
    }

    /// Drops what was gathered ahead and not used, if gathered units are limited: `unit` is used after `last`.
    fn drop_skipped(&self, params: &Params, unit: usize, last: Option<usize>) {
        if !params.limits_gathers() || self.keeps_units {
            return;
        }
        let mut gathers = self.states.borrow_mut();
        self.started.borrow_mut().retain(|&other| {
            let stays = !params.units()[other].comes_and_goes() || other == unit || Some(other) == last;
            for id in params.units()[other].members.iter().filter(|_| !stays) {
                if matches!(gathers.get(*id), Some(GatherState::InFlight(_))) {
                    gathers.take(*id);
                }
            }
            stays
        });
    }

    /// Returns the parameters that the backward pass needs after a parameter of `unit`, which is used now.
    pub fn previous_of(&self, params: &Params, unit: usize) -> UnitGathers {
        let current = self.current.borrow();
        match current.unit {
            // The root is used after another unit: that one, which with a limit may not be gathered beside the next.
            Some(_) if params.limits_gathers() && params.units()[unit].is_root() => UnitGathers::default(),
            Some(other) if other != unit => self.states.borrow_mut().of_unit(other),
            _ => current.previous.clone(),
        }
    }

    /// Starts to gather the parameters of a unit that are neither gathered nor in flight, in one call.
    pub fn start(&self, params: &Params, unit: usize) -> Result<()> {
        let mut gathers = self.states.borrow_mut();
        let wanted = |id: &ParamId| gathers.get(*id).is_none() && !params.is_used_as_stored(*id);
        let wanted: Vec<ParamId> = params.units()[unit].members.iter().copied().filter(wanted).collect();
        let mut shards: Vec<(ParamId, DTensor)> = Vec::new();
        for (id, shard) in wanted.iter().copied().zip(params.held_values(&wanted)?) {
            if shard.layout() == params.used_layout(id) {
                gathers.set(id, GatherState::Ready(shard));
            } else {
                shards.push((id, shard));
            }
        }
        let Some(first) = shards.first() else { return Ok(()) };
        let path = |id: ParamId| params.module_of(id);
        let _scope = shards.iter().fold(path(first.0), |all, (id, _)| all.common(path(*id))).enter();
        let moved = shards.iter().map(|(id, x)| (x.clone(), params.used_layout(*id).clone())).collect();
        for ((id, shard), pending) in shards.into_iter().zip(DTensor::redistribute_together(moved)?) {
            gathers.set(id, GatherState::InFlight(Box::new((shard, pending))));
        }
        self.started.borrow_mut().insert(unit);
        Ok(())
    }
}
