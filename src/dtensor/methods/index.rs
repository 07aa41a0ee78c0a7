//! Reading and writing elements by index.

use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::ops::{Bincount, Embedding, Gather, LinearIndex, Scatter, ScatterAdd, ScatterRule};
use crate::tensor::{ReduceOp, Shape};

/// Reading and writing by index.
impl DTensor {
    /// Returns the rows of this table, `[rows, width]`, that `index` (i64) names: shape `[index shape.., width]`.
    ///
    /// If the table's rows are sharded, each rank looks up the rows that it holds and the result is `Partial`; the
    /// table is not gathered.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let table = DTensor::distribute(&mesh, &Tensor::from_vec(vec![0.0f32, 0.5, 1.0, 1.5, 2.0, 2.5], [3, 2])?, "(R)")?;
    ///     let index = DTensor::distribute(&mesh, &Tensor::from_vec(vec![2i64, 0], [2])?, "(S0)")?;
    ///     let rows = table.embedding(&index)?;
    ///     assert_eq!(rows.spec().to_string(), "f32[2, 2]@(dp:S0)");
    ///     assert_eq!(rows.full_tensor()?.to_vec::<f32>()?, [2.0, 2.5, 0.0, 0.5]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an `index` that is not i64, and indices outside the table.
    pub fn embedding(&self, index: &DTensor) -> Result<DTensor> {
        DTensor::apply_one(&Embedding, &[self, index])
    }

    /// Returns the elements along `dim` that `index` (i64) names. `index` has the result's shape; its extents of the
    /// other dims are those of this tensor. Communicates nothing if both are sharded along one other dim, or if one is
    /// sharded along `dim` and the other is replicated. If this tensor is sharded along `dim`, each rank reads the
    /// elements that it stores and the result is `Partial`; the tensor is not gathered.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3])?, "(S0)")?;
    ///     let index = DTensor::distribute(&mesh, &Tensor::from_vec(vec![2i64, 0], [2, 1])?, "(S0)")?;
    ///     assert_eq!(x.gather(1, &index)?.full_tensor()?.to_vec::<f32>()?, [3.0, 4.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an `index` that is not i64, indices outside the dim, and other extents that differ.
    pub fn gather(&self, dim: isize, index: &DTensor) -> Result<DTensor> {
        DTensor::apply_one(&Gather { dim: self.shape().dim("gather", dim)? }, &[self, index])
    }

    /// Returns zeros with extent `extent` along `dim`, with each of these elements added at the index that `index`
    /// (i64) names. It is the transpose of [`DTensor::gather`] and computes its gradient. Sums of i64 and i32 keep the
    /// dtype and wrap, as PyTorch's do. Communicates nothing if both are sharded along one dim; if that is `dim`, the
    /// result is `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 4.0], [3])?, "(R)")?;
    ///     let index = DTensor::distribute(&mesh, &Tensor::from_vec(vec![2i64, 0, 2], [3])?, "(R)")?;
    ///     assert_eq!(x.scatter_add(0, &index, 3)?.full_tensor()?.to_vec::<f32>()?, [2.0, 0.0, 5.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an `index` that is not i64 or has another shape, indices outside `extent`, and sums of u8 and bools.
    pub fn scatter_add(&self, dim: isize, index: &DTensor, extent: usize) -> Result<DTensor> {
        DTensor::apply_one(&ScatterAdd { dim: self.shape().dim("scatter_add", dim)?, extent }, &[index, self])
    }

