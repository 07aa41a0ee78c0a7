//! Scopes of a mesh: operators that record no history, and gradients that stay unreduced.

use super::reached_nodes::split_nodes;
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::reduction::Reduction;
use crate::dtensor::tensor::tape::TapeOutput;
use crate::error::{Error, Result};
use crate::placement::SumGroups;

impl DeviceMesh {
    /// Disables the tape until the returned guard is dropped: operators record no history.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [3], "(S0)")?.requires_grad()?;
    ///     let guard = mesh.no_grad();
    ///     assert!(!x.exp()?.has_history());
    ///     drop(guard);
    ///     assert!(x.exp()?.has_history());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn no_grad(&self) -> NoGrad {
        self.0.no_grad.set(self.0.no_grad.get() + 1);
        NoGrad(self.clone())
    }

    /// Leaves the gradients of leaf tensors unreduced until the returned guard is dropped, if sums are fast
    /// ([`Reduction::Fast`]): each rank keeps its part. The next [`DTensor::backward_into`](crate::dtensor::DTensor::backward_into)
    /// without a guard adds its own parts and reduces all gradients, also those of leaves that it does not reach. So
    /// several micro-batches communicate as many gradients as one, as with `no_sync` of PyTorch. Under FSDP a part
    /// has the size of the whole parameter, and parameters are gathered in each micro-batch as before.
    ///
    /// If sums are taken in groups ([`Reduction::Grouped`]), each rank keeps the parts that it computes, and adds those of
    /// the next micro-batches part by part. The bits are the same on every mesh. A rank keeps a tensor of the
    /// parameter's shape, in f32, for each of its parts and each use of the parameter. Micro-batches have one shape. A parameter that is
    /// computed with before an operator sums its gradient, other than cast or moved, is reduced each time.
    ///
    /// In exact mode ([`Reduction::Exact`]) a backward pass in the scope is refused, on a single rank too. Parts of different
    /// micro-batches are nodes of different reduction trees, which depend on the mesh; a sum of parts would give bits that
    /// depend on it too. Without a guard each micro-batch reduces its gradients: `n` micro-batches send `n` times the bytes
    /// of one. If modules have modes of their own ([`DeviceMesh::set_reduction_of`]), the gradients of those in exact mode
    /// are reduced each time, and a pass is refused if it reaches no others.
    ///
    /// ```
    /// use isoshard::{comm::{Tally, spmd}, dtensor::{DTensor, DeviceMesh, Gradients, Reduction}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let (rank, tally) = Tally::of(&rank)?;
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     mesh.set_reduction(Reduction::Fast);
    ///     let w = DTensor::full(&mesh, DType::F32, [4], "(R)", 2.0)?.requires_grad()?;
    ///     let x = DTensor::full(&mesh, DType::F32, [6, 4], "(S0)", 1.0)?;
    ///     let mut gradients = Gradients::default();
    ///     for micro in 0..3 {
    ///         let _guard = (micro < 2).then(|| mesh.no_sync());
    ///         x.mul(&w)?.sum_all()?.backward_into(&mut gradients)?;
    ///         assert_eq!(tally.total().calls, u64::from(micro == 2)); // one all-reduce in the end
    ///     }
    ///     assert_eq!(gradients.get(&w).expect("a leaf").local().to_vec::<f32>()?, [18.0; 4]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn no_sync(&self) -> NoSync {
        self.0.no_sync.set(self.0.no_sync.get() + 1);
        NoSync(self.clone())
    }

    /// Makes operators keep the layouts of their operands until the returned guard is dropped: a sharding that moves no operand is
    /// taken, if there is one, also if moving would balance the work better. For programs that need results in the layouts of
    /// their operands, as optimizers do; [`Params::update_by`](crate::nn::Params::update_by) is in such a scope. No bit changes.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [1 << 16], "(RS(0..1; 1,255))")?;
    ///     let _guard = mesh.keep_layouts();
    ///     assert_eq!(x.add_scalar(1.0)?.layout(), x.layout()); // one rank adds nearly all
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn keep_layouts(&self) -> KeepLayouts {
        self.0.keep_layouts.set(self.0.keep_layouts.get() + 1);
        KeepLayouts(self.clone())
    }

    /// Returns true in a scope of [`DeviceMesh::keep_layouts`].
    pub(in crate::dtensor) fn keeps_layouts(&self) -> bool {
        self.0.keep_layouts.get() > 0
    }

    /// Returns true in a scope of [`DeviceMesh::no_sync`].
    pub(in crate::dtensor) fn is_unsynchronised(&self) -> bool {
        self.0.no_sync.get() > 0
    }

    /// Returns true if a backward pass leaves gradients unreduced, as each rank has added them up.
    pub(in crate::dtensor) fn keeps_parts(&self) -> bool {
        self.is_unsynchronised() && self.reduction() == Reduction::Fast
    }

    /// Returns the parts in which a backward pass keeps gradients, if it leaves them unreduced.
    pub(in crate::dtensor) fn kept_groups(&self) -> Option<SumGroups> {
        self.reduction().groups().filter(|_| self.is_unsynchronised())
    }

    /// Refuses a backward pass from `roots` that would keep no gradient unreduced, though a scope of
    /// [`DeviceMesh::no_sync`] asks for it: all leaves that it reaches are in exact mode. All ranks answer alike.
    pub(in crate::dtensor) fn expect_keeps_gradients<'a>(
        &self,
        roots: impl IntoIterator<Item = &'a TapeOutput>,
    ) -> Result<()> {
        if !self.is_unsynchronised() {
            return Ok(());
        }
        let is_exact = match self.0.reduction.has_paths.get() {
            false => self.reduction() == Reduction::Exact,
            true => {
                let (nodes, _) = split_nodes(roots, |_| true);
                let mut leaves = nodes.iter().filter(|node| node.call.is_none());
                leaves.all(|leaf| self.0.reduction.of(leaf.path) == Reduction::Exact)
            }
        };
        if !is_exact {
            return Ok(());
        }
        let rule = "exact mode reduces the gradients of each micro-batch, since bits of a sum of parts depend on the mesh";
        let remedy = "declare groups (SumGroups), reduce in fast mode, or accumulate outside no_sync";
        Err(Error::unsupported("no_sync", rule, format!("Reduction::Exact on {}", self.mesh()), remedy))
    }

    pub(crate) fn grad_enabled(&self) -> bool {
        self.0.no_grad.get() == 0
    }

    /// Enables the tape until the returned guard is dropped.
    pub(in crate::dtensor) fn enable_grad(&self) -> EnabledGrad {
        EnabledGrad { guards: self.0.no_grad.replace(0), mesh: self.clone() }
    }
}

