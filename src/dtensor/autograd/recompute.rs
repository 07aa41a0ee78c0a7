//! Functions whose intermediate values are dropped after the forward pass and computed again in the backward pass.
//!
//! The forward pass records the function's operators, looks up the tensors on which the results depend, and drops the
//! rest. The tape has one node for all, whose operands are these tensors. The backward pass runs the function again,
//! records it, and continues through the new nodes. They lead to the same tensors, so gradients are added in the same
//! order as without recomputation, and have the same bits.

use std::rc::Rc;

use rustc_hash::FxHashSet;

use super::reached_nodes::split_nodes;
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::dtensor::tensor::dtensor::DTensor;
use crate::dtensor::tensor::saved::{GatheredFrom, Origin, Saved};
use crate::dtensor::tensor::tape::{
    CallDerivative, Recomputation, RecomputeInput, RecomputedFunction, TapeCall, TapeNode, TapeOutput,
    next_id,
};
use crate::error::{Error, Result};

/// The first run of a function that the backward pass runs again.
pub(crate) struct FirstRun {
    pub results: Vec<DTensor>,
    pub again: Box<RecomputedFunction>,
}

impl DTensor {
    /// Computes a function of `operands` and keeps none of its intermediate values: the backward pass computes them
    /// again (Chen et al., *Training deep nets with sublinear memory cost*, 2016), as `torch.utils.checkpoint` and
    /// `jax.checkpoint` do. Returns the function's results.
    ///
    /// `f` is called at once, and once more in each backward pass. It must compute the same both times. A random operator
    /// in it takes a [`Draw`](crate::rng::Draw) that is captured, or a generator that is cloned in the closure; a model's
    /// dropout is handled by [`nn::recompute`](crate::nn::recompute()). Gradients, also of tensors that `f` captures, have
    /// the bits that they have without recomputation. The backward pass repeats the communication of `f`.
    /// The name stands in errors.
    ///
    /// A recorded pass ([`DTensor::grad`]) keeps the values that are computed again until its result is dropped. Gradients
    /// of its gradients have the same bits on every mesh. They may differ from those without recomputation by rounding,
    /// since contributions are added in another order.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// use std::{cell::Cell, rc::Rc};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::full(&mesh, DType::F32, [4], "(S0)", 0.5)?.requires_grad()?;
    ///     let runs = Rc::new(Cell::new(0));
    ///     let counted = runs.clone();
    ///     let y = DTensor::recompute("square of exp", &[&x], move |ins| {
    ///         counted.set(counted.get() + 1);
    ///         let e = ins[0].exp()?;
    ///         Ok(vec![e.mul(&e)?])
    ///     })?.remove(0);
    ///     let dx = y.sum_all()?.backward()?.take(&x).expect("x is a leaf");
    ///     let kept = x.exp()?.mul(&x.exp()?)?.sum_all()?.backward()?.take(&x).expect("x is a leaf");
    ///     assert_eq!(dx.local().to_vec::<f32>()?, kept.local().to_vec::<f32>()?);
    ///     assert_eq!(runs.get(), 2);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses no operands and operands on different meshes, and returns the error of `f`. A backward pass returns the
    /// error of the second run, and refuses other results than those of the first and a dependence on other tensors.
    pub fn recompute(
        name: &'static str,
        operands: &[&DTensor],
        f: impl Fn(&[DTensor]) -> Result<Vec<DTensor>> + 'static,
    ) -> Result<Vec<DTensor>> {
        let Some(first) = operands.first() else {
            return Err(Error::invalid(name, "wants operands", "none", ""));
        };
        Self::recompute_with(name, &first.mesh, operands, |ins| {
            let results = f(ins)?;
            Ok(FirstRun { results, again: Box::new(move |ins, _| f(ins)) })
        })
    }