    /// Returns this tensor with the elements of `src` written along `dim`: `src[.., k, ..]` goes to index
    /// `index[.., k, ..]` (i64). If several have one destination, the one with the largest `k` stays, on every mesh and
    /// device. `index` and `src` have one shape; its extents of the other dims are those of this tensor.
    ///
    /// The gradient of an element that was overwritten is 0. Communicates nothing if all three are sharded along one
    /// other dim, or if this tensor is sharded along `dim` and the other two are replicated: each rank writes to what
    /// it stores.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0], [3])?, "(S0)")?;
    ///     let index = DTensor::distribute(&mesh, &Tensor::from_vec(vec![2i64, 0, 2], [3])?, "(R)")?;
    ///     let src = DTensor::distribute(&mesh, &Tensor::from_vec(vec![7.0f32, 8.0, 9.0], [3])?, "(R)")?;
    ///     let y = x.scatter(0, &index, &src)?;
    ///     assert_eq!(y.spec().to_string(), "f32[3]@(dp:S0)"); // each rank writes what it stores
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [8.0, 2.0, 9.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an `index` that is not i64, indices outside the dim, shapes that do not fit, and another dtype of `src`.
    pub fn scatter(&self, dim: isize, index: &DTensor, src: &DTensor) -> Result<DTensor> {
        let op = Scatter { dim: self.shape().dim("scatter", dim)?, rule: ScatterRule::Last };
        DTensor::apply_one(&op, &[self, index, src])
    }

    /// Returns this tensor with each element reduced with the elements of `src` whose `index` along `dim` names it: their
    /// sum, maximum or minimum. Shapes are those of [`DTensor::scatter`].
    ///
    /// The elements of `src` with one destination are added along the reduction tree, and their sum is added to this
    /// tensor's element. Sums of i64 and i32 wrap. Equal extremes share the gradient equally. Communicates as
    /// [`DTensor::scatter`] does, but `index` and `src` that are sharded along `dim` are not gathered: a maximum or minimum
    /// with a replicated tensor is `Partial`, and sums are reduced over ranks, one number per element of this tensor,
    /// before they are added.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::{ReduceOp, Tensor}};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0], [3])?, "(R)")?;
    ///     let index = DTensor::distribute(&mesh, &Tensor::from_vec(vec![2i64, 0, 2], [3])?, "(S0)")?;
    ///     let src = DTensor::distribute(&mesh, &Tensor::from_vec(vec![7.0f32, -8.0, 9.0], [3])?, "(S0)")?;
    ///     let y = x.scatter_reduce(0, &index, &src, ReduceOp::Max)?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [1.0, 2.0, 9.0]);
    ///     let y = x.scatter_reduce(0, &index, &src, ReduceOp::Sum)?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [-7.0, 2.0, 19.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`DTensor::scatter`]. Refuses sums of u8, and bools.
    pub fn scatter_reduce(
        &self,
        dim: isize,
        index: &DTensor,
        src: &DTensor,
        op: ReduceOp,
    ) -> Result<DTensor> {
        let at = self.shape().dim("scatter_reduce", dim)?;
        let rule = match op {
            ReduceOp::Sum => {
                let sums = ScatterAdd { dim: at, extent: self.shape()[at] };
                return self.add_sums("scatter_reduce", &sums, index, src);
            }
            ReduceOp::Max => ScatterRule::Max,
            ReduceOp::Min => ScatterRule::Min,
        };
        DTensor::apply_one(&Scatter { dim: at, rule }, &[self, index, src])
    }

    /// Returns the indices of `dim` that `index` (i64, one dim) names, in its order:
    /// `y[.., k, ..] = x[.., index[k], ..]`. Communicates as [`DTensor::gather`] does: nothing if `index` is replicated.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [2, 2])?, "(S0)")?;
    ///     let index = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1i64, 1, 0], [3])?, "(R)")?;
    ///     let y = x.index_select(1, &index)?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [2.0, 2.0, 1.0, 4.0, 4.0, 3.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an `index` that is not i64 or does not have one dim, and indices outside the dim.
    pub fn index_select(&self, dim: isize, index: &DTensor) -> Result<DTensor> {
        let (at, index) = self.index_rows("index_select", dim, index)?;
        DTensor::apply_one(&Gather { dim: at }, &[self, &index])
    }

    /// Returns this tensor with each index `k` of `dim` of `src` added at index `index[k]` (i64, one dim). Rows with
    /// one destination are added along the reduction tree, and their sum is added to this tensor. Sums of i64 and i32 wrap.
    /// Communicates as the sum of [`DTensor::scatter_reduce`] does: nothing if `index` is replicated and both tensors are
    /// sharded along one other dim.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 1.0], [2, 1])?, "(R)")?;
    ///     let index = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1i64, 1, 0], [3])?, "(S0)")?;
    ///     let src = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 4.0], [3, 1])?, "(S0)")?;
    ///     let y = x.index_add(0, &index, &src)?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [5.0, 4.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an `index` that is not i64 or does not have one dim, indices outside the dim, shapes that do not fit, and
    /// u8 and bools.
    pub fn index_add(&self, dim: isize, index: &DTensor, src: &DTensor) -> Result<DTensor> {
        let (at, index) = src.index_rows("index_add", dim, index)?;
        let extent = self.shape()[self.shape().dim("index_add", dim)?];
        self.add_sums("index_add", &ScatterAdd { dim: at, extent }, &index, src)
    }

    /// Returns this tensor with each index `k` of `dim` of `src` written to index `index[k]` (i64, one dim). The
    /// largest `k` of several with one destination stays. Communicates as [`DTensor::scatter`] does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let cache = DTensor::distribute(&mesh, &Tensor::from_vec(vec![0.0f32, 0.0, 0.0], [3, 1])?, "(R)")?;
    ///     let index = DTensor::distribute(&mesh, &Tensor::from_vec(vec![2i64, 0], [2])?, "(R)")?;
    ///     let src = DTensor::distribute(&mesh, &Tensor::from_vec(vec![5.0f32, 6.0], [2, 1])?, "(R)")?;
    ///     let y = cache.index_copy(0, &index, &src)?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [6.0, 0.0, 5.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an `index` that is not i64 or does not have one dim, indices outside the dim, and shapes that do not fit.
    pub fn index_copy(&self, dim: isize, index: &DTensor, src: &DTensor) -> Result<DTensor> {
        let (at, index) = src.index_rows("index_copy", dim, index)?;
        DTensor::apply_one(&Scatter { dim: at, rule: ScatterRule::Last }, &[self, &index, src])
    }

    /// Returns the elements that one index (i64) per leading dim names: `y[i.., r..] = x[a[i..], b[i..], .., r..]`. The
    /// indices are broadcast against each other. If a leading dim is sharded, the operand may be redistributed, because
    /// the leading dims are flattened.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [2, 2])?, "(R)")?;
    ///     let rows = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1i64, 0], [2])?, "(R)")?;
    ///     let columns = DTensor::distribute(&mesh, &Tensor::from_vec(vec![0i64], [1])?, "(R)")?;
    ///     let y = x.index(&[&rows, &columns])?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [3.0, 1.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an empty list of indices, more indices than dims, indices that are not i64, that do not broadcast, or that
    /// are outside their dim.
    pub fn index(&self, indices: &[&DTensor]) -> Result<DTensor> {
        let (flat, index, shape) = self.flat_index("index", indices)?;
        flat.index_select(0, &index)?.reshape(shape)
    }

    /// Returns this tensor with `values` written to the elements that one index (i64) per leading dim names, or with
    /// `accumulate` added to them. The indices are broadcast against each other, and `values` to the shape of
    /// [`DTensor::index`]. If several values have one destination, the last one in row-major order stays. If a leading dim
    /// is sharded, the operand may be redistributed, because the leading dims are flattened.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![0.0f32, 0.0, 0.0, 0.0], [2, 2])?, "(R)")?;
    ///     let rows = DTensor::distribute(&mesh, &Tensor::from_vec(vec![0i64, 1, 1], [3])?, "(R)")?;
    ///     let columns = DTensor::distribute(&mesh, &Tensor::from_vec(vec![0i64, 1, 1], [3])?, "(R)")?;
    ///     let values = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 4.0], [3])?, "(R)")?;
    ///     let put = x.index_put(&[&rows, &columns], &values, false)?;
    ///     assert_eq!(put.full_tensor()?.to_vec::<f32>()?, [1.0, 0.0, 0.0, 4.0]);
    ///     let added = x.index_put(&[&rows, &columns], &values, true)?;
    ///     assert_eq!(added.full_tensor()?.to_vec::<f32>()?, [1.0, 0.0, 0.0, 6.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`DTensor::index`]. Refuses `values` that do not broadcast, and another dtype.
    pub fn index_put(&self, indices: &[&DTensor], values: &DTensor, accumulate: bool) -> Result<DTensor> {
        let (flat, index, shape) = self.flat_index("index_put", indices)?;
        let mut rows = flat.shape().clone();
        rows[0] = index.shape()[0];
        let values = values.expand(shape)?.reshape(rows)?;
        let put = match accumulate {
            true => flat.index_add(0, &index, &values)?,
            false => flat.index_copy(0, &index, &values)?,
        };
        put.reshape(self.shape().clone())
    }

    /// Returns the elements along `dim` that `index` (i64) names, as [`DTensor::gather`] does, after broadcasting the
    /// other dims of both: [`DTensor::argsort`]'s result, for example, puts a tensor in order.
    /// Communicates as `gather` does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [2, 2])?, "(S0)")?;
    ///     let index = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1i64, 0, 1], [1, 3])?, "(R)")?;
    ///     let y = x.take_along_dim(1, &index)?;
    ///     assert_eq!(y.spec().to_string(), "f32[2, 3]@(dp:S0)");
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [2.0, 1.0, 2.0, 4.0, 3.0, 4.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an `index` that is not i64 or has another number of dims, indices outside the dim, and other extents that do
    /// not broadcast.
    pub fn take_along_dim(&self, dim: isize, index: &DTensor) -> Result<DTensor> {
        let at = self.shape().dim("take_along_dim", dim)?;
        let without = |x: &DTensor| -> Shape {
            x.shape().iter().enumerate().map(|(d, &n)| if d == at { 1 } else { n }).collect()
        };
        if index.shape().len() != self.shape().len() {
            let given = format!("{}, {}", self.spec(), index.spec());
            return Err(Error::invalid("take_along_dim", "the numbers of dims differ", given, ""));
        }
        let joint = without(self).broadcast("take_along_dim", &without(index))?;
        let with = |n: usize| {
            let mut shape = joint.clone();
            shape[at] = n;
            shape
        };
        let x = self.expand(with(self.shape()[at]))?;
        x.gather(dim, &index.expand(with(index.shape()[at]))?)
    }

    /// Returns the elements of this tensor, flattened, that `index` (i64) names, in the index's shape. A sharded operand
    /// may be redistributed, because it is flattened.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [2, 2])?, "(R)")?;
    ///     let index = DTensor::distribute(&mesh, &Tensor::from_vec(vec![3i64, 0], [2, 1])?, "(R)")?;
    ///     assert_eq!(x.take(&index)?.full_tensor()?.to_vec::<f32>()?, [4.0, 1.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an `index` that is not i64, and indices outside the number of elements.
    pub fn take(&self, index: &DTensor) -> Result<DTensor> {
        let flat = self.reshape([self.shape().numel()])?;
        flat.gather(0, &index.reshape([index.shape().numel()])?)?.reshape(index.shape().clone())
    }

    /// Counts how many times each index in `0..bins` occurs in this tensor (i64): i64 `[bins]`. Shapes do not depend on
    /// values, so the number of bins is given, and an index outside it is an error. If this tensor is sharded, the result is
    /// `Partial`: nothing is communicated until it is reduced, 8 bytes per bin.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let experts = DTensor::distribute(&mesh, &Tensor::from_vec(vec![2i64, 0, 2, 1], [4])?, "(S0)")?;
    ///     let load = experts.bincount(4)?;
    ///     assert_eq!(load.spec().to_string(), "i64[4]@(dp:P(sum))");
    ///     assert_eq!(load.full_tensor()?.to_vec::<i64>()?, [1, 1, 2, 0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a tensor that is not i64, and indices outside the bins.
    pub fn bincount(&self, bins: usize) -> Result<DTensor> {
        DTensor::apply_one(&Bincount { bins }, &[self])
    }

    /// Returns this tensor plus the sums of `src` by destination, which must have its shape.
    fn add_sums(&self, verb: &str, op: &ScatterAdd, index: &DTensor, src: &DTensor) -> Result<DTensor> {
        let (x, y) = (self.shape(), src.shape());
        if x.len() != y.len() || (0..x.len()).any(|d| d != op.dim && x[d] != y[d]) {
            let given = format!("{}, {}", self.spec(), src.spec());
            return Err(Error::invalid(
                verb,
                "the extents differ in another dim than the index's",
                given,
                "",
            ));
        }
        self.add(&DTensor::apply_one(op, &[index, src])?)
    }

    /// Returns `dim` as a number from 0 on, and `index`, one dim, expanded to this tensor's shape with its own extent in
    /// `dim`.
    fn index_rows(&self, verb: &str, dim: isize, index: &DTensor) -> Result<(usize, DTensor)> {
        let at = self.shape().dim(verb, dim)?;
        let &[len] = &index.shape()[..] else {
            let given = format!("{}, {}", self.spec(), index.spec());
            return Err(Error::invalid(verb, "the index does not have one dim", given, "flatten it"));
        };
        let mut shape = self.shape().clone();
        shape[at] = len;
        let column: Shape = (0..shape.len()).map(|d| if d == at { len } else { 1 }).collect();
        Ok((at, index.reshape(column)?.expand(shape)?))
    }

    /// Returns this tensor with its leading dims flattened, the indices into them joined and flattened, and the shape of
    /// the elements that they name.
    fn flat_index(&self, verb: &str, indices: &[&DTensor]) -> Result<(DTensor, DTensor, Shape)> {
        let (leading, x) = (indices.len(), self.shape());
        if leading == 0 || leading > x.len().min(LinearIndex::DIMS) {
            let given = format!("{leading} indices of {}", self.spec());
            return Err(Error::invalid(verb, "wants one index per leading dim, at most 8", given, ""));
        }
        let none = Shape::from([]);
        let shape = indices.iter().try_fold(none, |shape, i| shape.broadcast(verb, i.shape()))?;
        let expanded = indices.iter().map(|i| i.expand(shape.clone())).collect::<Result<Vec<_>>>()?;
        let extents = x[..leading].iter().copied().collect();
        let joined = DTensor::apply_one(&LinearIndex { extents }, &expanded.iter().collect::<Vec<_>>())?;
        let rows: usize = x[..leading].iter().product();
        let flat = self.reshape([rows].iter().chain(&x[leading..]).copied().collect::<Shape>())?;
        let result = shape.iter().chain(&x[leading..]).copied().collect();
        Ok((flat, joined.reshape([shape.numel()])?, result))
    }
}
