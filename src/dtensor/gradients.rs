//! The gradients that a backward pass computes.

use std::fmt;

use rustc_hash::FxHashMap;

use super::tensor::DTensor;
use crate::error::{Error, Result};
use crate::ops::Add;

/// The gradients of a backward pass, by leaf tensor.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
/// spmd(2, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
///     let w = DTensor::full(&mesh, DType::F32, [4], 1.0, "(S0)".parse()?)?.requires_grad()?;
///     let unused = w.detach().requires_grad()?;
///     let gradients = w.sum_all()?.backward()?;
///     assert!(gradients.get(&w).is_some() && gradients.get(&unused).is_none());
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Default)]
pub struct Gradients(pub(super) FxHashMap<u64, DTensor>);

impl Gradients {
    /// Returns the gradient of `leaf`, in its layout, or `None` if the result did not depend on it.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let w = DTensor::full(&mesh, DType::F32, [2], 1.0, "(R)".parse()?)?.requires_grad()?;
    ///     let gradients = w.mul_scalar(5.0)?.sum_all()?.backward()?;
    ///     assert_eq!(gradients.get(&w).expect("a leaf").local().to_vec::<f32>()?, [5.0, 5.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn get(&self, leaf: &DTensor) -> Option<&DTensor> {
        self.0.get(&leaf.history.as_ref()?.node.id)
    }

    /// Removes and returns the gradient of `leaf`, if it has one.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let w = DTensor::full(&mesh, DType::F32, [2], 1.0, "(R)".parse()?)?.requires_grad()?;
    ///     let mut gradients = w.sum_all()?.backward()?;
    ///     assert!(gradients.take(&w).is_some() && gradients.take(&w).is_none());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn take(&mut self, leaf: &DTensor) -> Option<DTensor> {
        self.0.remove(&leaf.history.as_ref()?.node.id)
    }

    /// Sets the gradient of `leaf`: puts back one that [`Gradients::take`] removed, or replaces it.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let w = DTensor::full(&mesh, DType::F32, [2], 1.0, "(R)".parse()?)?.requires_grad()?;
    ///     let mut gradients = w.mul_scalar(8.0)?.sum_all()?.backward()?;
    ///     let clipped = gradients.take(&w).expect("a leaf").mul_scalar(0.5)?;
    ///     gradients.put(&w, clipped)?;
    ///     assert_eq!(gradients.get(&w).expect("put").local().to_vec::<f32>()?, [4.0, 4.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a `leaf` without history, and a `grad` whose dtype, shape, layout or mesh is not the leaf's.
    pub fn put(&mut self, leaf: &DTensor, grad: DTensor) -> Result<()> {
        let Some(output) = &leaf.history else {
            let (rule, remedy) = ("the tensor has no history", "pass a leaf that requires a gradient");
            return Err(Error::invalid("put", rule, leaf.spec().to_string(), remedy));
        };
        if grad.tensor_meta() != leaf.tensor_meta() {
            let rule = "a gradient has its leaf's dtype, shape, layout and mesh";
            return Err(Error::invalid(
                "put",
                rule,
                format!("{} for {}", grad.spec(), leaf.spec()),
                "redistribute it first",
            ));
        }
        self.0.insert(output.node.id, grad);
        Ok(())
    }

    /// Adds the gradients of another backward pass to these: gradient accumulation.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let w = DTensor::full(&mesh, DType::F32, [2], 1.0, "(R)".parse()?)?.requires_grad()?;
    ///     let mut gradients = w.mul_scalar(2.0)?.sum_all()?.backward()?; // first micro-batch
    ///     gradients.merge(w.mul_scalar(3.0)?.sum_all()?.backward()?)?; // second micro-batch
    ///     assert_eq!(gradients.get(&w).expect("a leaf").local().to_vec::<f32>()?, [5.0, 5.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the sum of two gradients fails on a device.
    pub fn merge(&mut self, other: Gradients) -> Result<()> {
        for (id, g) in other.0 {
            let sum = match self.0.remove(&id) {
                Some(mine) => add(mine, g)?,
                None => g,
            };
            self.0.insert(id, sum);
        }
        Ok(())
    }
}

impl fmt::Debug for Gradients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.0.iter().map(|(id, g)| (id, g.spec().to_string()))).finish()
    }
}

/// Returns `a + b`, reusing a buffer that no other tensor shares.
pub(super) fn add(a: DTensor, b: DTensor) -> Result<DTensor> {
    Ok(DTensor::apply_owned(&Add, &mut [a, b].into())?.remove(0))
}
