//! The backward pass: the gradients of all leaf tensors behind a result.

use super::backward_pass::BackwardPass;
use super::gradients::Gradients;
use crate::dtensor::tensor::dtensor::DTensor;
use crate::dtensor::tensor::lineage::lineage_of_full;
use crate::dtensor::tensor::tape::TapeOutput;
use crate::error::{Error, Result};
use crate::tensor::{Scalar, Tensor};

impl DTensor {
    /// Computes the gradients of this scalar with respect to every leaf tensor ([`DTensor::requires_grad`]) from
    /// which it was computed, and frees the tape: a node's tensors are dropped, or written to by its derivative, as soon as the
    /// node has been visited, if nothing else refers to the node. The scalar keeps its value and loses its history, also if the
    /// pass fails. [`DTensor::backward_keeping`] keeps the tape for a second pass.
    ///
    /// Communicates the moves that the derivatives' operators need, and one redistribution of each gradient to its leaf's
    /// layout if the layouts differ.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let whole = Tensor::from_vec(vec![1.0f32, 2.0, 3.0], [3])?;
    ///     let w = DTensor::distribute(&mesh, &whole, "(S0)")?.requires_grad()?;
    ///     let mut loss = w.mul(&w)?.sum_all()?;
    ///     let gradients = loss.backward()?;
    ///     let gradient = gradients.get(&w).expect("the loss depends on w");
    ///     assert_eq!(gradient.layout().to_string(), "(S0)"); // the leaf's layout
    ///     assert_eq!(gradient.full_tensor()?.to_vec::<f32>()?, [2.0, 4.0, 6.0]);
    ///     assert_eq!(loss.item()?, 14.0);
    ///     assert!(!loss.has_history() && loss.backward().is_err()); // there is no tape any more
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a tensor that has more than one element or no history, and a scope of
    /// [`DeviceMesh::no_sync`](crate::dtensor::DeviceMesh::no_sync) in exact mode; returns an error if communication fails.
    pub fn backward(&mut self) -> Result<Gradients> {
        let mut gradients = Gradients::default();
        self.backward_into(&mut gradients)?;
        Ok(gradients)
    }

