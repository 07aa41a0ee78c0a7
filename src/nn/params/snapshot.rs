//! Copies of parameters for functions that run again.

use super::Params;
use super::names::Declaring;

impl Params {
    /// Returns a copy for functions that run again in the backward pass. The values and the model's number are shared, so
    /// ids of this model are ids of the copy.
    pub(in crate::nn) fn snapshot(&self) -> Params {
        let Params { number, dtype, compute, gather_limit, throughout_len, blank, is_placed, .. } = *self;
        Params {
            number,
            mesh: self.mesh.clone(),
            plan: self.plan.clone(),
            generator: self.generator.clone(),
            dtype,
            compute,
            list: self.list.clone(),
            units: self.units.clone(),
            names: self.names.clone(),
            gather_limit,
            throughout_len,
            sites: self.sites.clone(),
            blocks: self.blocks.clone(),
            declaring: Declaring::default(),
            blank,
            is_placed,
            mapped: self.mapped.clone(),
            checked: self.checked.clone(),
        }
    }
}
