//! The lineage of tensors that are made from nothing. That of an operator's results follows from its operands'
//! ([`CallPlan::lineage`](super::call_plan::CallPlan::lineage)).

use std::hash::{Hash, Hasher};

use rustc_hash::FxHasher;

use super::tensor_meta::TensorMeta;
use crate::comm::Lineage;
use crate::tensor::Scalar;

/// Returns the lineage of a tensor that a method makes from nothing, given the numbers that it was asked for.
pub(super) fn lineage_of_new(verb: &'static str, meta: &TensorMeta, attributes: &[u64]) -> Lineage {
    let mut hasher = FxHasher::default();
    meta.dtype().hash(&mut hasher);
    meta.shape().hash(&mut hasher);
    attributes.hash(&mut hasher);
    Lineage::made_by(verb, hasher.finish())
}

/// Returns the lineage of a tensor whose elements all have one value.
pub(super) fn lineage_of_full(meta: &TensorMeta, value: Scalar) -> Lineage {
    let value = match value {
        Scalar::Float(x) => [0, x.to_bits()],
        Scalar::Integer(x) => [1, x as u64],
    };
    lineage_of_new("full", meta, &value)
}
