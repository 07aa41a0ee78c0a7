//! Gathers of units ahead of their use.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};
use std::rc::Rc;

use crate::dtensor::{DTensor, PendingRedistribution, RecomputeInput, Regather, UnitGathers};
use crate::error::Result;
use crate::nn::param_id::ParamId;
use crate::nn::params::Params;

/// The gathers of a pass.
pub(super) struct PassGathers {
    pub states: RefCell<GatherStates>,
    current: RefCell<CurrentUnit>,
    /// True if units stay gathered until the pass ends.
    pub keeps_units: bool,
}

/// The state of each parameter.
pub(super) struct GatherStates {
    pub of_params: Vec<GatherState>,
    /// Per unit, the parameters that the backward pass gathers again.
    pub units: Vec<UnitGathers>,
    pub is_second_run: bool,
}

/// The progress of one parameter's gathering.
pub(super) enum GatherState {
    Idle,
    /// The stored parameter in the dtype that modules compute in, and its redistribution to the layout that they
    /// compute in.
    InFlight(Box<(DTensor, PendingRedistribution)>),
    Ready(DTensor),
    /// Read by the first run of a recomputed function, and gathered again for the second.
    Saved(Rc<RecomputeInput>),
}

/// The unit whose parameters are in use, and the regathers of the unit before it.
#[derive(Default)]
struct CurrentUnit {
    pub unit: Option<usize>,
    pub previous: Vec<Regather>,
}

impl GatherStates {
    /// Returns the states at the beginning of a pass.
    pub fn of(params: &Params) -> GatherStates {
        let of_params = params.ids().map(|_| GatherState::Idle).collect();
        let units = params.units().iter().map(|_| UnitGathers::default()).collect();
        GatherStates { of_params, units, is_second_run: false }
    }
}

impl Deref for GatherStates {
    type Target = [GatherState];

    fn deref(&self) -> &[GatherState] {
        &self.of_params
    }
}

impl DerefMut for GatherStates {
    fn deref_mut(&mut self) -> &mut [GatherState] {
        &mut self.of_params
    }
}

/// Leaves the parameters that are still gathered, those of the last unit and of the root, to the backward pass, which
/// reads them first.
impl Drop for GatherStates {
    fn drop(&mut self) {
        for state in self.of_params.drain(..).filter(|_| !self.is_second_run) {
            if let GatherState::Ready(t) = state {
                t.leave_gathered();
            }
        }
    }
}

impl PassGathers {
    pub fn of(params: &Params) -> PassGathers {
        let states = RefCell::new(GatherStates::of(params));
        PassGathers { states, current: RefCell::default(), keeps_units: false }
    }

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
        let previous = ahead.map(|p| self.regathers(params, p)).unwrap_or_default();
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
        gathers.units[unit] = UnitGathers::default();
        for id in &params.units()[unit].members {
            let state = std::mem::replace(&mut gathers[id.index()], GatherState::Idle);
            if let GatherState::Ready(t) = state {
                t.drop_gathered();
            }
        }
    }

    /// Drops what was gathered ahead and not used, if gathered units are limited: `unit` is used after `last`.
    fn drop_skipped(&self, params: &Params, unit: usize, last: Option<usize>) {
        if !params.limits_gathers() || self.keeps_units {
            return;
        }
        let units = params.units().iter().enumerate();
        let skipped = units.filter(|(u, other)| other.comes_and_goes() && *u != unit && Some(*u) != last);
        let mut gathers = self.states.borrow_mut();
        for id in skipped.flat_map(|(_, other)| &other.members) {
            if matches!(gathers[id.index()], GatherState::InFlight(_)) {
                gathers[id.index()] = GatherState::Idle;
            }
        }
    }

    /// Returns the regathers that the backward pass needs after a parameter of `unit`, which is used now.
    pub fn previous_of(&self, params: &Params, unit: usize) -> Vec<Regather> {
        let current = self.current.borrow();
        match current.unit {
            // The root is used after another unit: that one, which with a limit may not be gathered beside the next.
            Some(_) if params.limits_gathers() && params.units()[unit].is_root() => Vec::new(),
            Some(other) if other != unit => self.regathers(params, other),
            _ => current.previous.clone(),
        }
    }

    /// Returns the regathers of a unit's gathered parameters.
    fn regathers(&self, params: &Params, unit: usize) -> Vec<Regather> {
        let gathers = self.states.borrow();
        let regather = |id: &ParamId| match &gathers[id.index()] {
            GatherState::Ready(t) => t.regather(),
            GatherState::Idle | GatherState::InFlight(_) | GatherState::Saved(_) => None,
        };
        params.units()[unit].members.iter().filter_map(regather).collect()
    }

    /// Starts to gather the parameters of a unit that are neither gathered nor in flight, in one call.
    pub fn start(&self, params: &Params, unit: usize) -> Result<()> {
        let mut gathers = self.states.borrow_mut();
        let wanted =
            |id: &ParamId| matches!(gathers[id.index()], GatherState::Idle) && !params.is_used_as_stored(*id);
        let wanted: Vec<ParamId> = params.units()[unit].members.iter().copied().filter(wanted).collect();
        let mut shards: Vec<(ParamId, DTensor)> = Vec::new();
        for (id, shard) in wanted.iter().copied().zip(params.held_values(&wanted)?) {
            if shard.layout() == params.used_layout(id) {
                gathers[id.index()] = GatherState::Ready(shard);
            } else {
                shards.push((id, shard));
            }
        }
        let Some(first) = shards.first() else { return Ok(()) };
        let path = |id: ParamId| params.module_of(id);
        let _scope = shards.iter().fold(path(first.0), |all, (id, _)| all.common(path(*id))).enter();
        let moved = shards.iter().map(|(id, x)| (x.clone(), params.used_layout(*id).clone())).collect();
        for ((id, shard), pending) in shards.into_iter().zip(DTensor::redistribute_together(moved)?) {
            gathers[id.index()] = GatherState::InFlight(Box::new((shard, pending)));
        }
        Ok(())
    }
}
