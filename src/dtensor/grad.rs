//! Gradients of chosen tensors, recorded so that they can be differentiated again.
//!
//! The pass is that of `backward.rs`. Its steps are ordinary calls of operators, so the tape records them as it records
//! the forward pass. Nodes keep operands and results without their history, since a result would otherwise keep its
//! own node alive; a recorded pass restores the history of each from the node's operands and number.

use super::backward::{BackwardPass, expect_history, one_of_scalar};
use super::tensor::{DTensor, TapeOutput};
use crate::comm::operator_scope;
use crate::error::{Error, Result};

impl DTensor {
    /// Returns the gradient of this scalar with respect to each tensor of `wrt`, with history: the gradients can be
    /// differentiated again, by this method or by [`DTensor::backward`]. As PyTorch's
    /// `autograd.grad(create_graph=True)`.
    ///
    /// A tensor of `wrt` may be a leaf or any tensor with history. Its gradient has its shape, dtype and layout; `Partial`
    /// axes become replicated. The gradient is zero if this scalar does not depend on the tensor. The gradient of a function that is linear has no
    /// history, since it is a constant. Under [`DeviceMesh::no_grad`](crate::dtensor::DeviceMesh::no_grad) no gradient has
    /// history.
    ///
    /// Computes only what these gradients need. Communicates as [`DTensor::backward`] does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let whole = Tensor::from_vec(vec![1.0, 2.0, 3.0], [3])?;
    ///     let x = DTensor::distribute(&mesh, &whole, "(S0)".parse()?)?.requires_grad()?;
    ///     let y = x.mul(&x)?.mul(&x)?.sum_all()?; // the sum of x³
    ///     let first = y.grad(&[&x])?.remove(0);
    ///     assert_eq!(first.full_tensor()?.to_f64_vec(), [3.0, 12.0, 27.0]); // 3 x²
    ///     let second = first.sum_all()?.grad(&[&x])?.remove(0);
    ///     assert_eq!(second.full_tensor()?.to_f64_vec(), [6.0, 12.0, 18.0]); // 6 x
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a tensor that has more than one element or no history, a tensor of `wrt` that has no history or is on
    /// another mesh, and an operator whose derivative has no derivative. Returns an error if communication fails.
    pub fn grad(&self, wrt: &[&DTensor]) -> Result<Vec<DTensor>> {
        self.grad_from(&one_of_scalar("grad", self)?, wrt)
    }

    /// Runs [`DTensor::grad`] for a tensor of any shape, given the gradient of the final result with respect to this
    /// tensor. If `grad` has history, so have the results with respect to it.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let full = |value: f64| DTensor::full(&mesh, DType::F64, [3], value, "(S0)".parse()?)?.requires_grad();
    ///     let (x, dy) = (full(2.0)?, full(10.0)?);
    ///     let y = x.mul(&x)?;
    ///     let dx = y.grad_from(&dy, &[&x])?.remove(0); // dy · 2x
    ///     assert_eq!(dx.full_tensor()?.to_f64_vec(), [40.0; 3]);
    ///     // The derivative with respect to the incoming gradient is the product of the Jacobian and a vector.
    ///     let ones = DTensor::full(&mesh, DType::F64, [3], 1.0, "(S0)".parse()?)?;
    ///     assert_eq!(dx.grad_from(&ones, &[&dy])?[0].full_tensor()?.to_f64_vec(), [4.0; 3]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a `grad` of another shape, dtype or mesh, and what [`DTensor::grad`] refuses but for the number of
    /// elements.
    pub fn grad_from(&self, grad: &DTensor, wrt: &[&DTensor]) -> Result<Vec<DTensor>> {
        let root = expect_history("grad", self, grad)?;
        let history = |x: &&'_ DTensor| -> Result<TapeOutput> {
            let rule = match &x.history {
                Some(output) if x.mesh.same(&self.mesh) => return Ok(output.clone()),
                Some(_) => "differentiates with respect to tensors on its own mesh",
                None => "differentiates with respect to tensors with history",
            };
            let remedy = "call requires_grad() on it before it is used";
            Err(Error::invalid("grad", rule, x.spec().to_string(), remedy))
        };
        let outputs = wrt.iter().map(history).collect::<Result<Vec<_>>>()?;
        let found = BackwardPass::find_wanted(&self.mesh, root, grad.clone(), outputs.iter())?;
        let place = |(x, of): (&&DTensor, &TapeOutput)| {
            let layout = x.layout().reduced();
            let Some(Some(grad)) = found.grads.get(&(of.node.id, of.out)) else {
                return DTensor::zeros(&self.mesh, x.dtype(), x.shape(), layout);
            };
            let _label = operator_scope("backward");
            let grad = grad.redistribute(layout)?;
            // A gradient may be a broadcast view; the returned one is contiguous.
            let local = grad.local.contiguous()?;
            Ok(DTensor { local, ..grad })
        };
        wrt.iter().zip(&outputs).map(place).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::device_mesh::DeviceMesh;
    use super::super::dispatch::CALLS;
    use super::*;
    use crate::comm::spmd;
    use crate::ops::{Bits, RmsNorm};
    use crate::tensor::Tensor;
    use std::rc::Rc;

