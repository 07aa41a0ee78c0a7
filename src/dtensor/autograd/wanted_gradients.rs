//! The gradients of chosen tensors, as a backward pass finds them.

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use crate::dtensor::tensor::dtensor::DTensor;
use crate::dtensor::tensor::tape::{TapeCall, TapeNode, TapeOutput};

/// The gradients of chosen tensors. A pass that computes them records its steps unless the mesh records nothing.
pub(in crate::dtensor) struct WantedGradients {
    /// The nodes from which a wanted tensor is reached, and those of the wanted tensors.
    pub reaching: FxHashSet<u64>,
    /// The wanted gradients, by node and number of the result.
    pub grads: FxHashMap<(u64, usize), Option<DTensor>>,
}

impl WantedGradients {
    /// Stores those complete gradients of a node's results that are wanted.
    pub fn keep(&mut self, node: &TapeNode, grads: &[Option<DTensor>]) {
        for (out, grad) in grads.iter().enumerate() {
            if let (Some(place), Some(grad)) = (self.grads.get_mut(&(node.id, out)), grad) {
                *place = Some(grad.clone());
            }
        }
    }

    /// Returns, per operand of a call, true if its gradient leads to a wanted one.
    pub fn needed(&self, call: &TapeCall) -> SmallVec<[bool; 4]> {
        let leads = |of: &TapeOutput| self.reaching.contains(&of.node.id);
        call.inputs.iter().map(|input| input.as_ref().is_some_and(leads)).collect()
    }
}
