//! Parameters that fully sharded data parallelism has placed: the layouts of values, gradients and held values.

use std::collections::BTreeSet;

use super::declared::gradient_unit;
use super::{Param, Params};
use crate::comm::ModulePath;
use crate::dtensor::{DTensor, Transfer};
use crate::error::{Error, Result};
use crate::nn::params::param_id::ParamId;
use crate::nn::params::param_unit::ParamUnit;
use crate::nn::plan::rules::Plan;
use crate::placement::{Layout, Mesh};
use crate::tensor::{DType, Tensor, with_places};

/// A unit of parameters, and their layouts.
pub(crate) struct PlacedUnit {
    pub name: String,
    pub members: Vec<(ParamId, ParamPlacement)>,
    /// True if gathered parameters stay gathered from the forward pass to the backward pass.
    pub stays_gathered: bool,
    /// The dtype in which ranks send partial sums of gradients, if the program says one.
    pub reduced_in: Option<DType>,
    /// The elements between parameters in the unit's plan.
    pub padding: usize,
}

/// The layouts of one parameter.
pub(crate) struct ParamPlacement {
    /// The layout of the value that the optimizer updates, and of the optimizer's state.
    pub stored: Layout,
    /// The layout in which the gradient arrives.
    pub gradient: Layout,
    /// The layout of the rounded value from one update to the next.
    pub held: Layout,
}

impl Params {
    /// Moves all parameters to other layouts, and declares other units, whose gathered parameters take at most `limit` bytes.
    /// All ranks call this together.
    pub(crate) fn place(
        &mut self,
        units: Vec<PlacedUnit>,
        batch: &[String],
        limit: Option<usize>,
    ) -> Result<()> {
        let declared = units.iter().map(|unit| self.unit_of_placed(unit)).collect::<Result<Vec<_>>>()?;
        self.expect_gathers_fit("fully_shard", &declared, limit, self.compute)?;
        self.gather_limit = limit;
        let before = self.units.len();
        for (unit, PlacedUnit { members, .. }) in declared.into_iter().zip(units) {
            let moved = members
                .iter()
                .map(|(id, placement)| (self.value(*id).detach(), placement.stored.clone()))
                .collect();
            let moved = DTensor::redistribute_together(moved)?;
            self.units.push(unit);
            let unit = self.units.len() - 1;
            let used = |(id, placement): &(ParamId, ParamPlacement)| match placement.held == placement.stored
            {
                true => self.used_layout(*id).clone(),
                false => placement.held.clone(),
            };
            let used: Vec<Layout> = members.iter().map(used).collect();
            let moved = moved.into_iter().zip(used).map(|(value, used)| Ok((value.wait()?, used)));
            let stored = DTensor::stored_together(moved.collect::<Result<_>>()?)?;
            for ((id, placement), value) in members.into_iter().zip(stored) {
                let _scope = self.module_of(id).enter();
                let frozen = self.is_frozen(id);
                let param = &mut self.list[id.index];
                param.held = (placement.held != placement.stored).then_some(placement.held);
                (param.gradient, param.unit) = (placement.gradient, unit);
                *self.value_mut(id) = if frozen { value } else { self.as_leaf(id, &value)? };
            }
        }
        self.units.drain(..before);
        self.list.iter_mut().for_each(|param| param.unit -= before);
        self.names.set_units(&self.units);
        let throughout = self.units.iter().filter(|unit| !unit.comes_and_goes());
        self.throughout_len = throughout.map(|unit| unit.gathered_len).sum();
        self.plan.shard_batch(batch);
        self.is_placed = true;
        self.map_all()
    }

    /// Stores the values of units as one block each again, after updates that could not write them where they lay because
    /// something shared them, such as the tape of a loss. Communicates nothing.
    pub(in crate::nn) fn store_together(&mut self, units: &BTreeSet<usize>) -> Result<()> {
        for &unit in units {
            let members = self.units[unit].members.clone();
            let value = |&id: &ParamId| {
                let (value, layout) = self.first_gather(id);
                (value.detach(), layout.clone())
            };
            let stored = DTensor::stored_together(members.iter().map(value).collect())?;
            for (&id, value) in members.iter().zip(stored) {
                self.value_mut(id).put_back(value);
            }
        }
        Ok(())
    }

    /// Returns the parameter's unit if its value is a part of the unit's block.
    pub(in crate::nn) fn block_of(&self, id: ParamId) -> Option<usize> {
        let param = &self.list[id.index];
        (param.value.local().is_part() && self.mapped.is_none()).then_some(param.unit)
    }

