//! The plans with which the steps of a derivative program ran last.

use std::cell::RefCell;
use std::rc::{Rc, Weak};

use smallvec::SmallVec;

use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::dtensor::plan::call_plan::CallPlan;
use crate::dtensor::plan::derivative_program::DerivativeProgram;
use crate::error::Result;

/// The plan of each step's last call. The mesh's cache owns the plans.
#[derive(Default)]
struct StepPlans(RefCell<SmallVec<[Weak<CallPlan>; 2]>>);

/// Returns the plan for a step of a program on operands with this metadata. A repeated pass needs no lookup in the mesh's
/// cache.
pub(in crate::dtensor) fn find_step_plan(
    mesh: &DeviceMesh,
    program: &DerivativeProgram,
    step: usize,
    ins: &[&Rc<TensorMeta>],
) -> Result<Rc<CallPlan>> {
    let StepPlans(plans) = program.plans.of();
    let mut plans = plans.borrow_mut();
    if plans.len() <= step {
        plans.resize(program.steps.len(), Weak::new());
    }
    CallPlan::find_known(&mut plans[step], mesh, &*program.steps[step].op, ins)
}
