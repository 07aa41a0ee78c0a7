//! The check of a kernel's results.

use std::rc::Rc;

use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::dtensor::plan::call_plan::CallPlan;
use crate::error::{Error, Result};
use crate::ops::{Meta, Op};
use crate::tensor::Tensor;

/// Refuses results that are not the shards which the operator's record states: its kernel is wrong.
#[inline]
pub(in crate::dtensor) fn check_results(op: &dyn Op, plan: &CallPlan, outs: &[Tensor]) -> Result<()> {
    let right = |(x, m): (&Tensor, &Rc<TensorMeta>)| {
        x.shape() == m.stored_shape() && x.dtype() == m.spec().stored_dtype()
    };
    if outs.len() == plan.outs.len() && outs.iter().zip(&plan.outs).all(right) {
        return Ok(());
    }
    Err(wrong_results(op, plan, outs))
}

#[cold]
fn wrong_results(op: &dyn Op, plan: &CallPlan, outs: &[Tensor]) -> Error {
    let given: Vec<String> = outs.iter().map(|x| Meta::of(x).to_string()).collect();
    let due = |(dtype, shape)| Meta { dtype, shape }.to_string();
    let due: Vec<String> = plan.stored().map(due).collect();
    let specs: Vec<String> = plan.outs.iter().map(|m| m.spec().to_string()).collect();
    let given = format!("{} for {}", given.join(", "), specs.join(", "));
    let rule = "the kernel's results are not this rank's shards of what infer states";
    Error::invalid(op.name(), rule, given, format!("return {}", due.join(", ")))
}
