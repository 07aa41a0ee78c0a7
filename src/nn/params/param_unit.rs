//! Units: parameters that are gathered together.

use crate::dtensor::{CountedList, GradientUnit, may_be_padding};
use crate::nn::params::param_id::ParamId;

/// A unit: parameters that are gathered together, one unit ahead of their use, and whose gradients are reduced together.
#[derive(Clone)]
pub(crate) struct ParamUnit {
    /// The path of its module; empty for the root.
    pub name: String,
    pub members: CountedList<ParamId>,
    pub gradients: GradientUnit,
    /// True if gathered parameters stay gathered from the forward pass to the backward pass.
    pub stays_gathered: bool,
    /// The elements between parameters in the unit's plan.
    pub padding: usize,
    /// The elements of the unit's gathered buffer on this rank, set when units are placed.
    pub gathered_len: usize,
}

impl ParamUnit {
    /// Returns the elements that the unit's buffer takes for so many of its parameters.
    pub fn buffer_len(&self, len: usize) -> usize {
        let is_padded = len > 0 && may_be_padding(self.padding, len + self.padding);
        if is_padded { len + self.padding } else { len }
    }

    /// Returns `true` for the root unit. Its parameters are used at both ends of the model and stay gathered
    /// throughout.
    pub fn is_root(&self) -> bool {
        self.name.is_empty()
    }

    /// Returns true for a unit that is gathered again in the backward pass, like most.
    pub fn comes_and_goes(&self) -> bool {
        !self.is_root() && !self.stays_gathered
    }
}