    fn unit_of_placed(&self, unit: &PlacedUnit) -> Result<ParamUnit> {
        let PlacedUnit { ref name, ref members, stays_gathered, reduced_in, padding } = *unit;
        let lens = members.iter().map(|(id, placement)| self.gathered_len(*id, &placement.held));
        let len: usize = lens.sum::<Result<usize>>()?;
        let mut unit = ParamUnit {
            name: name.clone(),
            members: members.iter().map(|(id, _)| *id).collect(),
            gradients: gradient_unit(name, reduced_in),
            stays_gathered,
            padding,
            gathered_len: 0,
        };
        unit.gathered_len = unit.buffer_len(len);
        Ok(unit)
    }

    /// Returns the layouts of a parameter.
    pub(crate) fn placement_of(&self, id: ParamId) -> ParamPlacement {
        let param = &self.list[id.index];
        let stored = param.value.layout().clone();
        let held = param.held.clone().unwrap_or_else(|| stored.clone());
        ParamPlacement { stored, gradient: param.gradient.clone(), held }
    }

    /// Returns `true` if modules compute with the stored value itself, neither gathered nor rounded.
    pub(in crate::nn) fn is_used_as_stored(&self, id: ParamId) -> bool {
        let Param { value, used, .. } = self.at(id);
        value.layout() == used && value.dtype() == self.compute
    }

    /// Returns true if a parameter's gradient arrives in the dtype, shape and layout of `grad`.
    pub(crate) fn expects_gradient(&self, id: ParamId, grad: &DTensor) -> bool {
        let Param { value, gradient, .. } = &self.list[id.index];
        (grad.dtype(), grad.shape(), grad.layout()) == (value.dtype(), value.shape(), gradient)
    }

    /// Returns the layout in which modules compute with a parameter.
    pub(crate) fn used_layout(&self, id: ParamId) -> &Layout {
        &self.list[id.index].used
    }

    /// Returns how each parameter moves from one mesh and plan to another, for a [`Bridge`](crate::dtensor::Bridge).
    /// The result does not depend on the mesh of these parameters. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Linear, Params, Plan}, placement::Mesh, rng::Init};
    /// spmd(3, |rank| {
    ///     let train = Mesh::over(&[("fsdp", 2)], 0..2)?;
    ///     let serve = Mesh::over(&[("tp", 1)], [2])?;
    ///     let plans = [Plan::default().fsdp("fsdp"), Plan::default()];
    ///     let (own, plan) = if rank.rank() < 2 { (&train, &plans[0]) } else { (&serve, &plans[1]) };
    ///     let mut params = Params::new(&DeviceMesh::on(&rank, own)?, plan.clone(), 7)?;
    ///     Linear::new(params.root().child("map"), 3, 2, Init::Ones)?;
    ///     let transfers = params.transfers((&train, &plans[0]), (&serve, &plans[1]))?;
    ///     assert_eq!(transfers.len(), params.len());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses plans that name axes their mesh lacks, cannot shard a parameter, or have a pattern that matches nothing, and
    /// parameters that [`fully_shard`](crate::fsdp::fully_shard) has placed.
    pub fn transfers(&self, from: (&Mesh, &Plan), to: (&Mesh, &Plan)) -> Result<Vec<Transfer>> {
        [from, to].iter().try_for_each(|(_, plan)| self.expect_matches(plan))?;
        self.expect_unplaced("transfers")?;
        let stored = |p: &Param, (mesh, plan): (&Mesh, &Plan)| {
            let used = plan.used_layout(mesh, &p.path, p.value.shape())?;
            plan.stored_layout(mesh, self.dtype, p.value.shape(), &used).map_err(|e| e.at(&p.path))
        };
        let transfer = |p: &Param| {
            let transfer = Transfer::new(self.dtype, p.value.shape(), stored(p, from)?, stored(p, to)?);
            Ok(transfer.named(ModulePath::new(&p.path)))
        };
        self.list.iter().map(transfer).collect()
    }

    /// Refuses parameters whose layouts are not the plan's.
    pub(super) fn expect_unplaced(&self, verb: &str) -> Result<()> {
        if !self.is_placed {
            return Ok(());
        }
        let rule = "fully_shard has placed the parameters, so their layouts are not those of a plan";
        Err(Error::unsupported(verb, rule, format!("{} parameter(s)", self.len()), "move them before that"))
    }

