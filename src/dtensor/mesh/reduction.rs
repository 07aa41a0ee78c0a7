//! The reduction mode: how sums that are spread over ranks are added up.

use std::cell::{Cell, RefCell};

use rustc_hash::FxHashMap;

use crate::comm::{ModulePath, path_matches};
use crate::placement::SumGroups;

/// The mode in which sums that are spread over ranks are added up.
///
/// It is set for a mesh ([`DeviceMesh::set_reduction`](crate::dtensor::DeviceMesh::set_reduction)) or for some calls
/// ([`DeviceMesh::with_reduction`](crate::dtensor::DeviceMesh::with_reduction)).
///
/// ```
/// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh, Reduction}, tensor::Tensor};
/// spmd(3, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 3)])?;
///     let values = Tensor::from_vec((1..=100).map(|i| 1.0 / i as f32).collect(), [100])?;
///     let sum = |layout: &str| -> isoshard::Result<f64> {
///         DTensor::distribute(&mesh, &values, layout)?.sum_all()?.item()
///     };
///     assert_eq!(sum("(S0)")?, sum("(R)")?); // exact mode: the bits of a single rank
///     let fast = mesh.with_reduction(Reduction::Fast, || sum("(S0)"))?;
///     assert!((fast - sum("(R)")?).abs() < 1e-6);
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// Every result has the bits that a single rank computes, on every mesh.
    ///
    /// A sum follows one tree over the *global* extents: see `docs/exactness.md`. Partial sums pass through operators
    /// that only move elements, and are added up before any other operator. If shard boundaries fall between the
    /// nodes of the tree, a rank sends the few nodes that it has finished. If they split a leaf that cannot be split,
    /// operands are redistributed instead.
    #[default]
    Exact,
    /// Each rank adds up its own elements into one number, and a tree over the ranks adds these; partial sums pass
    /// through every linear operator. Results are correct up to rounding, and differ between meshes.
    ///
    /// Fast mode communicates fewer bytes if shard boundaries do not fall on nodes, or if several partial gradients
    /// of one value are added before they are reduced. If boundaries fall on nodes, it communicates about as
    /// many; with plain tensor parallelism it may communicate more.
    Fast,
    /// Like [`Reduction::Exact`], but products of matrices and the gradients of tables are taken in parts, on every mesh
    /// and on one rank: see [`SumGroups`]. Parts may be rounded to a narrower dtype, so that ranks send as few bytes as
    /// in fast mode.
    ///
    /// Every mesh gives the bits that a single rank gives in the same mode. A mesh that would split a part moves
    /// operands instead, so the number of parts should be a multiple of the ranks of each axis that splits sums, for
    /// two axes of their product.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh, Reduction}, placement::SumGroups, tensor::{DType, Tensor}};
    /// spmd(4, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 4)])?;
    ///     mesh.set_reduction(Reduction::Grouped(SumGroups::new(8)?.with_wire(DType::BF16)?));
    ///     let values = |n: usize| Tensor::from_vec((0..n).map(|i| 1.0 / (1 + i) as f32).collect(), [n / 256, 256]);
    ///     let product = |layout: &str| -> isoshard::Result<DTensor> {
    ///         let x = DTensor::distribute(&mesh, &values(512)?, layout)?;
    ///         let w = DTensor::distribute(&mesh, &values(768)?, layout)?;
    ///         x.matmul(&w.transpose(0, 1)?)
    ///     };
    ///     let (cut, whole) = (product("(S1)")?, product("(R)")?);
    ///     assert!(cut.layout().has_partial());
    ///     assert_eq!(cut.full_tensor()?.to_vec::<f32>()?, whole.full_tensor()?.to_vec::<f32>()?);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    Grouped(SumGroups),
}

impl Reduction {
    /// Returns true if every mesh gives the bits of a single rank: sums follow a tree over global indices.
    ///
    /// ```
    /// use isoshard::{dtensor::Reduction, placement::SumGroups};
    /// assert!(Reduction::Exact.is_exact() && Reduction::Grouped(SumGroups::new(8)?).is_exact());
    /// assert!(!Reduction::Fast.is_exact());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn is_exact(self) -> bool {
        match self {
            Reduction::Exact | Reduction::Grouped(_) => true,
            Reduction::Fast => false,
        }
    }

    /// Returns the parts in which sums are taken, if they are.
    pub(in crate::dtensor) fn groups(self) -> Option<SumGroups> {
        match self {
            Reduction::Grouped(groups) => Some(groups),
            Reduction::Exact | Reduction::Fast => None,
        }
    }
}

/// The modes of a mesh: one for all calls, and others for modules by path.
#[derive(Default)]
pub(in crate::dtensor) struct ReductionModes {
    pub base: Cell<Reduction>,
    /// Path patterns, in the order in which they were set.
    pub patterns: RefCell<Vec<(String, Reduction)>>,
    /// The modes of paths that were asked for.
    pub known: RefCell<FxHashMap<ModulePath, Option<Reduction>>>,
    /// Set if there are patterns, unless a call's mode is given whatever its path.
    pub has_paths: Cell<bool>,
}

