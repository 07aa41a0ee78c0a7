//! Sorting, and the largest and smallest elements.
//!
//! All methods follow one order: ascending, with -0 equal to 0 and NaN after every number; equal elements by their
//! index. Descending order reverses the values alone, so NaN comes first and equal elements stay in the order of their
//! indices.

use crate::dtensor::{DTensor, DTensors};
use crate::error::{Error, Result};
use crate::ops::{Sort, TopK, TopKBlocks};
use crate::placement::Placement;

/// Ordering.
impl DTensor {
    /// Returns the elements along `dim` in order, and their former indices (i64). The sort is stable.
    ///
    /// Communicates nothing if the ranks hold `dim` whole; otherwise the operand is redistributed to a layout in which
    /// they do. The gradient of an element goes to its former index.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = Tensor::from_vec(vec![3.0f32, 1.0, 2.0, 0.0, 5.0, 0.0], [2, 3])?;
    ///     let x = DTensor::distribute(&mesh, &x, "(S0)")?;
    ///     let (values, indices) = x.sort(-1, false)?;
    ///     assert_eq!(values.full_tensor()?.to_f64_vec(), [1.0, 2.0, 3.0, 0.0, 0.0, 5.0]);
    ///     assert_eq!(indices.full_tensor()?.to_vec::<i64>()?, [1, 2, 0, 0, 2, 1]);
    ///     assert_eq!(indices.spec().to_string(), "i64[2, 3]@(dp:S0)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have.
    pub fn sort(&self, dim: isize, descending: bool) -> Result<(DTensor, DTensor)> {
        let op = Sort { dim: self.shape().dim("sort", dim)?, descending };
        two(DTensor::apply(&op, &[self])?)
    }

    /// Returns the indices (i64) that put the elements along `dim` in order: the second result of [`DTensor::sort`].
    /// Communicates as `sort` does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![5i32, 9, 7], [3])?, "(S0)")?;
    ///     let order = x.argsort(0, true)?;
    ///     assert_eq!(order.full_tensor()?.to_vec::<i64>()?, [1, 2, 0]);
    ///     assert_eq!(x.gather(0, &order)?.full_tensor()?.to_vec::<i32>()?, [9, 7, 5]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have.
    pub fn argsort(&self, dim: isize, descending: bool) -> Result<DTensor> {
        let sorted = self.sort(dim, descending).map_err(|e| e.called("argsort"))?;
        Ok(sorted.1)
    }

    /// Returns the `k` largest elements along `dim` in descending order, or with `largest` false the `k` smallest in
    /// ascending order, and their indices (i64). Of equal elements the one with the smaller index comes first.
    ///
    /// If `dim` is sharded and every rank stores at least `k` of its indices, each rank chooses `k` candidates, and the
    /// candidates alone are gathered: `k` elements and indices per rank instead of the dim. Otherwise the operand is
    /// redistributed to a layout in which the ranks hold `dim` whole. The gradient of an element goes to its index.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let logits = Tensor::from_vec((0..100).map(|i| (i * 37 % 100) as f32).collect(), [1, 100])?;
    ///     let logits = DTensor::distribute(&mesh, &logits, "(S1)")?;
    ///     let (values, indices) = logits.topk(2, -1, true)?;
    ///     assert_eq!(values.full_tensor()?.to_vec::<f32>()?, [99.0, 98.0]);
    ///     assert_eq!(indices.full_tensor()?.to_vec::<i64>()?, [27, 54]);
    ///     assert!(mesh.received_bytes() < 200); // not the other rank's 50 logits
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have, and a `k` larger than its extent.
    pub fn topk(&self, k: usize, dim: isize, largest: bool) -> Result<(DTensor, DTensor)> {
        let dim = self.shape().dim("topk", dim)?;
        let top = TopK { dim, k, largest };
        let Some(blocks) = self.even_blocks(dim, k) else { return two(DTensor::apply(&top, &[self])?) };
        let (values, indices) = two(DTensor::apply(&TopKBlocks { dim, k, largest, blocks }, &[self])?)?;
        let (values, places) = two(DTensor::apply(&top, &[&values])?)?;
        Ok((values, indices.gather(dim as isize, &places)?))
    }

    /// Returns the `k`-th smallest element along `dim`, counted from 1, and its index (i64); with `keep`, the dim stays
    /// with extent 1. Communicates as [`DTensor::topk`] does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![4.0, 2.0, 8.0], [3])?, "(R)")?;
    ///     let (value, index) = x.kthvalue(2, 0, false)?;
    ///     assert_eq!((value.item()?, index.item()?), (4.0, 0.0));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have, and a `k` that is 0 or larger than its extent.
    pub fn kthvalue(&self, k: usize, dim: isize, keep: bool) -> Result<(DTensor, DTensor)> {
        let n = self.shape()[self.shape().dim("kthvalue", dim)?];
        if k == 0 || k > n {
            let given = format!("k = {k} for dim {dim} of {}", self.spec());
            return Err(Error::invalid("kthvalue", "k is not between 1 and the dim's extent", given, ""));
        }
        let (values, indices) = self.topk(k, dim, false)?;
        let last = |x: DTensor| -> Result<DTensor> {
            let x = x.slice(dim, k - 1, 1)?;
            if keep { Ok(x) } else { x.squeeze(dim) }
        };
        Ok((last(values)?, last(indices)?))
    }

    /// Returns the number of blocks of at least `k` indices into which the layout cuts `dim`, or `None` if it does not
    /// cut it or the blocks of [`TopKBlocks`] are not the ranks' shards.
    fn even_blocks(&self, dim: usize, k: usize) -> Option<usize> {
        let n = self.shape()[dim];
        let (mut axes, mut blocks) = (0, 1);
        for (a, placement) in self.layout().placements().iter().enumerate() {
            match placement {
                Placement::Shard(d) if *d == dim => {
                    (axes, blocks) = (axes + 1, blocks * self.mesh().mesh().axis_len(a))
                }
                Placement::Partial(_) | Placement::RaggedShard { .. } => return None,
                Placement::Shard(_) | Placement::Replicate => {}
            }
        }
        let whole_blocks = axes == 1 || n.is_multiple_of(blocks);
        (blocks > 1 && whole_blocks && TopKBlocks::fits(n, k, blocks)).then_some(blocks)
    }
}

/// Returns the results of an operator that has two.
fn two(results: DTensors) -> Result<(DTensor, DTensor)> {
    let results: Vec<DTensor> = results.into();
    let [values, indices] = <[DTensor; 2]>::try_from(results).expect("the operator has two results");
    Ok((values, indices))
}