/// The guard of [`DeviceMesh::no_grad`]: while it lives, operators record no history.
pub struct NoGrad(DeviceMesh);

impl Drop for NoGrad {
    fn drop(&mut self) {
        self.0.0.no_grad.set(self.0.0.no_grad.get() - 1);
    }
}

/// The guard of [`DeviceMesh::keep_layouts`]: while it lives, operators move no operand if they can.
pub struct KeepLayouts(DeviceMesh);

impl Drop for KeepLayouts {
    fn drop(&mut self) {
        self.0.0.keep_layouts.set(self.0.0.keep_layouts.get() - 1);
    }
}

/// The guard of [`DeviceMesh::no_sync`]: while it lives, the gradients of leaf tensors stay unreduced; in exact mode
/// backward passes are refused.
pub struct NoSync(DeviceMesh);

impl Drop for NoSync {
    fn drop(&mut self) {
        self.0.0.no_sync.set(self.0.0.no_sync.get() - 1);
    }
}

/// The guard of [`DeviceMesh::enable_grad`].
pub(in crate::dtensor) struct EnabledGrad {
    mesh: DeviceMesh,
    /// The number of guards that disabled the tape before.
    guards: usize,
}

impl Drop for EnabledGrad {
    fn drop(&mut self) {
        self.mesh.0.no_grad.set(self.guards);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::spmd;
    use crate::dtensor::DTensor;
    use crate::placement::Layout;
    use crate::tensor::DType;

    #[test]
    fn guards_nest_and_end_with_their_scope() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 1)])?;
            let x = DTensor::zeros(&mesh, DType::F32, [3], Layout::replicated(1))?.requires_grad()?;
            let keeps = || -> Result<bool> { Ok(x.exp()?.has_history()) };
            {
                let _outer = mesh.no_grad();
                drop(mesh.no_grad());
                assert!(!keeps()?, "the outer guard still lives");
                assert!(x.has_history(), "what is there stays");
            }
            assert!(keeps()?);
            let failing = || -> Result<()> {
                let _guard = mesh.no_grad();
                x.reshape([2]).map(drop)
            };
            assert!(failing().is_err() && keeps()?, "an error ends the scope as well");
            Ok(())
        };
        spmd(1, run).unwrap_or_else(|e| panic!("{e}"));
    }
}
