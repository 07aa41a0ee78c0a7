//! One step of a rule whose operator updates a parameter and its states.

use super::groups::ParamGroup;
use super::param_states::ParamStates;
use crate::dtensor::{DTensor, Gradients};
use crate::error::Result;
use crate::nn::{ParamId, Params, Update};
use crate::ops::Batched;
use crate::tensor::sort_by_key;

/// Updates each parameter that has a gradient by the operator that `op_of` returns, whose operands are the parameter, its
/// gradient, its states and `scale`, and whose results are the parameter and its states. `settings` has the groups'
/// settings per parameter.
///
/// # Errors
/// Refuses what [`Params::update`] refuses. Updates that were not made leave parameters, states and gradients unchanged.
pub(super) fn update_states<O: Batched>(
    params: &mut Params,
    grads: &mut Gradients,
    states: &mut [ParamStates],
    scale: &DTensor,
    settings: &[ParamGroup],
    op_of: impl Fn(&Params, ParamId) -> O,
) -> Result<()> {
    let mut ids: Vec<ParamId> = params.ids().filter(|&id| grads.get(params.value(id)).is_some()).collect();
    // Equal settings stand together: a device updates them in one launch.
    sort_by_key(&mut ids, |id| settings[id.index()].launch_key());
    states.iter_mut().try_for_each(|states| states.prepare(params, &ids))?;
    let mut update = |id: ParamId| {
        let grad = grads.take(params.value(id)).expect("found above");
        let own = states.iter_mut().map(|states| states.take(id).expect("made above"));
        let operands = std::iter::once(grad).chain(own).chain([scale.clone()]);
        Update::new(id, op_of(params, id), operands)
    };
    let mut updates: Vec<_> = ids.into_iter().map(&mut update).collect();
    let result = params.update(&mut updates);
    for Update { param, mut operands, results, .. } in updates {
        let mut own = results.unwrap_or_else(|| {
            // This update was not made: its operands are what they were.
            grads.put_back(params.value(param), operands.remove(0));
            operands
        });
        states.iter_mut().for_each(|states| states.put(param, own.remove(0)));
    }
    result
}
