//! The lineage of tensors, and of those that are made from nothing. That of an operator's results follows from its operands'
//! ([`CallPlan::lineage`](crate::dtensor::plan::call_plan::CallPlan::lineage)).

use std::hash::{Hash, Hasher};

use rustc_hash::FxHasher;

use super::dtensor::DTensor;
use crate::comm::Lineage;
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::tensor::Scalar;

impl DTensor {
    /// Returns the way in which this tensor was made, as calls that move it compare it.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::full(&mesh, DType::F32, [4], "(S0)", 2.0)?;
    ///     assert_eq!(x.exp()?.lineage(), x.exp()?.lineage());
    ///     assert_ne!(x.exp()?.lineage(), x.sqrt()?.lineage());
    ///     assert_eq!(x.redistribute("(R)")?.lineage(), x.lineage());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn lineage(&self) -> Lineage {
        self.lineage
    }

    /// Returns this tensor with the lineage of a parameter: ranks that move it compare the path in place of the operators
    /// that made it.
    pub(crate) fn of_parameter(self, path: &str) -> DTensor {
        self.with_lineage(Lineage::parameter(path))
    }

    /// Returns this tensor with another tensor's lineage, in whose place it is put.
    pub(crate) fn with_lineage(self, lineage: Lineage) -> DTensor {
        DTensor { lineage, ..self }
    }
}

/// Returns the lineage of a tensor that a method makes from nothing, given the numbers that it was asked for.
pub(in crate::dtensor) fn lineage_of_new(
    verb: &'static str,
    meta: &TensorMeta,
    attributes: &[u64],
) -> Lineage {
    let mut hasher = FxHasher::default();
    meta.dtype().hash(&mut hasher);
    meta.shape().hash(&mut hasher);
    attributes.hash(&mut hasher);
    Lineage::made_by(verb, hasher.finish())
}

/// Returns the lineage of a tensor whose elements all have one value.
pub(in crate::dtensor) fn lineage_of_full(meta: &TensorMeta, value: Scalar) -> Lineage {
    let value = match value {
        Scalar::Float(x) => [0, x.to_bits()],
        Scalar::Integer(x) => [1, x as u64],
    };
    lineage_of_new("full", meta, &value)
}
