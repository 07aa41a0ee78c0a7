//! AdamW (Loshchilov & Hutter 2019, algorithm 2).

use crate::dtensor::{DTensor, Gradients};
use crate::error::Result;
use crate::nn::{ParamId, Params, Update};
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
    /// Refuses a `scale` that is not of shape `[]` and the moments' dtype: nothing has changed then, neither parameters,
    /// moments and the number of steps nor `grads`. After a fault of communication the parameter at which it failed and all
    /// later ones are as they were.
    pub fn step(
        &mut self,
        params: &mut Params,
        grads: &mut Gradients,
        scale: &DTensor,
        lr: f64,
    ) -> Result<()> {
        let steps = self.steps + 1;
        self.moments.resize_with(params.len(), || None);
        let ids: Vec<ParamId> = params.ids().filter(|&id| grads.get(params.value(id)).is_some()).collect();
        for &id in &ids {
            if self.moments[id.index()].is_none() {
                self.moments[id.index()] = Some((params.zeros_like(id)?, params.zeros_like(id)?));
            }
        }
        let mut update = |id: ParamId| {
            let grad = grads.take(params.value(id)).expect("found above");
            let (m, v) = self.moments[id.index()].take().expect("made above");
            Update::new(id, self.operator(params, id, steps, lr), [grad, m, v, scale.clone()])
        };
        let mut updates: Vec<_> = ids.into_iter().map(&mut update).collect();
        let result = params.update(&mut updates);
        for Update { param, mut operands, results, .. } in updates {
            self.moments[param.index()] = match results {
                Some(mut outs) => Some((outs.remove(0), outs.remove(0))),
                // Where no step was made everything is as it was.
                None => {
                    grads.put(params.value(param), operands.remove(0))?;
                    Some((operands.remove(0), operands.remove(0)))
                }
            };
        }
        result?;
        self.steps = steps;
        Ok(())
    }

    fn operator(&self, params: &Params, id: ParamId, steps: u64, lr: f64) -> ops::AdamWStep {
        let decay = if params.value(id).shape().len() >= 2 { self.weight_decay } else { 0.0 };
        ops::AdamWStep::at_step(steps, lr, self.betas, self.eps, decay)
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

    /// A step is refused for what it is given, and for how that lies; then the next one is made with what there is.
    #[test]
    fn a_refused_step_changes_nothing() {
        let run = |rank: Rank| {
            let train = |refused: bool| -> Result<Vec<f64>> {
                let (mut params, id) = one_param(&rank, "fsdp")?;
                let late = params.root().param("late", [5], Init::Ones)?;
                let mut adam = AdamW::new((0.9, 0.99), 0.1);
                let good = scale(&params, Layout::replicated(1))?;
                step(&mut adam, &mut params, id, &good)?;
                // The second parameter's first gradient comes with the step that is refused.
                let both = params.value(id).sum_all()?.add(&params.value(late).sum_all()?)?;
                let mut grads = both.backward()?;
                if refused {
                    let partial = scale(&params, "(P(sum))".parse()?)?;
                    params.mesh().set_strict(true);
                    let e = adam.step(&mut params, &mut grads, &partial, 0.5).unwrap_err().to_string();
                    params.mesh().set_strict(false);
                    assert!(e.starts_with("adamw: operand 4 would have to move"), "{e}");
                    let long = DTensor::full(params.mesh(), DType::F32, [1], 1.0, Layout::replicated(1))?;
                    let e = adam.step(&mut params, &mut grads, &long, 0.5).unwrap_err().to_string();
                    assert!(e.starts_with("adamw: the scale is f32[]"), "{e}");
                }
                adam.step(&mut params, &mut grads, &good, 0.5)?;
                assert_eq!(adam.steps, 2);
                let (m, v) = adam.moments[late.index()].as_ref().expect("it had a step");
                let all = [params.value(id), params.value(late), m, v];
                Ok(all
                    .map(|t| t.full_tensor().map(|t| t.to_f64_vec()))
                    .into_iter()
                    .collect::<Result<Vec<_>>>()?
                    .concat())
            };
            assert_eq!(train(true)?, train(false)?);
            Ok(())
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
