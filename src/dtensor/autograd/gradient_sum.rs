//! Sums of gradients, in the dtype of the tensor whose gradient they are.

use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::tensor::dtensor::DTensor;
use crate::error::Result;
use crate::ops::Add;
use crate::placement::Spec;
use crate::tensor::DType;

/// Returns `a + b`, reusing a buffer that no other tensor shares.
pub(in crate::dtensor) fn add(a: DTensor, b: DTensor) -> Result<DTensor> {
    Ok(DTensor::apply_owned(&Add, &mut [a, b].into())?.remove(0))
}

/// Returns the sum of a gradient and those before it. It is recorded if one of them is.
pub(in crate::dtensor) fn add_to(sum: Option<DTensor>, grad: DTensor) -> Result<DTensor> {
    match sum {
        None => Ok(grad),
        Some(sum) if sum.has_history() || grad.has_history() => DTensor::apply_one(&Add, &[&sum, &grad]),
        Some(sum) => add(sum, grad),
    }
}

/// Returns [`add_to`] in the dtype of the tensor whose gradient it is: the uses of a leaf that modules compute with in bf16
/// give gradients in bf16, and each is added in f32. A gradient that is the first keeps its dtype.
pub(in crate::dtensor) fn add_in(dtype: DType, sum: Option<DTensor>, grad: DTensor) -> Result<DTensor> {
    match sum {
        None => Ok(grad),
        Some(sum) => add_to(Some(in_dtype(sum, dtype)?), in_dtype(grad, dtype)?),
    }
}

/// Returns a gradient in another dtype. The cast is recorded if the gradient has history.
pub(in crate::dtensor) fn in_dtype(grad: DTensor, dtype: DType) -> Result<DTensor> {
    if grad.has_history() { grad.cast(dtype) } else { cast_local(&grad.mesh, &grad, dtype) }
}

/// Returns a gradient in another dtype. Each rank casts its part: the plan of an operator would move the parts of uneven
/// shards, so that no rank casts more than others.
pub(in crate::dtensor) fn cast_local(mesh: &DeviceMesh, grad: &DTensor, dtype: DType) -> Result<DTensor> {
    if grad.dtype() == dtype {
        return Ok(grad.clone());
    }
    let meta = mesh.intern(Spec { dtype, ..grad.spec().clone() })?;
    Ok(DTensor::wrap(mesh, grad.local.cast(meta.spec().stored_dtype())?, meta, grad.lineage))
}
