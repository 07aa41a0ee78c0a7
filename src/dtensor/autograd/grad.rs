//! Gradients of chosen tensors, recorded so that they can be differentiated again.
//!
//! The pass is that of `backward.rs`. Its steps are ordinary calls of operators, so the tape records them as it records
//! the forward pass. Nodes keep operands and results without their history, since a result would otherwise keep its
//! own node alive; a recorded pass restores the history of each from the node's operands and number.

use super::backward::{expect_history, one_of_scalar};
use super::backward_pass::BackwardPass;
use super::gradient_sum::in_dtype;
use crate::comm::operator_scope;
use crate::dtensor::tensor::dtensor::DTensor;
use crate::dtensor::tensor::tape::TapeOutput;
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
    ///     let x = DTensor::distribute(&mesh, &whole, "(S0)")?.requires_grad()?;
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
    /// another mesh, and an operator whose derivative has no derivative (not under
    /// [`DeviceMesh::no_grad`](crate::dtensor::DeviceMesh::no_grad), which needs none). Returns an error if communication
    /// fails.
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
    ///     let full = |value: f64| DTensor::full(&mesh, DType::F64, [3], "(S0)", value)?.requires_grad();
    ///     let (x, dy) = (full(2.0)?, full(10.0)?);
    ///     let y = x.mul(&x)?;
    ///     let dx = y.grad_from(&dy, &[&x])?.remove(0); // dy · 2x
    ///     assert_eq!(dx.full_tensor()?.to_f64_vec(), [40.0; 3]);
    ///     // The derivative with respect to the incoming gradient is the product of the Jacobian and a vector.
    ///     let ones = DTensor::full(&mesh, DType::F64, [3], "(S0)", 1.0)?;
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
            let given = || x.spec().to_string();
            match &x.history {
                Some(output) if x.mesh.same(&self.mesh) => Ok(output.clone()),
                Some(_) => {
                    let rule = "differentiates with respect to tensors on its own mesh";
                    Err(Error::sharding("grad", rule, given(), "pass tensors of this tensor's mesh"))
                }
                None => {
                    let rule = "differentiates with respect to tensors with history";
                    Err(Error::invalid("grad", rule, given(), "call requires_grad() on it before it is used"))
                }
            }
        };
        let outputs = wrt.iter().map(history).collect::<Result<Vec<_>>>()?;
        let grad = if self.mesh.grad_enabled() { grad.clone() } else { grad.detach() };
        let found = BackwardPass::find_wanted(&self.mesh, root, grad, outputs.iter())?;
        let place = |(x, of): (&&DTensor, &TapeOutput)| {
            let layout = x.layout().reduced();
            let Some(Some(grad)) = found.grads.get(&(of.node.id, of.out)) else {
                return DTensor::zeros(&self.mesh, x.dtype(), x.shape(), layout);
            };
            let _label = operator_scope("backward");
            // That of a leaf that modules compute with in another dtype has the leaf's dtype, or that of its only use.
            let grad = in_dtype(grad.redistribute(layout)?, x.dtype())?;
            // A gradient may be a broadcast view; the returned one is contiguous.
            let local = grad.local.contiguous()?;
            Ok(DTensor { local, ..grad })
        };
        wrt.iter().zip(&outputs).map(place).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::spmd;
    use crate::dtensor::CrossEntropyOptions;
    use crate::dtensor::call::dispatch::CALLS;
    use crate::dtensor::mesh::device_mesh::DeviceMesh;
    use crate::ops::{Bits, RmsNorm};
    use crate::tensor::Tensor;
    use std::rc::Rc;

    fn vector(mesh: &DeviceMesh, values: [f64; 3]) -> Result<DTensor> {
        DTensor::distribute(mesh, &Tensor::from_vec(values.to_vec(), [3])?, "(S0)")
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
            let w = DTensor::full(mesh, x.dtype(), [1], "(R)", 1.0)?;
            let outs = DTensor::apply(&RmsNorm { eps: Bits(1.0) }, &[&x, &w])?;
            outs[0].sum_all()?.grad(&[&x])?;
            assert!(!outs[1].has_history());
            Ok(())
        });
    }

    #[test]
    fn nothing_has_history_under_no_grad() {
        on_two_ranks(|mesh| {
            let (a, dy) =
                (vector(mesh, [1.0; 3])?.requires_grad()?, vector(mesh, [2.0; 3])?.requires_grad()?);
            let y = a.add(&a.detach())?;
            assert!(y.grad_from(&dy, &[&a])?[0].has_history(), "it is dy");
            let _guard = mesh.no_grad();
            assert!(!y.grad_from(&dy, &[&a])?[0].has_history());
            Ok(())
        });
    }

    /// Two leaf tensors on one buffer cannot be told apart among saved tensors.
    #[test]
    fn saved_operands_that_share_elements_are_refused() {
        on_two_ranks(|mesh| {
            let whole = vector(mesh, [1.0, 2.0, 3.0])?;
            let (a, b) = (whole.requires_grad()?, whole.requires_grad()?);
            let product = |a: &DTensor, b: &DTensor| {
                let forward = |x: &[DTensor]| Ok((vec![x[0].mul(&x[1])?.mul(&x[1])?], x.to_vec()));
                let backward = |x: &[DTensor], dy: &[DTensor]| {
                    let twice = x[0].mul(&x[1])?.mul_scalar(2.0)?;
                    Ok(vec![Some(x[1].mul(&x[1])?.mul(&dy[0])?), Some(twice.mul(&dy[0])?)])
                };
                DTensor::custom_vjp("a b²", &[a, b], forward, backward)?.remove(0).sum_all()
            };
            assert_eq!(values(product(&a, &b)?.backward()?.get(&b).expect("a leaf")), [2.0, 8.0, 18.0]);
            let refused = product(&a, &b)?.grad(&[&b]).map(drop).unwrap_err().to_string();
            assert!(refused.contains("cannot be told apart"), "{refused}");
            let apart = vector(mesh, [1.0, 2.0, 3.0])?.requires_grad()?;
            let first = product(&a, &apart)?.grad(&[&apart])?.remove(0);
            assert_eq!(values(&first.sum_all()?.grad(&[&apart])?[0]), [2.0, 4.0, 6.0]);
            Ok(())
        });
    }

    /// Closures that hold their operand's history are dropped in a loop.
    #[test]
    fn long_chains_of_closures_are_dropped() {
        on_two_ranks(|mesh| {
            let mut h = vector(mesh, [1.0; 3])?.requires_grad()?;
            for _ in 0..100_000 {
                let held = h.clone();
                let forward = |x: &[DTensor]| Ok((vec![x[0].clone()], vec![]));
                let backward = move |_: &[DTensor], dy: &[DTensor]| {
                    let _ = &held;
                    Ok(vec![Some(dy[0].clone())])
                };
                h = DTensor::custom_vjp("step", &[&h], forward, backward)?.remove(0);
            }
            drop(h);
            Ok(())
        });
    }

    #[test]
    fn second_derivatives_beside_infinite_logits_and_at_zero() {
        on_two_ranks(|mesh| {
            let rows = vec![f64::NEG_INFINITY, 1.0, 2.0, f64::NEG_INFINITY, 0.5, -1.0];
            let rows = Tensor::from_vec(rows, [2, 3])?;
            let x = DTensor::distribute(mesh, &rows, "(S0)")?.requires_grad()?;
            let target = DTensor::distribute(mesh, &Tensor::from_vec(vec![1i64, -1], [2])?, "(S0)")?;
            let options = CrossEntropyOptions { z_loss: 0.1, ignore_index: Some(-1), ..Default::default() };
            let loss = x.cross_entropy_with(&target, &options)?;
            let dx = loss.grad(&[&x])?.remove(0);
            let second = dx.mul(&dx)?.sum_all()?.grad(&[&x])?.remove(0);
            assert!(values(&second).iter().all(|v| v.is_finite()), "{:?}", values(&second));
            assert!(values(&second)[1] != 0.0);

            // d²(x^y) / dy dx at x = 0 and y = 2: 2 x ln x + x, whose limit is 0.
            let (x, y) =
                (vector(mesh, [0.0, 1.0, 2.0])?.requires_grad()?, vector(mesh, [2.0; 3])?.requires_grad()?);
            let dy = x.pow(&y)?.sum_all()?.grad(&[&y])?.remove(0);
            let mixed = values(&dy.sum_all()?.grad(&[&x])?[0]);
            assert_eq!(mixed[..2], [0.0, 1.0], "{mixed:?}");
            Ok(())
        });
    }
}
