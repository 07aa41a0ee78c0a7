//! Methods that change only the shape of a tensor. They return views if strides and layouts allow.
//!
//! A negative dim counts from the last. A method communicates nothing if each rank's shard of the result is in its
//! shard of the operand; otherwise the operand is redistributed to the layout that costs least.

use crate::dtensor::tensor::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::ops::{Cat, DiagEmbed, Diagonal, Expand, Flip, MatrixDiagonal, Permute, Reshape, Slice, Split};
use crate::tensor::Shape;

/// Methods that change only the shape.
impl DTensor {
    /// Returns the same elements, in row-major order, with another shape.
    ///
    /// A dim that stays outermost in its group keeps its shards: then nothing is communicated.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec((0..12).map(|i| i as f32).collect(), [4, 3])?, "(S0)")?;
    ///     let y = x.reshape([2, 2, 3])?;
    ///     assert_eq!(y.spec().to_string(), "f32[2, 2, 3]@(dp:S0)");
    ///     assert_eq!(mesh.received_bytes(), 0);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a shape with another number of elements.
    pub fn reshape(&self, shape: impl Into<Shape>) -> Result<DTensor> {
        DTensor::apply_one(&Reshape { shape: shape.into() }, &[self])
    }

    /// Returns the dims in another order: dim `d` of the result is dim `order[d]` of this tensor. Shards follow their
    /// dim; communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [4, 3, 2], "(S0)")?;
    ///     assert_eq!(x.permute(&[2, 0, 1])?.spec().to_string(), "f32[2, 4, 3]@(dp:S1)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an `order` that is not a permutation of the dims.
    pub fn permute(&self, order: &[isize]) -> Result<DTensor> {
        let order = order.iter().map(|&d| self.shape().dim("permute", d)).collect::<Result<_>>()?;
        DTensor::apply_one(&Permute { order }, &[self])
    }