    fn vector(mesh: &DeviceMesh, values: [f64; 3]) -> Result<DTensor> {
        DTensor::distribute(mesh, &Tensor::from_vec(values.to_vec(), [3])?, "(S0)".parse()?)
    }

    fn on_two_ranks(run: impl Fn(&DeviceMesh) -> Result<()> + Send + Sync + Clone + 'static) {
        spmd(2, move |rank| run(&DeviceMesh::new(&rank, &[("dp", 2)])?)).unwrap_or_else(|e| panic!("{e}"));
    }

    fn values(x: &DTensor) -> Vec<f64> {
        x.full_tensor().expect("communicates").to_f64_vec()
    }

    #[test]
    fn powers_are_differentiated_until_nothing_is_left() {
        on_two_ranks(|mesh| {
            let x = vector(mesh, [1.0, 2.0, -1.0])?.requires_grad()?;
            let mut y = x.mul(&x)?.mul(&x)?;
            for want in [[3.0, 12.0, 3.0], [6.0, 12.0, -6.0], [6.0; 3]] {
                y = y.sum_all()?.grad(&[&x])?.remove(0);
                assert_eq!(values(&y), want);
                assert_eq!(y.layout(), x.layout());
            }
            Ok(())
        });
    }

    /// exp keeps its result, whose history is restored from the node.
    #[test]
    fn saved_results_have_their_history_back() {
        on_two_ranks(|mesh| {
            let x = vector(mesh, [0.0, 1.0, 2.0])?.requires_grad()?;
            let y = x.mul_scalar(2.0)?.exp()?;
            let mut derivative = y.clone();
            for _ in 0..3 {
                derivative = derivative.sum_all()?.grad(&[&x])?.remove(0);
            }
            let want: Vec<f64> = values(&y).iter().map(|y| 8.0 * y).collect();
            assert_eq!(values(&derivative), want);
            let node = Rc::downgrade(&y.history.as_ref().expect("recorded").node);
            drop((y, derivative));
            assert!(node.upgrade().is_none(), "no node keeps itself alive");
            Ok(())
        });
    }

    #[test]
    fn inner_tensors_and_those_without_influence() {
        on_two_ranks(|mesh| {
            let x = vector(mesh, [1.0, 2.0, 3.0])?.requires_grad()?;
            let unused = vector(mesh, [1.0; 3])?.requires_grad()?;
            let middle = x.mul(&x)?;
            let y = middle.mul(&middle)?.mul(&x)?.sum_all()?;
            let all = y.grad(&[&middle, &unused, &x, &y])?;
            let want = [[2.0, 16.0, 54.0], [0.0; 3], [5.0, 80.0, 405.0]];
            for (got, want) in all.iter().zip(want) {
                assert_eq!(values(got), want);
            }
            assert_eq!(values(&all[3]), [1.0]);
            // The gradient of the inner tensor, 2 m x, depends on m and on x.
            assert_eq!(values(&all[0].sum_all()?.grad(&[&middle])?[0]), [2.0, 4.0, 6.0]);
            assert_eq!(values(&all[0].sum_all()?.grad(&[&x])?[0]), [6.0, 24.0, 54.0]);
            Ok(())
        });
    }

    #[test]
    fn only_what_is_wanted_is_computed() {
        on_two_ranks(|mesh| {
            let (x, w) = (vector(mesh, [1.0; 3])?.requires_grad()?, vector(mesh, [2.0; 3])?.requires_grad()?);
            let y = x.mul(&w)?;
            let before = CALLS.get();
            let dx = y.grad_from(&vector(mesh, [1.0; 3])?, &[&x])?.remove(0);
            assert_eq!(CALLS.get() - before, 1, "dy · w, not dy · x");
            assert!(dx.has_history());
            let _guard = mesh.no_grad();
            assert!(
                !y.grad_from(&vector(mesh, [1.0; 3])?, &[&x])?[0].has_history(),
                "as the mesh records nothing"
            );
            Ok(())
        });
    }

    #[test]
    fn a_backward_pass_through_a_recorded_one_reaches_leaves() {
        on_two_ranks(|mesh| {
            let (x, w) = (vector(mesh, [1.0, 2.0, 3.0])?, vector(mesh, [2.0, -1.0, 0.5])?.requires_grad()?);
            let x = x.requires_grad()?;
            let y = x.mul(&x)?.mul(&w)?.sum_all()?;
            let penalty = y.grad(&[&x])?.remove(0); // 2 x w
            let gradients = penalty.mul(&penalty)?.sum_all()?.backward()?; // of 4 x² w²
            assert_eq!(values(gradients.get(&w).expect("a leaf")), [16.0, -32.0, 36.0]);
            assert_eq!(values(gradients.get(&x).expect("a leaf")), [32.0, 16.0, 6.0]);
            Ok(())
        });
    }

    #[test]
    fn statistics_stay_constants() {
        on_two_ranks(|mesh| {
            let x = vector(mesh, [1.0, 2.0, 4.0])?.reshape([3, 1])?.requires_grad()?;
            let w = DTensor::full(mesh, x.dtype(), [1], 1.0, "(R)".parse()?)?;
            let outs = DTensor::apply(&RmsNorm { eps: Bits(1.0) }, &[&x, &w])?;
            outs[0].sum_all()?.grad(&[&x])?;
            assert!(!outs[1].has_history());
            Ok(())
        });
    }
}
