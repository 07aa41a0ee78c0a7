//! The gradients that a backward pass computes.

use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;

use rustc_hash::FxHashMap;

use super::gradient_sum::{add, add_to};
use super::kept_parts::KeptParts;
use super::partial_queue::reduce_by_unit;
use crate::comm::{Phase, operator_scope};
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::tensor::dtensor::DTensor;
use crate::dtensor::tensor::tape::TapeNode;
use crate::error::{Error, Result};
use crate::tensor::sort_by_key;

/// The gradients of a backward pass, by leaf tensor.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
/// spmd(2, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
///     let w = DTensor::full(&mesh, DType::F32, [4], "(S0)", 1.0)?.requires_grad()?;
///     let unused = w.detach().requires_grad()?;
///     let gradients = w.sum_all()?.backward()?;
///     assert!(gradients.get(&w).is_some() && gradients.get(&unused).is_none());
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Default)]
pub struct Gradients {
    by_leaf: FxHashMap<u64, DTensor>,
    /// The leaf tensors whose gradients are unreduced, in the order of their numbers. Every rank makes its leaves in the same
    /// order.
    unreduced: BTreeMap<u64, Rc<TapeNode>>,
    /// The parts of gradients that are summed in groups and not joined yet, in the order of the leaves' numbers.
    parts: BTreeMap<u64, KeptParts>,
}

