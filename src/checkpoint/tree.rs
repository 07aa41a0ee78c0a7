//! The tree of a checkpoint: tensors and values by name.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::nn::Params;

/// Named tensors and values, to be saved or loaded together.
///
/// ```
/// use isoshard::{checkpoint::CheckpointTree, comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
/// spmd(2, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
///     let mut tree = CheckpointTree::new();
///     tree.insert("model.weight", DTensor::zeros(&mesh, DType::F32, [4, 3], "(S0)".parse()?)?)?;
///     tree.insert_value("step", 12)?;
///     assert_eq!(tree.tensor("model.weight").unwrap().shape()[..], [4, 3]);
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Default)]
pub struct CheckpointTree {
    tensors: BTreeMap<String, DTensor>,
    values: BTreeMap<String, Value>,
}

impl CheckpointTree {
    /// Creates an empty tree.
    pub fn new() -> CheckpointTree {
        CheckpointTree::default()
    }

    /// Adds a tensor.
    ///
    /// # Errors
    /// Refuses a name that is taken.
    pub fn insert(&mut self, name: impl Into<String>, x: DTensor) -> Result<()> {
        let name = self.free(name.into())?;
        self.tensors.insert(name, x.detach());
        Ok(())
    }

    /// Adds a value, which is the same on every rank.
    ///
    /// # Errors
    /// Refuses a name that is taken.
    pub fn insert_value(&mut self, name: impl Into<String>, value: impl Into<Value>) -> Result<()> {
        let name = self.free(name.into())?;
        self.values.insert(name, value.into());
        Ok(())
    }

    /// Adds every parameter as `prefix.path`.
    ///
    /// # Errors
    /// Refuses names that are taken.
    pub fn insert_params(&mut self, prefix: &str, params: &Params) -> Result<()> {
        params
            .ids()
            .try_for_each(|id| self.insert(format!("{prefix}.{}", params.path(id)), params.value(id).clone()))
    }

    /// Returns a tensor.
    pub fn tensor(&self, name: &str) -> Option<&DTensor> {
        self.tensors.get(name)
    }

    /// Returns a value.
    pub fn value(&self, name: &str) -> Option<&Value> {
        self.values.get(name)
    }

    /// Returns the tensors with their names, in the order of names.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &DTensor)> {
        self.tensors.iter().map(|(name, x)| (&**name, x))
    }

    pub(super) fn values(&self) -> &BTreeMap<String, Value> {
        &self.values
    }

    fn free(&self, name: String) -> Result<String> {
        if self.tensors.contains_key(&name) || self.values.contains_key(&name) {
            return Err(Error::invalid("checkpoint", "names are unique", format!("{name:?} twice"), ""));
        }
        Ok(name)
    }
}