    /// Runs [`DTensor::recompute`] for a function whose second run is not its first.
    pub(crate) fn recompute_with(
        name: &'static str,
        mesh: &DeviceMesh,
        operands: &[&DTensor],
        first_run: impl FnOnce(&[DTensor]) -> Result<FirstRun>,
    ) -> Result<Vec<DTensor>> {
        if let Some(other) = operands.iter().find(|x| !x.mesh.same(mesh)) {
            let given = format!("{} beside {}", other.mesh.mesh(), mesh.mesh());
            let rule = "the operands are on one mesh";
            return Err(Error::sharding(name, rule, given, "make all on one DeviceMesh"));
        }
        let first = next_id();
        let operands: Vec<DTensor> = operands.iter().map(|&x| x.clone()).collect();
        let FirstRun { mut results, again } = first_run(&operands)?;
        let roots = results.iter().filter_map(|y| y.history.as_ref());
        let (_, outside) = split_nodes(roots, |node| node.id > first);
        if outside.is_empty() {
            return Ok(results);
        }
        let recomputation = Recomputation {
            name,
            operands: operands.iter().map(RecomputeInput::new).collect(),
            run: again,
            reduction: mesh.base_reduction(),
            tracked: results.iter().map(|y| y.history.is_some()).collect(),
        };
        let call = TapeCall {
            inputs: outside.into_iter().cloned().map(Some).collect(),
            derivative: CallDerivative::Recomputed(Box::new(recomputation)),
        };
        let outs = results.iter().map(|y| y.meta.clone()).collect();
        let node = TapeNode::new(outs, Some(call));
        for (out, y) in results.iter_mut().enumerate().filter(|(_, y)| y.history.is_some()) {
            *y = DTensor { history: Some(TapeOutput { node: node.clone(), out }), origin: None, ..y.clone() };
        }
        Ok(results)
    }
}

impl RecomputeInput {
    /// Keeps `x`, or the shards from which it is gathered again if it is so marked.
    pub(crate) fn new(x: &DTensor) -> RecomputeInput {
        RecomputeInput { saved: Saved::of(x), history: x.history.clone() }
    }

    /// Starts to gather the tensors that are not kept.
    pub(crate) fn prefetch<'a>(all: impl Iterator<Item = &'a RecomputeInput>) -> Result<()> {
        GatheredFrom::prefetch(all.filter_map(|input| match &input.saved {
            Saved::Again(Origin::Gathered(origin)) => Some(origin.clone()),
            Saved::Kept(_) | Saved::Again(Origin::Computed(_)) => None,
        }))
    }

    /// Returns the tensor with its history. A gathered one is kept by the nodes that read it, unless the pass is
    /// `recorded`.
    pub(crate) fn value(&self, recorded: bool) -> Result<DTensor> {
        let x = self.saved.value()?;
        let origin = if recorded { self.saved.origin_of_recorded() } else { None };
        Ok(DTensor { history: self.history.clone(), origin, ..x })
    }
}

impl Recomputation {
    /// Runs the function again and records it. Returns the results' histories; nodes from the number `first` on are
    /// those of this run.
    pub fn run_again(
        &self,
        mesh: &DeviceMesh,
        outs: &[Rc<TensorMeta>],
        inputs: &[Option<TapeOutput>],
        first: u64,
    ) -> Result<Vec<Option<TapeOutput>>> {
        let recorded = mesh.grad_enabled();
        let operands: Vec<DTensor> =
            self.operands.iter().map(|x| x.value(recorded)).collect::<Result<_>>()?;
        let results = {
            let _guard = mesh.enable_grad();
            mesh.with_reduction(self.reduction, || (self.run)(&operands, recorded))?
        };
        let refused = |rule: &str, given: String| {
            let remedy = "let the function depend on its operands and on what it captures alone, \
                          and not on the number of its calls";
            Err(Error::invalid(self.name, rule, given, remedy))
        };
        if !results.iter().map(|y| &y.meta).eq(outs) {
            let text = |metas: Vec<String>| metas.join(", ");
            let of_results = text(results.iter().map(|y| y.spec().to_string()).collect());
            let of_first = text(outs.iter().map(|meta| meta.spec().to_string()).collect());
            let given = format!("{of_results} for {of_first}");
            return refused("the second run gives other results than the first", given);
        }
        let roots = results.iter().filter_map(|y| y.history.as_ref());
        let (_, outside) = split_nodes(roots, |node| node.id >= first);
        let without = |some: &[&TapeOutput], others: &[&TapeOutput]| {
            let others: FxHashSet<_> = others.iter().map(|of| (of.node.id, of.out)).collect();
            let other = some.iter().find(|of| !others.contains(&(of.node.id, of.out)))?;
            Some(other.node.outs[other.out].spec().to_string())
        };
        let inputs: Vec<&TapeOutput> = inputs.iter().flatten().collect();
        if let Some(given) = without(&outside, &inputs) {
            return refused("the second run depends on a tensor on which the first did not", given);
        }
        if let Some(given) = without(&inputs, &outside) {
            return refused("the second run does not depend on a tensor on which the first did", given);
        }
        let differs = |(y, tracked): (&DTensor, &bool)| y.history.is_some() != *tracked;
        if let Some(result) = results.iter().zip(&self.tracked).position(differs) {
            let rule = "the same results of both runs depend on tensors with gradients";
            return refused(rule, format!("result {result} of one run alone"));
        }
        Ok(results.into_iter().map(|y| y.history).collect())
    }
}
