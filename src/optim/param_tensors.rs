//! Tensors of an update rule by parameter, in checkpoints.

use crate::checkpoint::Checkpoint;
use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::nn::{Params, load_like, refuse_names};

/// Loads a tensor per parameter, of its dtype, shape and layout; `None` for parameters that the checkpoint leaves out.
/// Refuses names that are no parameters' paths.
pub(super) fn load_by_param(params: &Params, saved: &Checkpoint) -> Result<Vec<Option<DTensor>>> {
    let extra = saved.names().filter(|name| params.find(name).is_none());
    refuse_names("has tensors of other parameters", extra, saved)?;
    let there: Vec<bool> = params.ids().map(|id| saved.meta(params.path(id)).is_some()).collect();
    let ids = params.ids().zip(&there).filter(|(_, there)| **there).map(|(id, _)| id);
    let wanted: Vec<(&str, &DTensor)> = ids.map(|id| (params.path(id), params.value(id))).collect();
    let mut loaded = load_like(saved, params, &wanted)?.into_iter();
    Ok(there.into_iter().map(|there| if there { loaded.next() } else { None }).collect())
}

/// Refuses a state that another update rule has saved.
pub(super) fn expect_kind(saved: &Checkpoint, kind: &str) -> Result<()> {
    let found = saved.value("kind");
    if found.and_then(|found| found.as_str()) == Some(kind) {
        return Ok(());
    }
    let given = found.map_or("none".into(), |found| found.to_string());
    Err(Error::invalid(
        "load_state",
        format!("the state is that of {kind}"),
        given,
        "load it with its own rule",
    ))
}
