//! The reduction modes of a mesh: one for all calls, and others for modules by path.

use super::device_mesh::DeviceMesh;
use super::reduction::Reduction;
use crate::comm::ModulePath;
use crate::error::{Error, Result};
use crate::tensor::DType;

impl DeviceMesh {
    /// Sets the [`Reduction`] mode of the calls that follow. All ranks must set the same mode.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DeviceMesh, Reduction}};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     mesh.set_reduction(Reduction::Fast);
    ///     assert_eq!(mesh.reduction(), Reduction::Fast);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn set_reduction(&self, reduction: Reduction) {
        self.0.reduction.base.set(reduction);
    }

    /// Returns the [`Reduction`] mode; [`Reduction::Exact`] by default.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DeviceMesh, Reduction}};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     assert_eq!(mesh.reduction(), Reduction::Exact);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    #[inline]
    pub fn reduction(&self) -> Reduction {
        let modes = &self.0.reduction;
        if modes.has_paths.get() { modes.of(ModulePath::current()) } else { modes.base.get() }
    }

    /// Sets the mode for the calls of modules whose path matches `pattern`, and of the modules below them: in the
    /// forward pass, in the derivatives of its calls and in recomputation. In a pattern `*` stands for any one part of a
    /// path and `**` for any number of parts. The last pattern that matches a path decides. All ranks must set the same
    /// modes. [`DeviceMesh::set_reduction`] and [`DeviceMesh::with_reduction`] set the mode of all other calls.
    ///
    /// A process keeps 65,536 different paths ([`ModulePath::new`]); a path beyond these stands for one above it, and has its
    /// mode.
    ///
    /// The mode is a part of the program, like its dtypes: a plan does not set it, because it determines bits.
    ///
    /// ```
    /// use isoshard::comm::{ModulePath, spmd};
    /// use isoshard::{dtensor::{DeviceMesh, Reduction}, placement::SumGroups};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let groups = Reduction::Grouped(SumGroups::new(8)?);
    ///     mesh.set_reduction_of("h.*.mlp", groups);
    ///     assert_eq!(mesh.reduction(), Reduction::Exact);
    ///     let _scope = ModulePath::new("h.3.mlp.up").enter();
    ///     assert_eq!(mesh.reduction(), groups);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn set_reduction_of(&self, pattern: &str, reduction: Reduction) {
        let modes = &self.0.reduction;
        modes.patterns.borrow_mut().push((pattern.to_string(), reduction));
        modes.known.borrow_mut().clear();
        modes.has_paths.set(true);
    }

    /// Runs `f` in a mode, whatever the paths of its calls.
    pub(in crate::dtensor) fn with_only_reduction<T>(
        &self,
        reduction: Reduction,
        f: impl FnOnce() -> T,
    ) -> T {
        struct RestorePaths<'a>(&'a DeviceMesh, bool);
        impl Drop for RestorePaths<'_> {
            fn drop(&mut self) {
                self.0.0.reduction.has_paths.set(self.1);
            }
        }
        let _restore = RestorePaths(self, self.0.reduction.has_paths.replace(false));
        self.with_reduction(reduction, f)
    }

    /// Refuses, in the name of `verb`, a dtype in which the sums of gradients of a module do not travel in its mode. Fast mode
    /// takes any floating dtype. In exact mode sums travel as f32, and in groups as those say, because a dtype that a mesh
    /// chose would change bits.
    pub(crate) fn expect_reduces_in(&self, verb: &str, module: ModulePath, dtype: DType) -> Result<()> {
        let modes = &self.0.reduction;
        let mode = if modes.has_paths.get() { modes.of(module) } else { modes.base.get() };
        let rule = match mode {
            Reduction::Fast => return Ok(()),
            Reduction::Exact if dtype == DType::F32 => return Ok(()),
            Reduction::Grouped(groups) if dtype == groups.wire() => return Ok(()),
            Reduction::Exact => {
                "exact mode sends sums as f32, since to round a rank's part would change bits".into()
            }
            Reduction::Grouped(groups) => {
                format!("the groups of this program send sums as {}", groups.wire())
            }
        };
        let given = format!("{dtype} for the gradients of {:?}", module.as_str());
        let remedy = format!("declare groups with SumGroups::with_wire({dtype}), or reduce in fast mode");
        Err(Error::unsupported(verb, rule, given, remedy))
    }

    /// Returns the mode of calls whose path has none of its own.
    pub(in crate::dtensor) fn base_reduction(&self) -> Reduction {
        self.0.reduction.base.get()
    }

    /// Runs `f` in the given [`Reduction`] mode, then restores the mode before. A backward pass uses the mode in
    /// which it runs. When an operator in fast mode reads a partial sum that was made in exact mode, each rank first
    /// adds up its nodes.
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
        struct RestoreReduction<'a>(&'a DeviceMesh, Reduction);
        impl Drop for RestoreReduction<'_> {
            fn drop(&mut self) {
                self.0.set_reduction(self.1);
            }
        }
        let _restore = RestoreReduction(self, self.0.reduction.base.replace(reduction));
        f()
    }
}
