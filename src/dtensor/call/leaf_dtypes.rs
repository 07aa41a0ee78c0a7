//! Leaf tensors in the dtype that modules compute in.

use super::check_results::check_results;
use super::dispatch::{observe, plan_for};
use crate::dtensor::tensor::dtensor::DTensor;
use crate::error::Result;
use crate::ops::Cast;
use crate::tensor::{DType, Tensor};

impl DTensor {
    /// Returns this leaf tensor in `dtype`, given its local tensor in that dtype if the caller has it.
    ///
    /// To the tape the result is the leaf itself, as a redistributed tensor is: the gradient of each use arrives at the leaf
    /// in `dtype`, and is added there in the leaf's own. So the sum does not depend on how often the leaf is rounded. A
    /// [cast](DTensor::cast) that a program writes is a call, whose result has one gradient, in the result's dtype.
    pub(crate) fn leaf_in(&self, dtype: DType, local: Option<Tensor>) -> Result<DTensor> {
        debug_assert!(
            self.history.as_ref().is_none_or(|of| of.node.call.is_none()),
            "{} is a leaf",
            self.spec()
        );
        let _guard = self.mesh.no_grad();
        let rounded = match local {
            Some(local) => self.cast_from(dtype, local)?,
            None => self.cast(dtype)?,
        };
        Ok(DTensor { history: self.history.clone(), lineage: self.lineage, ..rounded })
    }

    /// Returns [`DTensor::cast`] without history, given its local tensor.
    fn cast_from(&self, dtype: DType, local: Tensor) -> Result<DTensor> {
        let op = Cast { dtype };
        let plan = plan_for(&op, &[self])?;
        if plan.moves.iter().any(Option::is_some) || plan.nodes.is_some() {
            return self.cast(dtype);
        }
        observe(&self.mesh, &op, &plan);
        check_results(&op, &plan, std::slice::from_ref(&local))?;
        Ok(DTensor::wrap(&self.mesh, local, plan.outs[0].clone(), self.lineage))
    }
}