impl ReductionModes {
    /// Returns the mode of the calls of a module: that of the last pattern that matches its path or one above it.
    #[cold]
    pub fn of(&self, path: ModulePath) -> Reduction {
        if path.as_str().is_empty() {
            return self.base.get();
        }
        let find = || {
            let text = path.as_str();
            let above = text.match_indices('.').map(|(end, _)| &text[..end]);
            let paths: Vec<&str> = above.chain([text]).collect();
            let matches = |pattern: &str| paths.iter().any(|path| path_matches(pattern, path));
            let patterns = self.patterns.borrow();
            patterns.iter().rev().find(|(pattern, _)| matches(pattern)).map(|(_, reduction)| *reduction)
        };
        let own = *self.known.borrow_mut().entry(path).or_insert_with(find);
        own.unwrap_or(self.base.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::spmd;
    use crate::dtensor::{DTensor, DeviceMesh};
    use crate::error::Result;
    use crate::placement::Layout;
    use crate::tensor::{DType, Tensor};

    fn value(mesh: &DeviceMesh, dtype: DType, shape: &[usize], layout: &str) -> Result<DTensor> {
        let n: usize = shape.iter().product();
        let whole = Tensor::from_vec((0..n).map(|i| (i % 7) as f32 - 3.0).collect(), shape)?;
        let x = DTensor::distribute(mesh, &whole, Layout::replicated(mesh.mesh().ndim()))?.cast(dtype)?;
        x.redistribute(layout)
    }

    /// Partial sums of two, three and no nodes, also of bf16, whose nodes are stored in f32.
    #[test]
    fn sums_in_parts_outlive_a_change_of_mode() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 3), ("b", 2)])?;
            for dtype in [DType::F32, DType::BF16] {
                for (rows, layout) in [(12, "(S0, R)"), (2, "(S0, S0)"), (12, "(S0, S1)"), (0, "(S0, R)")] {
                    let x = value(&mesh, dtype, &[rows, 4], layout)?;
                    let w = value(&mesh, dtype, &[4, 4], "(R, R)")?.requires_grad()?;
                    let sum = x.sum(&[0], true)?;
                    assert!(sum.layout().has_partial());
                    let read = || -> Result<Vec<Vec<f64>>> {
                        let y = sum.matmul(&w)?;
                        let both = sum.add(&y)?.mul_scalar(0.5)?;
                        let grad = both.sum_all()?.backward()?.take(&w).expect("w is a leaf");
                        let values =
                            [sum.mul_scalar(3.0)?, y, both.clone(), DTensor::cat(&[&sum, &both], 0)?, grad];
                        values.iter().map(|v| Ok(v.full_tensor()?.to_f64_vec())).collect()
                    };
                    let (exact, fast) = (read()?, mesh.with_reduction(Reduction::Fast, read)?);
                    // The values are small integers, which bf16 rounds.
                    let rounding = if dtype == DType::F32 { 0.0 } else { 1.0 / 64.0 };
                    for (exact, fast) in exact.iter().zip(&fast) {
                        let largest = exact.iter().fold(1.0f64, |m, v| m.max(v.abs()));
                        let near = exact.iter().zip(fast).all(|(e, f)| (e - f).abs() <= rounding * largest);
                        assert!(near, "{dtype}[{rows}]@{layout}: {exact:?}, {fast:?}");
                    }
                    let again = sum.redistribute(sum.layout().reduced())?;
                    assert_eq!(again.full_tensor()?.to_f64_vec(), sum.full_tensor()?.to_f64_vec());
                }
            }
            Ok(())
        };
        spmd(6, run).unwrap_or_else(|e| panic!("{e}"));
    }

    #[test]
    fn a_backward_pass_may_run_in_another_mode() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 3)])?;
            let (x, w) =
                (value(&mesh, DType::F32, &[12, 2, 4], "(S0)")?, value(&mesh, DType::F32, &[4], "(R)")?);
            let modes = [Reduction::Exact, Reduction::Fast];
            let gradient = |forward: Reduction, backward: Reduction| -> Result<Vec<f64>> {
                let w = w.requires_grad()?;
                let mut loss = mesh.with_reduction(forward, || -> Result<DTensor> {
                    let y = x.mul(&w.expand([12, 2, 4])?)?.sum(&[0, 1], false)?;
                    y.mul(&w)?.add(&y)?.sum_all()
                })?;
                let grads = mesh.with_reduction(backward, || loss.backward())?;
                Ok(grads.get(&w).expect("w is a leaf").full_tensor()?.to_f64_vec())
            };
            let all = modes.iter().flat_map(|f| modes.iter().map(|b| gradient(*f, *b)));
            let all = all.collect::<Result<Vec<_>>>()?;
            assert!(all.iter().all(|g| *g == all[0]), "{all:?}");
            Ok(())
        };
        spmd(3, run).unwrap_or_else(|e| panic!("{e}"));
    }
}
