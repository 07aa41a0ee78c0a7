//! The memory that gathered units take, and a limit on it.

use super::Params;
use crate::error::{Error, Result};
use crate::nn::params::param_id::ParamId;
use crate::nn::params::param_unit::ParamUnit;
use crate::placement::{Layout, Spec};
use crate::tensor::DType;

impl Params {
    /// Returns the elements of a parameter that modules compute with, on the rank that has most, if it is gathered from
    /// `held`. All ranks answer alike.
    pub(crate) fn gathered_len(&self, id: ParamId, held: &Layout) -> Result<usize> {
        let (value, used) = (self.value(id), self.used_layout(id));
        if held == used {
            return Ok(0);
        }
        let spec = Spec::new(self.mesh.mesh(), self.compute, value.shape(), used.clone())?;
        Ok(spec.local_shape_at(&vec![0; self.mesh.mesh().ndim()]).numel())
    }

    /// Returns true if gathered units are limited.
    pub(in crate::nn) fn limits_gathers(&self) -> bool {
        self.gather_limit.is_some()
    }

    /// Returns true if two units may be gathered at once: without a limit, any two.
    pub(in crate::nn) fn fit_together(&self, a: usize, b: usize) -> bool {
        let Some(limit) = self.gather_limit else { return true };
        let others = [&self.units[a], &self.units[b]].into_iter().filter(|unit| unit.comes_and_goes());
        let others: usize = others.map(|unit| unit.gathered_len).sum();
        (self.throughout_len + others) * self.compute.size_bytes() <= limit
    }

    /// Returns the most bytes that gathered units take on a rank.
    pub(crate) fn most_gathered(&self) -> Result<usize> {
        let len_of = |unit: &ParamUnit| -> Result<usize> {
            let lens = unit.members.iter().map(|&id| self.gathered_len(id, &self.placement_of(id).held));
            let len: usize = lens.sum::<Result<usize>>()?;
            Ok(unit.buffer_len(len))
        };
        let (mut throughout, mut comes) = (0, Vec::new());
        for (k, unit) in self.units.iter().enumerate() {
            match unit.comes_and_goes() {
                true => comes.push((k, len_of(unit)?)),
                false => throughout += len_of(unit)?,
            }
        }
        let pairs = comes.windows(2).filter(|pair| self.fit_together(pair[0].0, pair[1].0));
        let pairs = pairs.map(|pair| pair[0].1 + pair[1].1);
        let most = pairs.chain(comes.iter().map(|(_, len)| *len)).max().unwrap_or(0);
        Ok((throughout + most) * self.compute.size_bytes())
    }

    /// Refuses a unit that does not fit beside those that stay gathered.
    pub(super) fn expect_gathers_fit(
        &self,
        verb: &str,
        units: &[ParamUnit],
        limit: Option<usize>,
        dtype: DType,
    ) -> Result<()> {
        let Some(limit) = limit else { return Ok(()) };
        let stay = units.iter().filter(|unit| !unit.comes_and_goes());
        let throughout: usize = stay.map(|unit| unit.gathered_len).sum();
        let others = units.iter().filter(|unit| unit.comes_and_goes());
        let largest = others.max_by_key(|unit| unit.gathered_len).map(|unit| (&unit.name, unit.gathered_len));
        let bytes = |len: usize| len.saturating_mul(dtype.size_bytes());
        if bytes(throughout.saturating_add(largest.map_or(0, |(_, len)| len))) <= limit {
            return Ok(());
        }
        let beside = largest.map(|(name, len)| format!(" and {} of unit {name:?}", bytes(len)));
        let (stay, beside) = (bytes(throughout), beside.unwrap_or_default());
        let given = format!("{stay} bytes that stay gathered{beside}, with a limit of {limit}");
        let rule = "the largest unit fits the limit of gathered bytes beside those that stay gathered";
        Err(Error::invalid(verb, rule, given, "make units smaller, or let the root's parts be units"))
    }
}
