//! Dispatch: one operator on distributed operands.
//!
//! Facts -> plan (cached) -> moves -> local kernel -> results, and a tape node if a gradient is wanted. Nothing here
//! knows any operator.

use smallvec::SmallVec;

use super::plan::Plan;
use super::tape;
use super::tensor::DTensor;
use crate::error::{Error, Result};
use crate::ops::{Op, Tensors};

/// A few distributed tensors.
pub(super) type DTensors = SmallVec<[DTensor; 3]>;

impl DTensor {
    /// Applies any operator, the caller's own included. Operands move where the operator's rows ask for it.
    ///
    /// # Errors
    /// What the operator refuses; operands on different meshes; in strict mode, operands that would have to move.
    pub fn apply(op: &dyn Op, ins: &[&DTensor]) -> Result<DTensors> {
        let plan = plan_for(op, ins)?;
        let mut moved: SmallVec<[Option<DTensor>; 3]> = SmallVec::new();
        for (x, m) in ins.iter().zip(&plan.moves) {
            moved.push(match m {
                None => None,
                Some((m, to)) => Some(DTensor::wrap(&x.mesh, m.run(&x.mesh, x.local.clone())?, to.clone())),
            });
        }
        let mut locals: Tensors =
            ins.iter().zip(&moved).map(|(x, m)| m.as_ref().unwrap_or(x).local.clone()).collect();
        let outs = execute(op, &plan, ins[0], &mut locals)?;
        drop(locals);
        tape::record(op, &plan, ins, &moved, outs)
    }

    /// Applies an operator that has one result.
    ///
    /// # Errors
    /// As [`DTensor::apply`].
    pub fn apply_one(op: &dyn Op, ins: &[&DTensor]) -> Result<DTensor> {
        Ok(Self::apply(op, ins)?.swap_remove(0))
    }

    /// Applies an operator to operands that are given up, so that its kernel may reuse their buffers. Keeps no history.
    ///
    /// # Errors
    /// As [`DTensor::apply`].
    pub fn apply_owned(op: &dyn Op, ins: DTensors) -> Result<DTensors> {
        let plan = plan_for(op, &ins.iter().collect::<SmallVec<[&DTensor; 4]>>())?;
        let like = ins[0].hollow();
        let mut locals = Tensors::new();
        for (x, m) in ins.into_iter().zip(&plan.moves) {
            locals.push(match m {
                None => x.local,
                Some((m, _)) => m.run(&x.mesh, x.local)?,
            });
        }
        execute(op, &plan, &like, &mut locals)
    }

    /// A stand-in with the facts and mesh of this tensor and none of its data.
    pub(crate) fn hollow(&self) -> DTensor {
        DTensor {
            local: crate::tensor::Tensor::zeros(self.local.dtype(), [0]),
            facts: self.facts.clone(),
            mesh: self.mesh.clone(),
            edge: None,
            origin: None,
        }
    }
}

fn plan_for(op: &dyn Op, ins: &[&DTensor]) -> Result<std::rc::Rc<Plan>> {
    let first = ins.first().ok_or_else(|| Error::invalid(op.name(), "wants operands", "none", ""))?;
    if let Some(other) = ins.iter().find(|x| !x.mesh.same(&first.mesh)) {
        return Err(Error::sharding(
            op.name(),
            "the operands live on different meshes",
            format!("{first} on {}, {other} on {}", first.mesh.mesh(), other.mesh.mesh()),
            "make both on one DeviceMesh",
        ));
    }
    let facts: SmallVec<[_; 4]> = ins.iter().map(|x| &x.facts).collect();
    Plan::find(&first.mesh, op, &facts)
}

fn execute(op: &dyn Op, plan: &Plan, like: &DTensor, locals: &mut Tensors) -> Result<DTensors> {
    let outs = op.eval(locals, &plan.windows)?;
    debug_assert_eq!(outs.len(), plan.outs.len(), "{}", op.name());
    Ok(outs.into_iter().zip(&plan.outs).map(|(t, f)| DTensor::wrap(&like.mesh, t, f.clone())).collect())
}
