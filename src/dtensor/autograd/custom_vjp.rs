//! Functions with a derivative that the caller writes.

use std::rc::Rc;

use smallvec::SmallVec;

use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::plan::gradient_needs::GradientNeeds;
use crate::dtensor::tensor::dtensor::DTensor;
use crate::dtensor::tensor::saved::Saved;
use crate::dtensor::tensor::tape::{
    CallDerivative, CustomDerivative, SavedTensorOrigin, TapeCall, TapeNode, TapeOutput,
};
use crate::error::{Error, Result};

impl DTensor {
    /// Computes a function of `operands` whose derivative is `backward`, as `jax.custom_vjp` and PyTorch's
    /// `autograd.Function` do. Returns the function's results.
    ///
    /// `forward` is called at once, with the operands. Its operations are not recorded. It returns the results, and the
    /// tensors that the derivative needs. `backward` is called in each backward pass, with the saved tensors and the
    /// gradients of all results (zeros if a result has none), and returns one gradient per operand, or `None` if the
    /// gradient is zero. A gradient has its operand's shape and dtype, and any layout. The name stands in errors.
    ///
    /// If the pass is recorded ([`DTensor::grad`]), the operations of `backward` are too, so its derivative follows from
    /// them. The saved operands and results then have their history. Any other saved tensor of floats has an unknown
    /// one, so a recorded pass refuses it. A tensor that a closure captures is a constant to `forward`.
    ///
    /// This example computes `ln(1 + eˣ)`. The derivative that follows from the formula would be `∞ / ∞` for large x.
    ///
    /// ```
    /// use isoshard::{Result, comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// fn log1pexp(x: &DTensor) -> Result<DTensor> {
    ///     let forward = |ins: &[DTensor]| {
    ///         let x = &ins[0];
    ///         let y = x.abs()?.neg()?.exp()?.log1p()?.add(&x.relu()?)?;
    ///         Ok((vec![y], vec![x.clone()]))
    ///     };
    ///     let backward =
    ///         |saved: &[DTensor], grads: &[DTensor]| Ok(vec![Some(saved[0].sigmoid()?.mul(&grads[0])?)]);
    ///     Ok(DTensor::custom_vjp("log1pexp", &[x], forward, backward)?.remove(0))
    /// }
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let whole = Tensor::from_vec(vec![0.0, 1000.0], [2])?;
    ///     let x = DTensor::distribute(&mesh, &whole, "(S0)")?.requires_grad()?;
    ///     let dx = log1pexp(&x)?.sum_all()?.grad(&[&x])?.remove(0);
    ///     assert_eq!(dx.full_tensor()?.to_f64_vec(), [0.5, 1.0]);
    ///     let second = dx.sum_all()?.grad(&[&x])?.remove(0); // that of the sigmoid
    ///     assert_eq!(second.full_tensor()?.to_f64_vec(), [0.25, 0.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses no operands, operands or results on different meshes, and returns the error of `forward`. A backward pass
    /// returns the error of `backward`, and refuses gradients of another number, shape, dtype or mesh than the
    /// operands'. Results and gradients that are replicated and differ between ranks are found in the checking mode
    /// alone ([`DeviceMesh::set_check_replicas`]). Layouts, `None` and errors must be equal on all ranks, too.
    pub fn custom_vjp(
        name: &'static str,
        operands: &[&DTensor],
        forward: impl FnOnce(&[DTensor]) -> Result<(Vec<DTensor>, Vec<DTensor>)>,
        backward: impl Fn(&[DTensor], &[DTensor]) -> Result<Vec<Option<DTensor>>> + 'static,
    ) -> Result<Vec<DTensor>> {
        Self::custom_vjp_of_needed(name, operands, forward, move |saved, grads, _| backward(saved, grads))
    }

