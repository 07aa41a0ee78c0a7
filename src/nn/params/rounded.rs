//! Parameters in the dtype that modules compute in, as an optimizer's step writes them ([`Batched::ROUNDS`]): the next
//! pass, and the next micro-batches, round nothing.
//!
//! [`Batched::ROUNDS`]: crate::ops::Batched::ROUNDS

use std::collections::BTreeSet;

use rustc_hash::FxHashSet;

use super::{Param, Params};
use crate::dtensor::DTensor;
use crate::error::Result;
use crate::nn::params::param_id::ParamId;
use crate::tensor::{DType, Tensor, with_places};

impl Params {
    /// Takes the tensors to which a step rounds these parameters, for those that modules compute with in f16 or bf16. The
    /// first step makes them, and one that finds them shared, as by the tape of a loss. Those of a unit lie in memory as
    /// they are gathered, with its other parameters, which are rounded here.
    pub(in crate::nn) fn take_rounded(&mut self, updated: &[ParamId]) -> Result<Vec<Option<DTensor>>> {
        let mut incomplete = BTreeSet::new();
        let all: FxHashSet<ParamId> = updated.iter().copied().collect();
        let compute = self.compute;
        for &id in updated {
            if !self.is_rounded_by_steps(id) {
                continue;
            }
            let param = &mut self.list[id.index];
            let can_write = |x: &mut DTensor| x.dtype() == compute && x.is_unique();
            if !param.rounded.as_mut().is_some_and(can_write) {
                incomplete.insert(param.unit);
            }
        }
        for unit in incomplete {
            self.make_rounded(unit, &all)?;
        }
        Ok(updated.iter().map(|id| self.list[id.index].rounded.take()).collect())
    }

    /// Keeps what [`Params::take_rounded`] gave, after the step.
    pub(in crate::nn) fn keep_rounded(&mut self, id: ParamId, rounded: DTensor) {
        self.list[id.index].rounded = Some(rounded);
    }

    /// Returns this rank's part of a parameter in the dtype that modules compute in, if the last update rounded it.
    pub(super) fn rounded_part(&self, id: ParamId) -> Option<Tensor> {
        let rounded = self.list[id.index].rounded.as_ref()?;
        (rounded.dtype() == self.compute).then(|| rounded.local().clone())
    }

    /// Returns true if steps round the parameter: if its rounded value is in memory during the whole pass anyway. The pass
    /// rounds a parameter that is gathered once and stays gathered, and one whose stored value is in a file.
    fn is_rounded_by_steps(&self, id: ParamId) -> bool {
        let Param { value, used, held, unit, .. } = &self.list[id.index];
        let is_half = matches!(self.compute, DType::F16 | DType::BF16) && value.dtype() == DType::F32;
        let stays = || value.layout() == used || (held.is_none() && self.units[*unit].comes_and_goes());
        is_half && self.mapped.is_none() && stays()
    }

    /// Makes the tensors of a unit anew: with arbitrary elements for the updated ones, with rounded ones for others.
    fn make_rounded(&mut self, unit: usize, updated: &FxHashSet<ParamId>) -> Result<()> {
        let members: Vec<ParamId> =
            self.units[unit].members.iter().copied().filter(|id| self.is_rounded_by_steps(*id)).collect();
        members.iter().for_each(|id| self.list[id.index].rounded = None);
        let gathered: Vec<_> = members.iter().map(|&id| self.first_gather(id)).collect();
        let made = DTensor::uninit_together(&gathered, self.compute)?;
        for (id, mut made) in members.into_iter().zip(made) {
            if !updated.contains(&id) {
                let place = made.take_value().into_local();
                made = with_places(vec![place], || self.value(id).detach().cast(self.compute)).0?;
            }
            self.keep_rounded(id, made);
        }
        Ok(())
    }
}
