//! How sums that ranks share are taken.

use super::device_mesh::DeviceMesh;

/// How sums that ranks share are taken; of a mesh ([`DeviceMesh::set_reduction`]) or of some calls
/// ([`DeviceMesh::with_reduction`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// Every result has the bits that a single rank computes, on every mesh.
    ///
    /// A sum follows one tree over the *global* extents: see `docs/exactness.md`. Parts of a sum pass through operators that
    /// move elements, and are added up before any other. Where a cut falls between the nodes of the tree, a rank sends the
    /// few nodes it has finished; where it falls inside a leaf that cannot be cut, operands move instead.
    #[default]
    Exact,
    /// Each rank adds up what it has, in one number, and the ranks' numbers are added by a tree over the ranks; parts of a
    /// sum pass through whatever is linear. Results are right up to rounding, and differ from mesh to mesh. Fewer bytes
    /// where cuts do not fall on nodes, or where several partial gradients of one value meet, which are added before they
    /// are reduced; as many where cuts do fall on nodes.
    Fast,
}

impl DeviceMesh {
    /// How sums that ranks share are taken from now on; on all ranks alike.
    pub fn set_reduction(&self, reduction: Reduction) {
        self.0.reduction.set(reduction);
    }

    /// How sums that ranks share are taken.
    pub fn reduction(&self) -> Reduction {
        self.0.reduction.get()
    }

    /// Runs `f` with `reduction` in force, and restores what was. A backward pass uses what is in force when it runs.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh, Reduction}, placement::{Layout, short::shard}};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, isoshard::tensor::DType::F32, [5], Layout::new([shard(0)]))?;
    ///     mesh.with_reduction(Reduction::Fast, || x.sum_all())?;
    ///     assert_eq!(mesh.reduction(), Reduction::Exact);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn with_reduction<T>(&self, reduction: Reduction, f: impl FnOnce() -> T) -> T {
        struct Restore<'a>(&'a DeviceMesh, Reduction);
        impl Drop for Restore<'_> {
            fn drop(&mut self) {
                self.0.set_reduction(self.1);
            }
        }
        let _restore = Restore(self, self.0.reduction.replace(reduction));
        f()
    }
}
