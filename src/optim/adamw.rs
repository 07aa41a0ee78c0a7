//! AdamW (Loshchilov & Hutter 2019, algorithm 2).

use smallvec::smallvec;

use crate::dtensor::{DTensor, Gradients};
use crate::error::Result;
use crate::nn::{ParamId, Params};
use crate::ops;

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
    /// Refuses a `scale` that is not of shape `[]` and the moments' dtype; a fault of communication. The parameter at which
    /// it fails and all later ones stay as they were.
    pub fn step(
        &mut self,
        params: &mut Params,
        grads: &mut Gradients,
        scale: &DTensor,
        lr: f64,
    ) -> Result<()> {
        self.steps += 1;
        self.moments.resize_with(params.len(), || None);
        let (mut ids, mut calls, mut ready) = (Vec::new(), Vec::new(), Ok(()));
        for id in params.ids() {
            let Some(grad) = grads.take(params.value(id)) else { continue };
            match self.moments_of(params, id) {
                Ok((m, v)) => {
                    calls.push((self.operator(params, id, lr), smallvec![grad, m, v, scale.clone()]))
                }
                Err(e) => {
                    ready = Err(e);
                    break;
                }
            }
            ids.push(id);
        }
        let (outs, result) = params.update(&ids, &mut calls);
        // Where a step failed the moments are where they were.
        let stayed = calls.iter().skip(outs.len()).map(|(_, operands)| &operands[1..3]);
        let moments = outs.iter().map(|outs| &outs[..2]).chain(stayed);
        for (id, moments) in ids.iter().zip(moments) {
            self.moments[id.index()] = Some((moments[0].clone(), moments[1].clone()));
        }
        result.and(ready)
    }

    /// A parameter's moments, moved out; zeros at its first step.
    fn moments_of(&mut self, params: &Params, id: ParamId) -> Result<(DTensor, DTensor)> {
        let value = params.value(id);
        let zeros = || DTensor::zeros(value.mesh(), value.dtype(), value.shape(), value.layout().clone());
        match self.moments[id.index()].take() {
            Some(moments) => Ok(moments),
            None => Ok((zeros()?, zeros()?)),
        }
    }

    fn operator(&self, params: &Params, id: ParamId, lr: f64) -> ops::AdamW {
        let decay = if params.value(id).shape().len() >= 2 { self.weight_decay } else { 0.0 };
        ops::AdamW::at_step(self.steps, lr, self.betas, self.eps, decay)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{Rank, spmd};
    use crate::dtensor::DeviceMesh;
    use crate::nn::Plan;
    use crate::placement::Layout;
    use crate::rng::Init;
    use crate::tensor::DType;

    /// One parameter `w` of ones on a mesh of this one axis.
    fn one_param(rank: &Rank, axis: &str) -> Result<(Params, ParamId)> {
        let mesh = DeviceMesh::new(rank, &[(axis, rank.world_len())])?;
        let plan =
            if axis == "tp" { Plan::default().shard("w", "tp", 1) } else { Plan::default().fsdp(axis) };
        let mut params = Params::new(&mesh, plan, 1)?;
        let id = params.root().param("w", [3, 2], Init::Ones)?;
        Ok((params, id))
    }

    fn step(adam: &mut AdamW, params: &mut Params, id: ParamId, scale: &DTensor) -> Result<()> {
        let mut grads = params.value(id).sum_all()?.backward()?;
        adam.step(params, &mut grads, scale, 0.5)
    }

    fn scale(params: &Params, layout: Layout) -> Result<DTensor> {
        DTensor::full(params.mesh(), DType::F32, [], 1.0, Layout::replicated(1))?.redistribute(layout)
    }

    #[test]
    fn a_refused_step_changes_nothing() {
        let run = |rank: Rank| {
            let (mut params, id) = one_param(&rank, "fsdp")?;
            let mut adam = AdamW::new((0.5, 0.5), 0.0);
            let good = scale(&params, Layout::replicated(1))?;
            step(&mut adam, &mut params, id, &good)?;
            let value = params.value(id).full_tensor()?.to_f64_vec();
            assert_ne!(value, [1.0; 6]);
            let partial = scale(&params, "(P(sum))".parse()?)?;
            params.mesh().set_strict(true);
            let e = step(&mut adam, &mut params, id, &partial).unwrap_err().to_string();
            assert!(e.starts_with("adamw: operand 4 would have to move"), "{e}");
            params.mesh().set_strict(false);
            assert_eq!(params.value(id).full_tensor()?.to_f64_vec(), value);
            let (m, v) = adam.moments[0].as_ref().expect("moments stay");
            assert_eq!(m.full_tensor()?.to_f64_vec(), [0.5; 6]);
            assert_eq!(v.full_tensor()?.to_f64_vec(), [0.5; 6]);
            step(&mut adam, &mut params, id, &good)
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }

    #[test]
    fn writes_in_place_and_never_into_what_is_shared() {
        let run = |rank: Rank| {
            let (mut params, id) = one_param(&rank, "fsdp")?;
            let mut adam = AdamW::new((0.5, 0.5), 0.0);
            let good = scale(&params, Layout::replicated(1))?;
            let place =
                |p: &Params| -> Result<*const f32> { Ok(p.value(id).local().data::<f32>()?.as_ptr()) };
            let before = place(&params)?;
            step(&mut adam, &mut params, id, &good)?;
            assert_eq!(place(&params)?, before, "nobody shares it");
            let kept = params.value(id).clone();
            let value = kept.local().to_f64_vec();
            step(&mut adam, &mut params, id, &good)?;
            assert_eq!(kept.local().to_f64_vec(), value, "a clone keeps its values");
            assert_ne!(params.value(id).local().to_f64_vec(), value);
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }

    #[test]
    fn an_axis_of_one_rank_is_an_axis() {
        for axis in ["fsdp", "tp"] {
            let run = move |rank: Rank| {
                let (mut params, id) = one_param(&rank, axis)?;
                let layout = params.value(id).layout().clone();
                let good = scale(&params, Layout::replicated(1))?;
                step(&mut AdamW::new((0.5, 0.5), 0.0), &mut params, id, &good)?;
                assert_eq!(*params.value(id).layout(), layout);
                Ok(())
            };
            spmd(1, run).unwrap_or_else(|e| panic!("{axis}: {e}"));
        }
    }
}
