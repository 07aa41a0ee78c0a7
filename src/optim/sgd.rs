//! Stochastic gradient descent.

use crate::dtensor::{DTensor, Gradients};
use crate::error::Result;
use crate::nn::{ParamId, Params, Update};
use crate::ops::{self, Bits, Unkeyed};

/// Stochastic gradient descent with momentum (Sutskever et al. 2013), optionally Nesterov's.
#[derive(Debug)]
pub struct Sgd {
    momentum: f64,
    nesterov: bool,
    weight_decay: f64,
    buffers: Vec<Option<DTensor>>,
}

impl Sgd {
    /// With momentum (0 for none); `weight_decay` is added to the gradient as `weight_decay · parameter`.
    pub fn new(momentum: f64, nesterov: bool, weight_decay: f64) -> Sgd {
        Sgd { momentum, nesterov, weight_decay, buffers: Vec::new() }
    }

    /// One step at rate `lr`, with gradients multiplied by the scalar `scale`. Parameters without a gradient stay.
    /// Communicates nothing where `scale` is replicated.
    ///
    /// # Errors
    /// Refuses a `scale` that is not of shape `[]` and the buffers' dtype: nothing has changed then, neither parameters and
    /// buffers nor `grads`. After a fault of communication the parameter at which it failed and all later ones are as they
    /// were.
    pub fn step(
        &mut self,
        params: &mut Params,
        grads: &mut Gradients,
        scale: &DTensor,
        lr: f64,
    ) -> Result<()> {
        self.buffers.resize_with(params.len(), || None);
        let op = ops::SgdStep {
            momentum: Bits(self.momentum),
            weight_decay: Bits(self.weight_decay),
            nesterov: self.nesterov,
            lr: Unkeyed(lr),
        };
        let ids: Vec<ParamId> = params.ids().filter(|&id| grads.get(params.value(id)).is_some()).collect();
        for &id in &ids {
            if self.buffers[id.index()].is_none() {
                self.buffers[id.index()] = Some(params.zeros_like(id)?);
            }
        }
        let mut update = |id: ParamId| {
            let grad = grads.take(params.value(id)).expect("found above");
            let buffer = self.buffers[id.index()].take().expect("made above");
            Update::new(id, op.clone(), [grad, buffer, scale.clone()])
        };
        let mut updates: Vec<_> = ids.into_iter().map(&mut update).collect();
        let result = params.update(&mut updates);
        for Update { param, mut operands, results, .. } in updates {
            self.buffers[param.index()] = match results {
                Some(mut outs) => Some(outs.remove(0)),
                // Where no step was made everything is as it was.
                None => {
                    grads.put(params.value(param), operands.remove(0))?;
                    Some(operands.remove(0))
                }
            };
        }
        result
    }
}
