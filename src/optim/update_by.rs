//! Updates of parameters by operators, for optimizers of a program's own.

use super::groups::expect_reduced;
use super::param_states::ParamStates;
use crate::dtensor::{DTensor, Gradients};
use crate::error::Result;
use crate::nn::{ParamId, Params};

impl Params {
    /// Updates each parameter that has a gradient by a function of operators, with `N` states per parameter, which begin as
    /// zeros: an optimizer in a few lines.
    ///
    /// `f` gets the parameter, its gradient and its states, all in one layout, and returns the parameter's new value and its new
    /// states. It runs without a history, and in a scope of [`DeviceMesh::keep_layouts`](crate::dtensor::DeviceMesh::keep_layouts): operators
    /// on single elements communicate nothing, however the parameter is sharded. An operator that needs whole rows or matrices,
    /// such as a product, moves its operands; a result in another layout is moved back.
    ///
    /// ```
    /// use isoshard::prelude::*;
    /// use isoshard::optim::ParamStates;
    ///
    /// // SGD with momentum.
    /// fn step(params: &mut Params, grads: &mut Gradients, momenta: &mut ParamStates) -> Result<()> {
    ///     params.update_by(grads, [momenta], |_, p, g, [m]| {
    ///         let m = m.mul_scalar(0.5)?.add(g)?;
    ///         Ok((p.sub(&m.mul_scalar(0.25)?)?, [m]))
    ///     })
    /// }
    ///
    /// let value = spmd_first(3, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 3)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let w = params.root().param("w", [5], Init::Ones)?;
    ///     let mut momenta = ParamStates::default();
    ///     for _ in 0..2 {
    ///         let mut grads = params.value(w).sum_all()?.backward()?;
    ///         step(&mut params, &mut grads, &mut momenta)?;
    ///     }
    ///     params.value(w).full_tensor()?.to_vec::<f32>()
    /// })?;
    /// assert_eq!(value, [1.0 - 0.25 - 0.25 * 1.5; 5]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses gradients that are not reduced. Returns the errors of `f`, and refuses results of another dtype or shape. Parameters that were updated before have their new
    /// values then; the others, their gradients and their states are what they were.
    pub fn update_by<const N: usize>(
        &mut self,
        grads: &mut Gradients,
        mut states: [&mut ParamStates; N],
        mut f: impl FnMut(ParamId, &DTensor, &DTensor, [&DTensor; N]) -> Result<(DTensor, [DTensor; N])>,
    ) -> Result<()> {
        self.check_plan()?;
        expect_reduced("update_by", self, grads)?;
        let mesh = self.mesh().clone();
        let (_no_grad, _keep) = (mesh.no_grad(), mesh.keep_layouts());
        let ids: Vec<ParamId> = self.ids().filter(|&id| grads.get(self.value(id)).is_some()).collect();
        states.iter_mut().try_for_each(|states| states.prepare(self, &ids))?;
        for id in ids {
            let param = self.value(id).detach();
            let layout = param.layout();
            let grad = grads.get(self.value(id)).expect("found above").redistribute(layout)?;
            let own = states.each_ref().map(|states| states.get(id).expect("made above"));
            let (value, new) = f(id, &param, &grad, own).map_err(|e| e.at(self.path(id)))?;
            let (value, new) = (value.redistribute(layout)?, new.map(|state| state.redistribute(layout)));
            let mut checked = Vec::with_capacity(N);
            for state in new {
                let state = state?;
                ParamStates::expect_like(self, id, &state)?;
                checked.push(state);
            }
            drop(grad);
            let used = grads.take(self.value(id));
            drop(param);
            if let Err(refused) = self.set(id, value) {
                used.into_iter().for_each(|grad| grads.put_back(self.value(id), grad));
                return Err(refused);
            }
            for (states, state) in states.iter_mut().zip(checked) {
                states.put(id, state);
            }
        }
        Ok(())
    }
}