    /// Runs [`DTensor::custom_vjp`] for a `backward` that is also told, per operand, if its gradient is needed.
    pub(in crate::dtensor) fn custom_vjp_of_needed(
        name: &'static str,
        operands: &[&DTensor],
        forward: impl FnOnce(&[DTensor]) -> Result<(Vec<DTensor>, Vec<DTensor>)>,
        backward: impl Fn(&[DTensor], &[DTensor], &GradientNeeds<'_>) -> Result<Vec<Option<DTensor>>> + 'static,
    ) -> Result<Vec<DTensor>> {
        let Some(first) = operands.first() else {
            return Err(Error::invalid(name, "wants operands", "none", ""));
        };
        let mesh = &first.mesh;
        expect_mesh(name, "the operands are on one mesh", mesh, operands.iter().copied())?;
        let ins: Vec<DTensor> = operands.iter().map(|x| x.detach()).collect();
        let (results, saved) = {
            let _guard = mesh.no_grad();
            let all =
                |(results, _): &(Vec<DTensor>, Vec<DTensor>)| results.iter().cloned().map(Some).collect();
            mesh.check_own_code(name, "result", forward(&ins), all)?
        };
        expect_mesh(name, "the results are on the operands' mesh", mesh, &results)?;
        let mut results: Vec<DTensor> =
            results.into_iter().map(|y| DTensor { history: None, origin: None, ..y }).collect();
        let recorded =
            operands.iter().any(|x| x.has_history()) && results.iter().any(|y| y.dtype().is_float());
        if !mesh.grad_enabled() || !recorded {
            return Ok(results);
        }
        let same = |a: &DTensor, b: &DTensor| a.meta == b.meta && a.local.is_same_view(&b.local);
        let keep = |x: DTensor| {
            let mut alike = (0..ins.len()).filter(|&i| same(&ins[i], &x));
            if let Some(i) = alike.next() {
                // Operands that share their elements may have different histories, and nothing tells them apart.
                if !alike.all(|other| operands[i].has_history_of(operands[other])) {
                    return (Saved::Kept(x.detach()), SavedTensorOrigin::Intermediate);
                }
                let saved = ins[i].origin.clone().map(Saved::Again);
                return (saved.unwrap_or(Saved::Kept(x.detach())), SavedTensorOrigin::Operand(i));
            }
            let result = results.iter().position(|y| same(y, &x));
            let from = result.map_or(SavedTensorOrigin::Intermediate, SavedTensorOrigin::Result);
            (Saved::Kept(x.detach()), from)
        };
        let custom = CustomDerivative {
            name,
            backward: Box::new(backward),
            saved: saved.into_iter().map(keep).collect(),
            ins: operands.iter().map(|x| x.meta.clone()).collect(),
        };
        let call = TapeCall {
            inputs: operands.iter().map(|x| x.history.clone()).collect(),
            derivative: CallDerivative::Custom(Box::new(custom)),
        };
        let outs = results.iter().map(|y| y.meta.clone()).collect();
        let node = TapeNode::new(outs, Some(call));
        for (out, y) in results.iter_mut().enumerate().filter(|(_, y)| y.dtype().is_float()) {
            y.history = Some(TapeOutput { node: node.clone(), out });
        }
        Ok(results)
    }
}

impl CustomDerivative {
    /// Returns the operands' gradients, given those of all results of `node`. `needed` tells, per operand, if its gradient
    /// is used.
    pub fn run(
        &self,
        node: &Rc<TapeNode>,
        inputs: &[Option<TapeOutput>],
        grads: &[DTensor],
        needs: &GradientNeeds<'_>,
    ) -> Result<SmallVec<[Option<DTensor>; 4]>> {
        let mesh = grads[0].mesh();
        let saved = |(saved, from): &(Saved, SavedTensorOrigin)| {
            let x = saved.value()?;
            if !mesh.grad_enabled() {
                return Ok(x);
            }
            let history = match *from {
                SavedTensorOrigin::Operand(i) => inputs[i].clone(),
                SavedTensorOrigin::Result(out) if x.dtype().is_float() => {
                    Some(TapeOutput { node: node.clone(), out })
                }
                SavedTensorOrigin::Intermediate if x.dtype().is_float() => {
                    let rule = "a backward pass that is recorded needs the history of saved tensors, \
                                and only operands and results have one";
                    let remedy = "save operands or results (operands that share their elements cannot be told apart), and \
                                  compute this tensor in the backward function; or call grad under no_grad, if its \
                                  result is not differentiated again";
                    return Err(Error::unsupported(self.name, rule, x.spec().to_string(), remedy));
                }
                SavedTensorOrigin::Result(_) | SavedTensorOrigin::Intermediate => None,
            };
            Ok(DTensor { history, origin: saved.origin_of_recorded(), ..x })
        };
        let saved = self.saved.iter().map(saved).collect::<Result<Vec<_>>>()?;
        let made = (self.backward)(&saved, grads, needs);
        let found = mesh.check_own_code(self.name, "the gradient of operand", made, |found| found.clone())?;
        if found.len() != self.ins.len() {
            let given = format!("{} for {} operand(s)", found.len(), self.ins.len());
            let rule = "the backward function returns one gradient per operand";
            return Err(Error::invalid(self.name, rule, given, "return None for a gradient that is zero"));
        }
        for (i, (grad, operand)) in found.iter().zip(&self.ins).enumerate() {
            let Some(grad) = grad else { continue };
            expect_mesh(self.name, "the gradients are on the operands' mesh", mesh, [grad])?;
            if grad.meta() != operand.meta() {
                let rule = format!("the gradient of operand {i} has the operand's shape and dtype");
                let given = format!("{} for {}", grad.meta(), operand.meta());
                return Err(Error::invalid(self.name, rule, given, "sum it, or cast it"));
            }
        }
        Ok(found.into_iter().collect())
    }
}

impl DTensor {
    /// Returns true if both tensors have the same history, or none.
    fn has_history_of(&self, other: &DTensor) -> bool {
        match (&self.history, &other.history) {
            (Some(one), Some(other)) => Rc::ptr_eq(&one.node, &other.node) && one.out == other.out,
            (None, None) => true,
            _ => false,
        }
    }
}

/// Refuses tensors on another mesh.
fn expect_mesh<'a>(
    name: &str,
    rule: &str,
    mesh: &DeviceMesh,
    tensors: impl IntoIterator<Item = &'a DTensor>,
) -> Result<()> {
    match tensors.into_iter().find(|x| !x.mesh.same(mesh)) {
        None => Ok(()),
        Some(other) => {
            let given = format!("{} beside {}", other.mesh.mesh(), mesh.mesh());
            Err(Error::sharding(name, rule, given, "make all on one DeviceMesh"))
        }
    }
}
