//! Gathers of units ahead of their use.

use std::ops::{Deref, DerefMut};
use std::rc::Rc;

use super::Forward;
use crate::dtensor::{DTensor, PendingRedistribution, RecomputeInput, Regather, UnitGathers};
use crate::error::Result;
use crate::nn::param_id::ParamId;
use crate::nn::params::Params;

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
pub(super) struct CurrentUnit {
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

impl Forward<'_> {
    /// On the first use of a unit, frees the unit before it and starts to gather the next one, if both may be gathered at once.
    pub(super) fn enter(&self, unit: usize) -> Result<()> {
        let units = self.params.units();
        let current = self.current.borrow().unit;
        if current == Some(unit) || (units[unit].is_root() && current.is_some()) {
            return Ok(());
        }
        // The backward pass begins with the root's parameters, so none of them is gathered ahead.
        let last = current.filter(|&p| !units[p].is_root());
        if last.is_none_or(|p| self.params.fit_together(p, unit)) {
            self.start(unit)?;
        }
        let ahead = last.filter(|&p| self.params.fit_together(p, unit));
        let previous = ahead.map(|p| self.regathers(p)).unwrap_or_default();
        for id in last.iter().filter(|_| !self.keeps_units).flat_map(|&p| &units[p].members) {
            let state = std::mem::replace(&mut self.gathers.borrow_mut()[id.index()], GatherState::Idle);
            if let GatherState::Ready(t) = state {
                t.drop_gathered();
            }
        }
        *self.current.borrow_mut() = CurrentUnit { unit: Some(unit), previous };
        match (unit + 1..units.len()).find(|&u| !units[u].is_root()) {
            Some(next) if self.params.fit_together(unit, next) => self.start(next),
            _ => Ok(()),
        }
    }

    /// Returns the regathers that the backward pass needs after a parameter of `unit`, which is used now.
    pub(super) fn previous_of(&self, unit: usize) -> Vec<Regather> {
        let current = self.current.borrow();
        match current.unit {
            // The root is used after another unit: that one.
            Some(other) if other != unit => self.regathers(other),
            _ => current.previous.clone(),
        }
    }

    /// Returns the regathers of a unit's gathered parameters.
    fn regathers(&self, unit: usize) -> Vec<Regather> {
        let gathers = self.gathers.borrow();
        let regather = |id: &ParamId| match &gathers[id.index()] {
            GatherState::Ready(t) => t.regather(),
            GatherState::Idle | GatherState::InFlight(_) | GatherState::Saved(_) => None,
        };
        self.params.units()[unit].members.iter().filter_map(regather).collect()
    }

    /// Starts to gather the parameters of a unit that are neither gathered nor in flight, in one call.
    pub(super) fn start(&self, unit: usize) -> Result<()> {
        let mut gathers = self.gathers.borrow_mut();
        let wanted = |id: &ParamId| {
            matches!(gathers[id.index()], GatherState::Idle) && !self.params.is_used_as_stored(*id)
        };
        let wanted: Vec<ParamId> = self.params.units()[unit].members.iter().copied().filter(wanted).collect();
        let mut shards: Vec<(ParamId, DTensor)> = Vec::new();
        for (id, shard) in wanted.iter().copied().zip(self.params.held_values(&wanted)?) {
            if shard.layout() == self.params.used_layout(id) {
                gathers[id.index()] = GatherState::Ready(shard);
            } else {
                shards.push((id, shard));
            }
        }
        let Some(first) = shards.first() else { return Ok(()) };
        let path = |id: ParamId| self.params.module_of(id);
        let _scope = shards.iter().fold(path(first.0), |all, (id, _)| all.common(path(*id))).enter();
        let moved = shards.iter().map(|(id, x)| (x.clone(), self.params.used_layout(*id).clone())).collect();
        for ((id, shard), pending) in shards.into_iter().zip(DTensor::redistribute_together(moved)?) {
            gathers[id.index()] = GatherState::InFlight(Box::new((shard, pending)));
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

    #[test]
    fn units_are_gathered_in_turn_and_asked_for_again_in_reverse() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
            let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 1)?;
            let ids = ["wte", "h.0.a", "h.0.b", "h.1.a", "h.1.b", "norm"]
                .map(|path| params.root().param(path, [3, 2], Init::Ones).expect("paths differ"));
            let cx = Forward::train_without_dropout(&params);
            let state = || -> String {
                let of = |s: &GatherState| match s {
                    GatherState::Idle => '-',
                    GatherState::InFlight(_) => '.',
                    GatherState::Ready(_) | GatherState::Saved(_) => '#',
                };
                cx.gathers.borrow().iter().map(of).collect()
            };
            let root = params.unit_of(ids[0]);
            let mut seen = Vec::new();
            for (id, before) in ids.into_iter().zip([0, 0, 0, 2, 2, 2]) {
                let value = cx.param(id)?;
                assert_eq!(value.local().to_vec::<f32>()?, [1.0; 6]);
                assert!(value.has_history() && value.regather().is_some());
                assert_eq!(cx.previous_of(params.unit_of(id)).len(), before, "{}", params.path(id));
                seen.push(state());
            }
            assert_eq!(seen, ["#..--.", "##....", "###...", "#--#..", "#--##.", "#--###"]);
            assert_eq!(cx.previous_of(root).len(), 2, "after the root comes the last block");
            let again = cx.param(ids[0])?;
            assert_eq!(state(), "#--###", "the root stays");
            drop(again);
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }
}
