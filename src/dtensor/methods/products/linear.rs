//! Linear maps over the last dim.

use smallvec::SmallVec;

use crate::dtensor::DTensor;
use crate::dtensor::call::recompute_cheap::mark_as_computed;
use crate::error::{Error, Result};
use crate::ops::{Activation, Linear, Meta, Op};
use crate::placement::Placement;
use crate::tensor::short_list;

/// Linear maps.
impl DTensor {
    /// Returns `f(x wᵀ + b)` over the last dim of this tensor, as one operator.
    ///
    /// This tensor is `[.., inputs]`, the weight `[outputs, inputs]` or `[groups, rows, inputs]`, and the bias has one
    /// element per row of the weight. In f32 and f64, results and gradients have the bits of
    /// [`einsum`](DTensor::einsum), [`add`](DTensor::add) and the function one after the other. In f16 and bf16 they are
    /// computed in f32 and rounded once, where three operators round three times. So a program says which it means by
    /// what it calls; both give the same bits on every mesh.
    ///
    /// Communicates what the product does. If the inputs over which it sums are sharded, f32 and f64 reduce the product
    /// before the bias is added; f16 and bf16 gather the operands, since a rounded sum cannot be rounded once more.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, nn::Activation, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let put = |x: &[f32], shape: &[usize], layout: &str| {
    ///         DTensor::distribute(&mesh, &Tensor::from_slice(x, shape)?, layout)
    ///     };
    ///     let x = put(&[1.0, 2.0], &[1, 2], "(R)")?;
    ///     // Each rank computes one of the two outputs.
    ///     let (w, b) = (put(&[1.0, 1.0, 3.0, -4.0], &[2, 2], "(S0)")?, put(&[0.5, 0.5], &[2], "(S0)")?);
    ///     let y = x.linear(&w, Some(&b), Some(Activation::Relu))?;
    ///     assert_eq!(y.spec().to_string(), "f32[1, 2]@(tp:S1)");
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [3.5, 0.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses operands whose shapes or dtypes do not fit; returns an error if communication fails.
    pub fn linear(
        &self,
        weight: &DTensor,
        bias: Option<&DTensor>,
        activation: Option<Activation>,
    ) -> Result<DTensor> {
        let op = Linear { bias: bias.is_some(), activation };
        let ins: SmallVec<[&DTensor; 3]> = short_list([self, weight].into_iter().chain(bias));
        let (rounds, plain) = (self.dtype().is_half(), bias.is_none() && activation.is_none());
        // A mode with groups joins the parts of a product before anything is added.
        let is_apart = || self.mesh.reduction().groups().is_some() || !follow_rows(&ins);
        if plain || !rounds && is_apart() {
            let metas: SmallVec<[Meta; 3]> = short_list(ins.iter().map(|x| x.meta().clone()));
            op.infer(&metas)?;
            let mut y = product_over_last(self, weight)?;
            if let Some(bias) = bias {
                y = y.add(bias)?;
            }
            if let Some(f) = activation {
                y = DTensor::apply_one(f.operator(), &[&y])?;
            }
            return Ok(y);
        }
        let mut results = DTensor::apply(&op, &ins)?;
        if let (Some(f), [y, z], false) = (activation, &mut results[..], rounds) {
            mark_as_computed(y, f.operator(), &[z])?;
        }
        Ok(results.remove(0))
    }
}

/// Returns true if a row of the operator fits these operands without a move along the dim that is summed over.
fn follow_rows(ins: &[&DTensor]) -> bool {
    let follows = |(i, x): (usize, &&DTensor)| {
        let summed = (i < 2).then(|| x.shape().len().wrapping_sub(1));
        x.layout().placements().iter().all(|placement| match placement {
            Placement::Replicate => true,
            Placement::Shard(dim) => Some(*dim) != summed,
            Placement::Partial(_) | Placement::RaggedShard { .. } => false,
        })
    };
    ins.iter().enumerate().all(follows)
}

/// Returns `x wᵀ` over the last dim of `x`, for any number of leading dims and for weights `[outputs, inputs]` and
/// `[groups, rows, inputs]`.
pub(crate) fn product_over_last(x: &DTensor, weight: &DTensor) -> Result<DTensor> {
    // The letters that the rows of the weight leave: `k` are the inputs, `n` and `g` the rows and groups.
    let (rows, letters) = match weight.shape().len() {
        3 => ("gn", "abcdefhijlmopqrstuvwxyz"),
        _ => ("n", "abcdefghijlmopqrstuvwxyz"),
    };
    let signature = match (x.shape().len(), rows) {
        (2, "n") => "t k, n k -> t n",
        (3, "n") => "b t k, n k -> b t n",
        (3, "gn") => "b t k, g n k -> b t g n",
        (dims, _) if (1..=letters.len() + 1).contains(&dims) => {
            let leading = &letters[..dims - 1];
            return x.einsum(&format!("{leading}k, {rows}k -> {leading}{rows}"), weight);
        }
        _ => {
            let rule = format!("wants 1 to {} dims", letters.len() + 1);
            return Err(Error::invalid("linear", rule, x.spec().to_string(), "reshape it first"));
        }
    };
    x.einsum(signature, weight)
}