    /// Returns a value as the leaf of a parameter: its gradient arrives in the parameter's layout for gradients, with those
    /// of its unit.
    pub(in crate::nn) fn as_leaf(&self, id: ParamId, value: &DTensor) -> Result<DTensor> {
        let param = &self.list[id.index];
        value.requires_grad_in(param.gradient.clone(), self.units[param.unit].gradients, id.index)
    }

    /// Returns true if a parameter is held in the layout that modules compute in.
    pub(in crate::nn) fn holds_as_used(&self, id: ParamId) -> bool {
        let param = &self.list[id.index];
        param.held.as_ref() == Some(&param.used)
    }

    /// Holds the gathered value of a parameter until its next update.
    pub(in crate::nn) fn hold(&self, id: ParamId, gathered: &DTensor) {
        *self.list[id.index].held_value.borrow_mut() = Some(gathered.clone());
    }

    /// Returns the values from which parameters are gathered, in the dtype that modules compute in. Values that are held in
    /// another layout than they are stored in, and not in that in which they are used, are gathered here after an update.
    pub(in crate::nn) fn held_values(&self, ids: &[ParamId]) -> Result<Vec<DTensor>> {
        let mut values = Vec::with_capacity(ids.len());
        let mut missing = Vec::new();
        let mut made = self.cast_blocks(ids)?;
        let mut places = if made.iter().any(Option::is_some) { Vec::new() } else { self.cast_places(ids)? };
        for (i, &id) in ids.iter().enumerate() {
            let param = &self.list[id.index];
            if let Some(held) = self.held_value(id) {
                values.push(held);
                continue;
            }
            let _scope = param.module.enter();
            let value = match (made[i].take(), places.get_mut(i).and_then(Option::take)) {
                (None, Some(place)) => with_places(vec![place], || param.value.leaf_in(self.compute, None)).0,
                (local, _) => param.value.leaf_in(self.compute, local),
            };
            let value = value.map_err(|e| e.at(&param.path))?;
            if let Some(layout) = param.held.as_ref().filter(|_| !self.holds_as_used(id)) {
                missing.push((values.len(), id, layout.clone()));
            }
            values.push(value);
        }
        let moved =
            missing.iter().map(|(index, _, layout)| (values[*index].clone(), layout.clone())).collect();
        for ((index, id, _), gathered) in missing.into_iter().zip(DTensor::redistribute_together(moved)?) {
            values[index] = gathered.wait()?;
            self.hold(id, &values[index]);
        }
        Ok(values)
    }

    /// Returns the rounded elements of those parameters that are not held: of those that the last update rounded, and of
    /// those that are a block of memory.
    fn cast_blocks(&self, ids: &[ParamId]) -> Result<Vec<Option<Tensor>>> {
        let mut made: Vec<Option<Tensor>> = ids.iter().map(|&id| self.rounded_part(id)).collect();
        let is_cast = |id: &ParamId| self.list[id.index].value.dtype() != self.compute;
        let is_wanted =
            |&i: &usize| made[i].is_none() && is_cast(&ids[i]) && self.held_value(ids[i]).is_none();
        let wanted: Vec<usize> = (0..ids.len()).filter(is_wanted).collect();
        let values: Vec<&DTensor> = wanted.iter().map(|&i| &self.list[ids[i].index].value).collect();
        for (i, local) in wanted.into_iter().zip(DTensor::cast_blocks(&values, self.compute)?) {
            made[i] = local;
        }
        Ok(made)
    }

    /// Returns places in which parameters are rounded side by side, as they are gathered; none if they are not rounded.
    fn cast_places(&self, ids: &[ParamId]) -> Result<Vec<Option<Tensor>>> {
        let is_cast = |id: &ParamId| self.list[id.index].value.dtype() != self.compute;
        if !ids.iter().all(is_cast) || ids.iter().any(|&id| self.held_value(id).is_some()) {
            return Ok(Vec::new());
        }
        let gathered: Vec<_> = ids.iter().map(|&id| self.first_gather(id)).collect();
        DTensor::gather_places(&gathered, self.compute)
    }

    /// Returns a parameter's value and the layout of its first gather.
    pub(super) fn first_gather(&self, id: ParamId) -> (&DTensor, &Layout) {
        let param = &self.list[id.index];
        let held = param.held.as_ref().filter(|_| !self.holds_as_used(id));
        (&param.value, held.unwrap_or(&param.used))
    }

    /// Returns the held value of a parameter.
    fn held_value(&self, id: ParamId) -> Option<DTensor> {
        self.list[id.index].held_value.borrow().clone()
    }
}
