//! Stochastic gradient descent.

use smallvec::smallvec;

use crate::dtensor::{DTensor, Gradients};
use crate::error::Result;
use crate::nn::Params;
use crate::ops::{self, Bits, Free};

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
    /// Refuses a `scale` that is not of shape `[]` and the buffers' dtype; a fault of communication. The parameter at which
    /// it fails and all later ones stay as they were.
    pub fn step(
        &mut self,
        params: &mut Params,
        grads: &mut Gradients,
        scale: &DTensor,
        lr: f64,
    ) -> Result<()> {
        self.buffers.resize_with(params.len(), || None);
        let op = ops::Sgd {
            momentum: Bits(self.momentum),
            weight_decay: Bits(self.weight_decay),
            nesterov: self.nesterov,
            lr: Free(lr),
        };
        let (mut ids, mut calls, mut ready) = (Vec::new(), Vec::new(), Ok(()));
        for id in params.ids() {
            let value = params.value(id);
            let Some(grad) = grads.take(value) else { continue };
            let zeros = || DTensor::zeros(value.mesh(), value.dtype(), value.shape(), value.layout().clone());
            match self.buffers[id.index()].take().map_or_else(zeros, Ok) {
                Ok(buffer) => calls.push((op.clone(), smallvec![grad, buffer, scale.clone()])),
                Err(e) => {
                    ready = Err(e);
                    break;
                }
            }
            ids.push(id);
        }
        let (outs, result) = params.update(&ids, &mut calls);
        // Where a step failed the buffer is where it was.
        let stayed = calls.iter().skip(outs.len()).map(|(_, operands)| &operands[1]);
        for (id, buffer) in ids.iter().zip(outs.iter().map(|outs| &outs[0]).chain(stayed)) {
            self.buffers[id.index()] = Some(buffer.clone());
        }
        result.and(ready)
    }
}