    /// Swaps two dims. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [2, 2])?, "(S0)")?;
    ///     let y = x.transpose(0, 1)?;
    ///     assert_eq!(y.layout().to_string(), "(S1)");
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [1.0, 3.0, 2.0, 4.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dims that the tensor does not have.
    pub fn transpose(&self, a: isize, b: isize) -> Result<DTensor> {
        let (a, b) = (self.shape().dim("transpose", a)?, self.shape().dim("transpose", b)?);
        DTensor::apply_one(&Permute::swap(self.shape().len(), a, b), &[self])
    }

    /// Repeats dims of extent 1, and adds new leading dims, to reach `shape`, without copying. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0], [2, 1])?, "(S0)")?;
    ///     let y = x.expand([2, 3])?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a shape to which this tensor's shape does not broadcast.
    pub fn expand(&self, shape: impl Into<Shape>) -> Result<DTensor> {
        let shape = shape.into();
        if shape == *self.shape() { Ok(self.clone()) } else { DTensor::apply_one(&Expand { shape }, &[self]) }
    }

    /// Inserts a dim of extent 1, which is dim `dim` of the result. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [4], "(S0)")?;
    ///     assert_eq!(x.unsqueeze(0)?.spec().to_string(), "f32[1, 4]@(dp:S1)");
    ///     assert_eq!(x.unsqueeze(-1)?.spec().to_string(), "f32[4, 1]@(dp:S0)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a `dim` that the result does not have.
    pub fn unsqueeze(&self, dim: isize) -> Result<DTensor> {
        let at = self.new_dim("unsqueeze", dim)?;
        let mut shape = self.shape().to_vec();
        shape.insert(at, 1);
        self.reshape(shape)
    }

    /// Returns the index of a dim of a result that has one dim more than this tensor.
    fn new_dim(&self, verb: &str, dim: isize) -> Result<usize> {
        let dims = self.shape().len() as isize + 1;
        let at = if dim < 0 { dim + dims } else { dim };
        if (0..dims).contains(&at) {
            return Ok(at as usize);
        }
        let given = format!("dim {dim} for {}", self.spec());
        let remedy = format!("the result's dims are {} to {}", -dims, dims - 1);
        Err(Error::invalid(verb, "the result has no such dim", given, remedy))
    }

    /// Removes a dim of extent 1. Communicates nothing unless this dim is sharded: then one rank stores all elements,
    /// and they are redistributed.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [4, 1], "(S0)")?;
    ///     assert_eq!(x.squeeze(-1)?.spec().to_string(), "f32[4]@(dp:S0)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have, or whose extent is not 1.
    pub fn squeeze(&self, dim: isize) -> Result<DTensor> {
        let dim = self.shape().dim("squeeze", dim)?;
        let mut shape = self.shape().to_vec();
        if shape.remove(dim) != 1 {
            return Err(Error::invalid(
                "squeeze",
                "the dim's extent is not 1",
                format!("dim {dim} of {}", self.spec()),
                "",
            ));
        }
        self.reshape(shape)
    }

    /// Returns the indices `start..start + len` of `dim`. Communicates nothing if the ranks hold `dim` whole;
    /// otherwise the operand is redistributed to a layout in which they do.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3])?, "(S0)")?;
    ///     let y = x.slice(1, 1, 2)?;
    ///     assert_eq!(y.spec().to_string(), "f32[2, 2]@(dp:S0)");
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [2.0, 3.0, 5.0, 6.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have, and a range that exceeds its extent.
    pub fn slice(&self, dim: isize, start: usize, len: usize) -> Result<DTensor> {
        DTensor::apply_one(&Slice { dim: self.shape().dim("slice", dim)?, start, len }, &[self])
    }

    /// Splits this tensor along `dim` into tensors of these lengths. Communicates as [`DTensor::slice`] does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3])?, "(S0)")?;
    ///     let parts = x.split(&[2, 1], 1)?;
    ///     assert_eq!(parts[0].full_tensor()?.to_vec::<f32>()?, [1.0, 2.0, 4.0, 5.0]);
    ///     assert_eq!(parts[1].full_tensor()?.to_vec::<f32>()?, [3.0, 6.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses lengths whose sum is not the dim's extent.
    pub fn split(&self, lens: &[usize], dim: isize) -> Result<Vec<DTensor>> {
        let op = Split { dim: self.shape().dim("split", dim)?, lens: lens.iter().copied().collect() };
        Ok(DTensor::apply(&op, &[self])?.into())
    }

    /// Concatenates tensors along `dim`. Communicates nothing if all have one layout in which `dim` is not sharded;
    /// otherwise the operands that do not fit are redistributed.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0], [2, 1])?, "(S0)")?;
    ///     let y = DTensor::cat(&[&x, &x, &x], 1)?;
    ///     assert_eq!(y.spec().to_string(), "f32[2, 3]@(dp:S0)");
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an empty list, different dtypes, and extents of other dims that differ.
    pub fn cat(parts: &[&DTensor], dim: isize) -> Result<DTensor> {
        let first = parts.first().ok_or_else(|| Error::invalid("cat", "wants operands", "none", ""))?;
        DTensor::apply_one(&Cat { dim: first.shape().dim("cat", dim)? }, parts)
    }

    /// Reverses the indices of each of `dims`. Communicates nothing if the ranks hold these dims whole.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [2, 2])?, "(S0)")?;
    ///     assert_eq!(x.flip(&[1])?.full_tensor()?.to_vec::<f32>()?, [2.0, 1.0, 4.0, 3.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have.
    pub fn flip(&self, dims: &[isize]) -> Result<DTensor> {
        dims.iter().try_fold(self.clone(), |x, &dim| {
            DTensor::apply_one(&Flip { dim: x.shape().dim("flip", dim)? }, &[&x])
        })
    }

    /// Moves the elements along `dim` by `shift` indices, those that leave its end to its beginning:
    /// `y[.., (i + shift) mod n, ..] = x[.., i, ..]`. Communicates as [`DTensor::slice`] does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0], [1, 3])?, "(R)")?;
    ///     assert_eq!(x.roll(1, 1)?.full_tensor()?.to_vec::<f32>()?, [3.0, 1.0, 2.0]);
    ///     assert_eq!(x.roll(-1, 1)?.full_tensor()?.to_vec::<f32>()?, [2.0, 3.0, 1.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have.
    pub fn roll(&self, shift: isize, dim: isize) -> Result<DTensor> {
        let n = self.shape()[self.shape().dim("roll", dim)?];
        let end = if n == 0 { 0 } else { shift.rem_euclid(n as isize) as usize };
        if end == 0 {
            return Ok(self.clone());
        }
        let parts = self.split(&[n - end, end], dim)?;
        DTensor::cat(&[&parts[1], &parts[0]], dim)
    }

    /// Repeats this tensor `times[d]` times along each dim `d`; more numbers than dims add leading dims. (NumPy calls it
    /// `tile`.) A sharded dim that is repeated is gathered; other shards stay.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0], [2])?, "(R)")?;
    ///     let y = x.repeat(&[2, 2])?;
    ///     assert_eq!(y.spec().to_string(), "f32[2, 4]@(dp:R)");
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses fewer numbers than dims, and a result whose number of bytes overflows.
    pub fn repeat(&self, times: &[usize]) -> Result<DTensor> {
        let Some(lead) = times.len().checked_sub(self.shape().len()) else {
            let given = format!("{times:?} for {}", self.spec());
            return Err(Error::invalid("repeat", "wants a number per dim", given, ""));
        };
        let extent = |d: usize| if d < lead { 1 } else { self.shape()[d - lead] };
        let (mut apart, mut repeated, mut joined) = (Vec::new(), Vec::new(), Vec::new());
        for (d, &k) in times.iter().enumerate() {
            if k != 1 {
                apart.push(1);
                repeated.push(k);
            }
            apart.push(extent(d));
            repeated.push(extent(d));
            joined.push(k.saturating_mul(extent(d))); // an extent that overflows is refused below
        }
        let repeated = Shape::from(repeated);
        repeated.checked_bytes("repeat", self.dtype())?;
        self.reshape(apart)?.expand(repeated)?.reshape(joined)
    }

    /// Repeats each index of `dim` `times` times in place: `y[.., i, ..] = x[.., i / times, ..]`. A sharded dim stays
    /// sharded if its extent is a multiple of the number of shards.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0], [2])?, "(S0)")?;
    ///     let y = x.repeat_interleave(2, 0)?;
    ///     assert_eq!(y.spec().to_string(), "f32[4]@(dp:S0)");
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [1.0, 1.0, 2.0, 2.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have, and a result whose number of bytes overflows.
    pub fn repeat_interleave(&self, times: usize, dim: isize) -> Result<DTensor> {
        let at = self.shape().dim("repeat_interleave", dim)?;
        let mut repeated = self.shape().to_vec();
        repeated.insert(at + 1, times);
        let repeated = Shape::from(repeated);
        repeated.checked_bytes("repeat_interleave", self.dtype())?;
        let mut joined = self.shape().clone();
        joined[at] *= times;
        self.unsqueeze(at as isize + 1)?.expand(repeated)?.reshape(joined)
    }

    /// Joins tensors of one shape along a new dim, which is dim `dim` of the result. Shards keep their dims, so tensors of one layout are joined
    /// without communication.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0], [2])?, "(S0)")?;
    ///     let y = DTensor::stack(&[&x, &x], 0)?;
    ///     assert_eq!(y.spec().to_string(), "f32[2, 2]@(dp:S1)");
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [1.0, 2.0, 1.0, 2.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an empty list, different dtypes or shapes, and a `dim` that the result does not have.
    pub fn stack(parts: &[&DTensor], dim: isize) -> Result<DTensor> {
        let at = parts.first().map_or(Ok(0), |x| x.new_dim("stack", dim))? as isize;
        let parts = parts.iter().map(|x| x.unsqueeze(at)).collect::<Result<Vec<_>>>()?;
        DTensor::cat(&parts.iter().collect::<Vec<_>>(), at)
    }

    /// Returns one tensor per index of `dim`, without that dim. Communicates as [`DTensor::slice`] does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [2, 2])?, "(S0)")?;
    ///     let columns = x.unbind(1)?;
    ///     assert_eq!(columns[1].full_tensor()?.to_vec::<f32>()?, [2.0, 4.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have.
    pub fn unbind(&self, dim: isize) -> Result<Vec<DTensor>> {
        let n = self.shape()[self.shape().dim("unbind", dim)?];
        self.split(&vec![1; n], dim)?.iter().map(|x| x.squeeze(dim)).collect()
    }

    /// Splits this tensor along `dim` into at most `chunks` tensors of `ceil(n / chunks)` indices; the last one may be
    /// shorter. Communicates as [`DTensor::slice`] does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let qkv = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3])?, "(S0)")?;
    ///     let [q, k, v] = qkv.chunk(3, -1)?.try_into().unwrap();
    ///     assert_eq!(v.full_tensor()?.to_vec::<f32>()?, [3.0, 6.0]);
    ///     assert_eq!(q.shape(), k.shape());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have, and 0 chunks.
    pub fn chunk(&self, chunks: usize, dim: isize) -> Result<Vec<DTensor>> {
        let n = self.shape()[self.shape().dim("chunk", dim)?];
        if chunks == 0 {
            return Err(Error::invalid("chunk", "wants at least one chunk", self.spec().to_string(), ""));
        }
        let len = n.div_ceil(chunks).max(1);
        let lens: Vec<usize> = (0..n.max(1)).step_by(len).map(|start| len.min(n - start)).collect();
        self.split(&lens, dim)
    }

    /// Returns a diagonal of two dims as the last dim: the elements whose index of `columns` is their index of `rows` plus
    /// `offset`. A view. Communicates nothing if the ranks hold both dims whole.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [2, 2])?, "(R)")?;
    ///     assert_eq!(x.diagonal(0, 0, 1)?.full_tensor()?.to_vec::<f32>()?, [1.0, 4.0]);
    ///     assert_eq!(x.diagonal(1, 0, 1)?.full_tensor()?.to_vec::<f32>()?, [2.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dims that the tensor does not have, and equal ones.
    pub fn diagonal(&self, offset: isize, rows: isize, columns: isize) -> Result<DTensor> {
        let (rows, columns) = (self.shape().dim("diagonal", rows)?, self.shape().dim("diagonal", columns)?);
        DTensor::apply_one(&Diagonal { of: MatrixDiagonal { rows, columns, offset } }, &[self])
    }

    /// Returns zeros with the last dim of this tensor as a diagonal of two new last dims, both of its extent plus
    /// `|offset|`. Communicates nothing if the ranks hold the last dim whole.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0], [2])?, "(R)")?;
    ///     assert_eq!(x.diag_embed(0)?.full_tensor()?.to_vec::<f32>()?, [1.0, 0.0, 0.0, 2.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a tensor without dims.
    pub fn diag_embed(&self, offset: isize) -> Result<DTensor> {
        let Some(&n) = self.shape().last() else {
            return Err(Error::invalid("diag_embed", "wants a dim", self.spec().to_string(), ""));
        };
        let (columns, extent) = (self.shape().len(), n + offset.unsigned_abs());
        let of = MatrixDiagonal { rows: columns - 1, columns, offset };
        DTensor::apply_one(&DiagEmbed { of, extents: (extent, extent) }, &[self])
    }

    /// Moves dim `from` to place `to`; the other dims keep their order. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [4, 3, 2], "(S0)")?;
    ///     assert_eq!(x.movedim(0, -1)?.spec().to_string(), "f32[3, 2, 4]@(dp:S2)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dims that the tensor does not have.
    pub fn movedim(&self, from: isize, to: isize) -> Result<DTensor> {
        let (from, to) = (self.shape().dim("movedim", from)?, self.shape().dim("movedim", to)?);
        let mut order: Vec<usize> = (0..self.shape().len()).filter(|&d| d != from).collect();
        order.insert(to, from);
        DTensor::apply_one(&Permute { order: order.into_iter().collect() }, &[self])
    }

    /// Joins the dims `first..=last` to one. Communicates as [`DTensor::reshape`] does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [4, 3, 2], "(S0)")?;
    ///     assert_eq!(x.flatten(0, 1)?.spec().to_string(), "f32[12, 2]@(dp:S0)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dims that the tensor does not have, and a `last` before `first`.
    pub fn flatten(&self, first: isize, last: isize) -> Result<DTensor> {
        let (a, b) = (self.shape().dim("flatten", first)?, self.shape().dim("flatten", last)?);
        if b < a {
            let given = format!("dims {a} to {b} of {}", self.spec());
            return Err(Error::invalid("flatten", "the last dim comes before the first", given, ""));
        }
        let mut shape = self.shape().to_vec();
        shape.splice(a..=b, [self.shape()[a..=b].iter().product()]);
        self.reshape(shape)
    }

    /// Splits `dim` into dims of extents `sizes`. Communicates as [`DTensor::reshape`] does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [12, 2], "(S0)")?;
    ///     assert_eq!(x.unflatten(0, &[4, 3])?.spec().to_string(), "f32[4, 3, 2]@(dp:S0)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have, and sizes whose product is not its extent.
    pub fn unflatten(&self, dim: isize, sizes: &[usize]) -> Result<DTensor> {
        let at = self.shape().dim("unflatten", dim)?;
        let joint = Shape::from(sizes).checked_numel("unflatten")?;
        if joint != self.shape()[at] {
            let given = format!("{sizes:?} for dim {at} of {}", self.spec());
            return Err(Error::invalid("unflatten", "the product of the sizes is not the extent", given, ""));
        }
        let mut shape = self.shape().to_vec();
        shape.splice(at..=at, sizes.iter().copied());
        self.reshape(shape)
    }
}