impl Gradients {
    /// Returns the gradient of `leaf`, or `None` if the result did not depend on it. It has the leaf's layout, unless it
    /// is unreduced ([`DeviceMesh::no_sync`](crate::dtensor::DeviceMesh::no_sync)). Parts of sums in groups that are not joined yet
    /// are no gradient.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let w = DTensor::full(&mesh, DType::F32, [2], "(R)", 1.0)?.requires_grad()?;
    ///     let gradients = w.mul_scalar(5.0)?.sum_all()?.backward()?;
    ///     assert_eq!(gradients.get(&w).expect("a leaf").local().to_vec::<f32>()?, [5.0, 5.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn get(&self, leaf: &DTensor) -> Option<&DTensor> {
        self.by_leaf.get(&leaf.history.as_ref()?.node.id)
    }

    /// Returns true if parts of the gradient of `leaf` are not joined yet.
    pub(crate) fn has_parts(&self, leaf: &DTensor) -> bool {
        leaf.history.as_ref().is_some_and(|output| self.keeps_parts_of(&output.node))
    }

    /// Removes and returns the gradient of `leaf`, if it has one whose parts are joined.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let w = DTensor::full(&mesh, DType::F32, [2], "(R)", 1.0)?.requires_grad()?;
    ///     let mut gradients = w.sum_all()?.backward()?;
    ///     assert!(gradients.take(&w).is_some() && gradients.take(&w).is_none());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn take(&mut self, leaf: &DTensor) -> Option<DTensor> {
        let id = leaf.history.as_ref()?.node.id;
        if self.parts.contains_key(&id) {
            return None;
        }
        self.unreduced.remove(&id);
        self.by_leaf.remove(&id)
    }

    /// Sets the gradient of `leaf`: puts back one that [`Gradients::take`] removed, or replaces it.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let w = DTensor::full(&mesh, DType::F32, [2], "(R)", 1.0)?.requires_grad()?;
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
        if grad.tensor_meta() != output.node.gradient_meta() {
            let rule = "a gradient has its leaf's dtype, shape, layout and mesh";
            return Err(Error::invalid(
                "put",
                rule,
                format!("{} for {}", grad.spec(), output.node.gradient_meta().spec()),
                "redistribute it first",
            ));
        }
        self.unreduced.remove(&output.node.id);
        self.parts.remove(&output.node.id);
        self.by_leaf.insert(output.node.id, grad);
        Ok(())
    }

    /// Puts back a gradient that [`Gradients::take`] returned for `leaf`.
    /// Replaces the gradients of `leaves` by what `f` makes of them, without a history and in their layouts. Communicates nothing if
    /// `f` is of operators on single elements.
    pub(crate) fn map_of<'a>(
        &mut self,
        leaves: impl Iterator<Item = &'a DTensor>,
        f: impl Fn(&DTensor) -> Result<DTensor>,
    ) -> Result<()> {
        for leaf in leaves {
            let Some(grad) = self.get(leaf) else { continue };
            let (_no_grad, _keep) = (grad.mesh().no_grad(), grad.mesh().keep_layouts());
            let new = f(grad)?.redistribute(grad.layout())?;
            self.put(leaf, new)?;
        }
        Ok(())
    }

    pub(crate) fn put_back(&mut self, leaf: &DTensor, grad: DTensor) {
        if let Some(output) = &leaf.history {
            self.store(&output.node, grad);
        }
    }

    /// Returns true if the gradient of a leaf is unreduced.
    pub(in crate::dtensor) fn has_part_of(&self, leaf: &TapeNode) -> bool {
        self.unreduced.contains_key(&leaf.id)
    }

    /// Removes and returns the gradient of a leaf.
    pub(in crate::dtensor) fn remove(&mut self, leaf: &TapeNode) -> Option<DTensor> {
        self.unreduced.remove(&leaf.id);
        self.by_leaf.remove(&leaf.id)
    }

    /// Stores the gradient of a leaf, in the leaf's layout or unreduced.
    pub(in crate::dtensor) fn store(&mut self, leaf: &Rc<TapeNode>, grad: DTensor) {
        let layout = leaf.gradient_meta().layout();
        if grad.layout().has_partial() && grad.layout() != layout {
            self.unreduced.insert(leaf.id, leaf.clone());
        }
        self.by_leaf.insert(leaf.id, grad);
    }

    /// Returns true if parts of a leaf's gradient are kept.
    pub(in crate::dtensor) fn keeps_parts_of(&self, leaf: &TapeNode) -> bool {
        self.parts.contains_key(&leaf.id)
    }

    /// Adds the parts of a leaf's gradient to those that are kept.
    pub(in crate::dtensor) fn keep_parts(&mut self, leaf: &Rc<TapeNode>, parts: DTensor) -> Result<()> {
        self.parts.entry(leaf.id).or_insert_with(|| KeptParts::new(leaf)).add(parts)
    }

    /// Begins another backward pass, whose gradients are added.
    pub(in crate::dtensor) fn begin_pass(&mut self) {
        self.parts.values_mut().for_each(KeptParts::begin_pass);
    }

    /// Reduces the unreduced gradients of all leaves, in the same order on every rank.
    pub(in crate::dtensor) fn reduce(&mut self, mesh: &DeviceMesh) -> Result<()> {
        if self.parts.is_empty() && self.unreduced.is_empty() {
            return Ok(());
        }
        let _label = operator_scope("backward");
        let (mut ids, mut joined) = (Vec::new(), Vec::new());
        for (id, parts) in std::mem::take(&mut self.parts) {
            for grad in parts.joined(mesh)? {
                ids.push((id, true));
                joined.push(grad);
            }
        }
        for (id, leaf) in std::mem::take(&mut self.unreduced) {
            let Some(grad) = self.by_leaf.remove(&id) else { continue };
            ids.push((id, false));
            joined.push((leaf, grad));
        }
        for ((id, is_part), grad) in ids.into_iter().zip(reduce_by_unit(mesh, joined)?) {
            let sum = if is_part { add_to(self.by_leaf.remove(&id), grad)? } else { grad };
            self.by_leaf.insert(id, sum);
        }
        Ok(())
    }

    /// Adds the gradients of another backward pass to these: gradient accumulation. [`DTensor::backward_into`] does so
    /// too, and communicates less in fast mode ([`DeviceMesh::no_sync`](crate::dtensor::DeviceMesh::no_sync)).
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let w = DTensor::full(&mesh, DType::F32, [2], "(R)", 1.0)?.requires_grad()?;
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
        // A sum may communicate: every rank adds in the order of the leaves' numbers.
        // Parts and a reduced gradient are reduced, as an unreduced gradient and a reduced one are.
        let ends = |one: &Gradients, parts: &Gradients| -> Vec<u64> {
            let joins = |id: &&u64| one.by_leaf.contains_key(id) && !one.parts.contains_key(id);
            parts.parts.keys().filter(joins).copied().collect()
        };
        let mut joined: Vec<u64> = ends(self, &other).into_iter().chain(ends(&other, self)).collect();
        joined.sort_unstable();
        for (id, parts) in other.parts {
            match self.parts.get_mut(&id) {
                Some(mine) => mine.merge(parts)?,
                None => drop(self.parts.insert(id, parts)),
            }
        }
        let mut by_leaf: Vec<(u64, DTensor)> = other.by_leaf.into_iter().collect();
        sort_by_key(&mut by_leaf, |(id, _)| *id);
        self.unreduced.extend(other.unreduced);
        for id in joined {
            let Some(parts) = self.parts.remove(&id) else { continue };
            let Some(mesh) = parts.mesh().cloned() else { continue };
            if let Some(grad) = parts.finish(&mesh)? {
                let sum = add_to(self.by_leaf.remove(&id), grad)?;
                self.by_leaf.insert(id, sum);
            }
        }
        for (id, g) in by_leaf {
            let mut sum = match self.by_leaf.remove(&id) {
                Some(mine) => add(mine, g)?,
                None => g,
            };
            // The sum of an unreduced gradient and a reduced one is reduced.
            if !sum.layout().has_partial()
                && let Some(leaf) = self.unreduced.remove(&id)
            {
                let _scope = leaf.path.enter_in(Phase::Backward);
                sum = sum.redistribute(leaf.gradient_meta().layout().clone())?;
            }
            self.by_leaf.insert(id, sum);
        }
        Ok(())
    }
}

impl fmt::Debug for Gradients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.by_leaf.iter().map(|(id, g)| (id, g.spec().to_string()))).finish()
    }
}
