//! AdamW (Loshchilov & Hutter 2019, algorithm 2).

use smallvec::smallvec;

use crate::dtensor::{DTensor, Gradients};
use crate::error::{Error, Result};
use crate::nn::{ParamId, Params};
use crate::ops::{self, Bits, Free};

/// AdamW with decoupled weight decay on parameters of two dims or more, which leaves out biases and normalisations.
///
/// Its moments lie as the parameters do.
#[derive(Debug)]
pub struct AdamW {
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    steps: u64,
    /// First and second moment, one pair a parameter.
    moments: Vec<Option<(DTensor, DTensor)>>,
}

impl AdamW {
    /// With moment decays `betas`, eps 1e-8, and `weight_decay` times the learning rate taken off each step.
    pub fn new(betas: (f64, f64), weight_decay: f64) -> AdamW {
        AdamW { betas, eps: 1e-8, weight_decay, steps: 0, moments: Vec::new() }
    }

    /// One step at rate `lr`, with gradients multiplied by the scalar `scale`. Parameters without a gradient stay.
    /// Communicates nothing where `scale` is replicated.
    ///
    /// # Errors
    /// Refuses gradients of other parameters.
    pub fn step(
        &mut self,
        params: &mut Params,
        grads: &mut Gradients,
        scale: &DTensor,
        lr: f64,
    ) -> Result<()> {
        self.steps += 1;
        self.moments.resize_with(params.len(), || None);
        for id in params.ids() {
            if let Some(grad) = grads.take(params.value(id)) {
                self.step_one(params, id, grad, scale, lr)?;
            }
        }
        Ok(())
    }

    fn step_one(
        &mut self,
        params: &mut Params,
        id: ParamId,
        grad: DTensor,
        scale: &DTensor,
        lr: f64,
    ) -> Result<()> {
        let value = params.value(id);
        let decay = if value.shape().len() >= 2 { self.weight_decay } else { 0.0 };
        let zeros = || DTensor::zeros(value.mesh(), value.dtype(), value.shape(), value.layout().clone());
        let slot = &mut self.moments[id.index()];
        let (m, v) = match slot.take() {
            Some(moments) => moments,
            None => (zeros()?, zeros()?),
        };
        let t = self.steps as i32;
        let op = ops::AdamW {
            beta1: Bits(self.betas.0),
            beta2: Bits(self.betas.1),
            eps: Bits(self.eps),
            weight_decay: Bits(decay),
            lr: Free(lr),
            correction1: Free(1.0 - self.betas.0.powi(t)),
            correction2: Free(1.0 - self.betas.1.powi(t)),
        };
        params.update(id, |p| {
            let outs = DTensor::apply_owned(&op, smallvec![p, grad, m, v, scale.clone()])?;
            let [p, m, v] = <[DTensor; 3]>::try_from(outs.into_vec())
                .map_err(|_| Error::invalid("adamw", "wants three results", "", ""))?;
            *slot = Some((m, v));
            Ok(p)
        })
    }
}