    /// Computes the gradients as [`DTensor::backward`] does and keeps the tape, so that further passes can follow; PyTorch's
    /// `retain_graph=True`. Takes the memory of all that the forward pass has kept. The other passes keep the tape of a tensor
    /// that is cloned first.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let w = DTensor::full(&mesh, DType::F32, [3], "(S0)", 2.0)?.requires_grad()?;
    ///     let mut loss = w.mul(&w)?.sum_all()?;
    ///     for gradients in [loss.backward_keeping()?, loss.backward()?] {
    ///         assert_eq!(gradients.get(&w).expect("a leaf").full_tensor()?.to_vec::<f32>()?, [4.0; 3]);
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`DTensor::backward`].
    pub fn backward_keeping(&self) -> Result<Gradients> {
        self.clone().backward()
    }

    /// Runs [`DTensor::backward`] for a tensor of any shape, given the gradient of the final result with respect to
    /// this tensor.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let w = DTensor::full(&mesh, DType::F32, [4], "(S0)", 3.0)?.requires_grad()?;
    ///     let mut y = w.mul(&w)?;
    ///     let dy = DTensor::full(&mesh, DType::F32, [4], "(S0)", 10.0)?;
    ///     let gradients = y.backward_from(dy)?;
    ///     assert_eq!(gradients.get(&w).expect("a leaf").full_tensor()?.to_vec::<f32>()?, [60.0; 4]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a `grad` of another shape, dtype or mesh, a tensor without history, and a scope of
    /// [`DeviceMesh::no_sync`](crate::dtensor::DeviceMesh::no_sync) in exact mode; returns an error if communication fails.
    pub fn backward_from(&mut self, grad: DTensor) -> Result<Gradients> {
        let mut gradients = Gradients::default();
        self.add_gradients(grad, &mut gradients)?;
        Ok(gradients)
    }

    /// Runs [`DTensor::backward`] and adds the gradients to those in `gradients`: gradient accumulation over
    /// micro-batches.
    ///
    /// Communicates what [`DTensor::backward`] does. In a scope of [`DeviceMesh::no_sync`](crate::dtensor::DeviceMesh::no_sync), in
    /// fast mode and with groups, gradients stay unreduced; the next call outside such a scope reduces them all, also those
    /// of leaves that it does not reach. Exact mode refuses a pass in such a scope.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh, Gradients}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let w = DTensor::full(&mesh, DType::F32, [2], "(R)", 1.0)?.requires_grad()?;
    ///     let mut gradients = Gradients::default();
    ///     for factor in [2.0, 3.0] {
    ///         w.mul_scalar(factor)?.sum_all()?.backward_into(&mut gradients)?;
    ///     }
    ///     assert_eq!(gradients.get(&w).expect("a leaf").local().to_vec::<f32>()?, [5.0, 5.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`DTensor::backward`] refuses, and then leaves `gradients` as they were; returns an error if
    /// communication fails, or with groups if unreduced gradients of an earlier micro-batch have other shapes or layouts,
    /// and then leaves them empty.
    pub fn backward_into(&mut self, gradients: &mut Gradients) -> Result<()> {
        self.add_gradients(one_of_scalar("backward", self)?, gradients)
    }

    /// Adds the gradients of the sum of several scalars, such as a loss and a penalty, to those in `gradients`, in one
    /// backward pass: what they share is differentiated once, and each gradient reduced once. The scalars may differ in dtype
    /// and layout.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh, Gradients}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let w = DTensor::full(&mesh, DType::F32, [2], "(S0)", 3.0)?.requires_grad()?;
    ///     let shared = w.mul(&w)?;
    ///     let (mut loss, mut penalty) = (shared.sum_all()?, shared.mul_scalar(0.5)?.sum_all()?);
    ///     let mut gradients = Gradients::default();
    ///     DTensor::backward_all(&mut [&mut loss, &mut penalty], &mut gradients)?;
    ///     assert_eq!(gradients.get(&w).expect("a leaf").full_tensor()?.to_vec::<f32>()?, [9.0; 2]); // 2 w + w
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an empty list, scalars on several meshes, and what [`DTensor::backward_into`] refuses; a refused call keeps all
    /// tapes.
    pub fn backward_all(losses: &mut [&mut DTensor], gradients: &mut Gradients) -> Result<()> {
        let Some(first) = losses.first() else {
            return Err(Error::invalid("backward", "wants losses", "none", ""));
        };
        let mesh = first.mesh.clone();
        if let Some(other) = losses.iter().find(|loss| !loss.mesh.same(&mesh)) {
            let given = format!("{} and {}", first.spec(), other.spec());
            return Err(Error::sharding("backward", "losses are on one mesh", given, "run a pass per mesh"));
        }
        let grad = |loss: &&mut DTensor| {
            let grad = one_of_scalar("backward", loss)?;
            expect_history("backward", loss, &grad)?;
            Ok(grad)
        };
        let grads = losses.iter().map(grad).collect::<Result<Vec<_>>>()?;
        mesh.expect_keeps_gradients(losses.iter().filter_map(|loss| loss.history.as_ref()))?;
        let roots =
            losses.iter_mut().zip(grads).filter_map(|(loss, grad)| Some((loss.take_history()?, grad)));
        BackwardPass::add_gradients_of_leaves(&mesh, roots.collect(), gradients)
    }

    fn add_gradients(&mut self, grad: DTensor, gradients: &mut Gradients) -> Result<()> {
        self.mesh.expect_keeps_gradients([expect_history("backward", self, &grad)?])?;
        let grad = DTensor { history: None, ..grad };
        let roots = self.take_history().into_iter().map(|output| (output, grad.clone())).collect();
        BackwardPass::add_gradients_of_leaves(&self.mesh, roots, gradients)
    }

    /// Returns the history, which the tensor loses.
    fn take_history(&mut self) -> Option<TapeOutput> {
        self.freed = true;
        self.history.take()
    }
}

/// Returns the gradient of a scalar with respect to itself, or an error of `verb` if `x` is no scalar.
pub(in crate::dtensor) fn one_of_scalar(verb: &str, x: &DTensor) -> Result<DTensor> {
    if x.shape().numel() != 1 {
        return Err(Error::invalid(verb, "wants one element", x.spec().to_string(), "sum it first"));
    }
    let meta = x.mesh.replicated(&x.meta)?;
    let local = Tensor::full_on(x.mesh.device(), x.dtype(), meta.local_shape(), 1.0)?;
    let lineage = lineage_of_full(&meta, Scalar::Float(1.0));
    Ok(DTensor::wrap(&x.mesh, local, meta, lineage))
}

/// Returns the history of `x`. Refuses a `grad` of another shape, dtype or mesh, and an `x` without history.
pub(in crate::dtensor) fn expect_history<'a>(
    verb: &str,
    x: &'a DTensor,
    grad: &DTensor,
) -> Result<&'a TapeOutput> {
    if grad.dtype() != x.dtype() || grad.shape() != x.shape() || !grad.mesh.same(&x.mesh) {
        let given = format!("{} for {}", grad.spec(), x.spec());
        return Err(Error::invalid(verb, "the gradient does not fit", given, ""));
    }
    x.history.as_ref().ok_or_else(|| {
        if x.freed {
            let rule = "an earlier pass has freed this tensor's tape";
            let remedy = "call backward_keeping for all passes but the last";
            return Error::invalid(verb, rule, x.spec().to_string(), remedy);
        }
        let rule = "this tensor does not depend on a leaf that requires a gradient";
        let remedy = "call requires_grad() on a leaf, outside no_grad() and Forward::eval";
        Error::invalid(verb, rule, x.spec().to_string(), remedy)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{DryRun, spmd};
    use crate::dtensor::DeviceMesh;
    use crate::placement::Layout;
    use crate::tensor::DType;

    /// A sum of functions of `x`, whose operands the tape keeps for the backward pass.
    fn loss(x: &DTensor) -> Result<DTensor> {
        (0..12).try_fold(x.clone(), |y, _| y.gelu())?.sum_all()
    }

    #[test]
    fn a_pass_that_frees_the_tape_has_the_same_bits() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
            let whole = Tensor::build([37], |out: &mut [f32]| {
                out.iter_mut().zip(1..).for_each(|(x, i)| *x = (i as f32).sin() * 3.0)
            });
            let x = DTensor::distribute(&mesh, &whole, "(S0)")?.requires_grad()?;
            let of = |gradients: &Gradients| gradients.get(&x).expect("a leaf").local().to_vec::<f32>();
            let mut loss = loss(&x)?;
            let mut freed = Gradients::default();
            let kept = of(&loss.backward_keeping()?)?;
            assert_eq!(of(&loss.backward_keeping()?)?, kept, "the tape is kept");
            let mut other = loss.clone();
            loss.backward_into(&mut freed)?;
            assert_eq!(of(&freed)?, kept);
            assert_eq!(of(&other.backward()?)?, kept, "what another tensor refers to is kept");
            let refused = loss.backward().unwrap_err().to_string();
            let told = "backward: an earlier pass has freed this tensor's tape; got f32[]@(dp:";
            assert!(refused.starts_with(told), "{refused}");
            assert!(loss.backward_keeping().unwrap_err().to_string().starts_with(told));
            let never = loss.detach().backward().unwrap_err().to_string();
            assert!(never.contains("does not depend on a leaf"), "{never}");
            assert_eq!(of(&freed)?, kept);
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }

    /// Gradients take the places of the values that the forward pass has kept.
    #[test]
    fn a_pass_that_frees_the_tape_needs_little_further_memory() {
        const FACTORS: usize = 12;
        let tensor = 4 << 18;
        let further = |frees: bool| -> Result<usize> {
            let dry = DryRun::new(1, 0)?;
            let mesh = DeviceMesh::new(&dry.rank()?, &[])?;
            let of = |_| DTensor::zeros(&mesh, DType::F32, [1 << 18], Layout::replicated(0))?.requires_grad();
            let factors = (0..FACTORS).map(of).collect::<Result<Vec<_>>>()?;
            let mut loss =
                factors[1..].iter().try_fold(factors[0].clone(), |y, factor| y.mul(factor))?.sum_all()?;
            let forward = dry.report().peak_bytes;
            let _gradients = if frees { loss.backward()? } else { loss.backward_keeping()? };
            Ok(dry.report().peak_bytes - forward)
        };
        let [kept, freed] = [false, true].map(|frees| further(frees).unwrap());
        assert!(kept >= (FACTORS - 1) * tensor && freed <= 3 * tensor, "{kept} and {freed} bytes");
    }
}
