//! Layers and losses of neural networks as methods of `DTensor`.

use smallvec::SmallVec;

use super::into_draw::IntoDraw;
use super::tensor::DTensor;
use crate::error::Result;
use crate::ops::{
    Attention, Bits, CrossEntropy, Dropout, Embedding, Gather, LayerNorm, LogSoftmax, Max, RmsNorm, Rotary,
    ScatterAdd, Softmax, SumExp, Unkeyed,
};
use crate::rng::Draw;

/// Layers and losses of neural networks.
impl DTensor {
    /// Returns `exp(x) / sum(exp(x))` along `dim`, computed without overflow. Communicates nothing if the ranks hold
    /// `dim` whole.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![0.0f32, 0.0, 9.0, 9.0], [2, 2])?, "(S0)".parse()?)?;
    ///     assert_eq!(x.softmax(-1)?.full_tensor()?.to_vec::<f32>()?, [0.5; 4]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have, and dtypes that are not floating-point.
    pub fn softmax(&self, dim: isize) -> Result<DTensor> {
        DTensor::apply_one(&Softmax { dim: self.shape().dim("softmax", dim)? }, &[self])
    }

    /// Returns the logarithm of [`DTensor::softmax`], computed without overflow.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![0.0f32, 0.0, 9.0, 9.0], [2, 2])?, "(S0)".parse()?)?;
    ///     let y = x.log_softmax(-1)?.full_tensor()?.to_vec::<f32>()?;
    ///     assert!(y.iter().all(|v| (v + 2f32.ln()).abs() < 1e-6));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have, and dtypes that are not floating-point.
    pub fn log_softmax(&self, dim: isize) -> Result<DTensor> {
        DTensor::apply_one(&LogSoftmax { dim: self.shape().dim("log_softmax", dim)? }, &[self])
    }

    /// Applies layer normalisation over the last dim (Ba et al., 2016):
    /// `(x - mean) / sqrt(variance + eps) * weight + bias`. `weight` and `bias` have the shape of the last dim.
    /// Communicates nothing if the ranks hold the last dim whole.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 3.0, 2.0, 6.0], [2, 2])?, "(S0)".parse()?)?;
    ///     let weight = DTensor::full(&mesh, x.dtype(), [2], 10.0, "(R)".parse()?)?;
    ///     let y = x.layer_norm(&weight, None, 0.0)?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [-10.0, 10.0, -10.0, 10.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a `weight` or `bias` whose shape is not that of the last dim.
    pub fn layer_norm(&self, weight: &DTensor, bias: Option<&DTensor>, eps: f64) -> Result<DTensor> {
        let op = LayerNorm { eps: Bits(eps), bias: bias.is_some() };
        let ins: SmallVec<[&DTensor; 3]> = [self, weight].into_iter().chain(bias).collect();
        Ok(DTensor::apply(&op, &ins)?.remove(0))
    }

    /// Applies root-mean-square normalisation over the last dim (Zhang and Sennrich, 2019):
    /// `x / sqrt(mean(x * x) + eps) * weight`. Communicates nothing if the ranks hold the last dim whole.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![2.0f32, 2.0, 4.0, -4.0], [2, 2])?, "(S0)".parse()?)?;
    ///     let weight = DTensor::full(&mesh, x.dtype(), [2], 3.0, "(R)".parse()?)?;
    ///     let y = x.rms_norm(&weight, 0.0)?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [3.0, 3.0, 3.0, -3.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a `weight` whose shape is not that of the last dim.
    pub fn rms_norm(&self, weight: &DTensor, eps: f64) -> Result<DTensor> {
        Ok(DTensor::apply(&RmsNorm { eps: Bits(eps) }, &[self, weight])?.remove(0))
    }

    /// Applies rotary position embedding (Su et al., 2021) to vectors `[.., time, width]`: at position
    /// `p = offset + t`, elements `i` and `i + width/2` are rotated as a pair by the angle `p * base^(-2i/width)`.
    /// `offset` is the number of earlier positions, as when decoding with a cache.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 1.0, 2.0], [2, 2])?, "(R)".parse()?)?;
    ///     let y = x.rotary(10_000.0, 0)?;
    ///     assert_eq!(y.slice(0, 0, 1)?.full_tensor()?.to_vec::<f32>()?, [1.0, 2.0]); // position 0 is not rotated
    ///     let last = x.slice(0, 1, 1)?.rotary(10_000.0, 1)?;
    ///     assert_eq!(last.full_tensor()?.to_vec::<f32>()?, y.slice(0, 1, 1)?.full_tensor()?.to_vec::<f32>()?);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an odd width, and a base that is not positive.
    pub fn rotary(&self, base: f64, offset: usize) -> Result<DTensor> {
        DTensor::apply_one(&Rotary { base: Bits(base), offset, inverse: false }, &[self])
    }

    /// Returns the rows of this table, `[rows, width]`, that `index` (i64) names: shape `[index shape.., width]`.
    ///
    /// If the table's rows are sharded, each rank looks up the rows that it holds and the result is `Partial`; the
    /// table is not gathered.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let table = DTensor::distribute(&mesh, &Tensor::from_vec(vec![0.0f32, 0.5, 1.0, 1.5, 2.0, 2.5], [3, 2])?, "(R)".parse()?)?;
    ///     let index = DTensor::distribute(&mesh, &Tensor::from_vec(vec![2i64, 0], [2])?, "(S0)".parse()?)?;
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
    /// other dims are those of this tensor.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3])?, "(S0)".parse()?)?;
    ///     let index = DTensor::distribute(&mesh, &Tensor::from_vec(vec![2i64, 0], [2, 1])?, "(S0)".parse()?)?;
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
    /// (i64) names. It is the transpose of [`DTensor::gather`] and computes its gradient.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 4.0], [3])?, "(R)".parse()?)?;
    ///     let index = DTensor::distribute(&mesh, &Tensor::from_vec(vec![2i64, 0, 2], [3])?, "(R)".parse()?)?;
    ///     assert_eq!(x.scatter_add(0, &index, 3)?.full_tensor()?.to_vec::<f32>()?, [2.0, 0.0, 5.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an `index` that is not i64 or has another shape, and indices outside `extent`.
    pub fn scatter_add(&self, dim: isize, index: &DTensor, extent: usize) -> Result<DTensor> {
        DTensor::apply_one(&ScatterAdd { dim: self.shape().dim("scatter_add", dim)?, extent }, &[index, self])
    }

    /// Returns `-log(softmax(self)[target])` over the last dim: logits `[.., classes]` and targets `[..]` (i64) give
    /// losses `[..]`.
    ///
    /// If the classes are sharded they are not gathered: per row, the ranks reduce one maximum and two sums.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::{DType, Tensor}};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let logits = DTensor::zeros(&mesh, DType::F32, [2, 4], "(S1)".parse()?)?; // a sharded vocabulary
    ///     let target = DTensor::distribute(&mesh, &Tensor::from_vec(vec![3i64, 0], [2])?, "(R)".parse()?)?;
    ///     let loss = logits.cross_entropy(&target)?.full_tensor()?.to_vec::<f32>()?;
    ///     assert!(loss.iter().all(|l| (l - 4f32.ln()).abs() < 1e-6)); // four equal classes
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a `target` that is not i64 or has another shape, and classes that do not exist.
    pub fn cross_entropy(&self, target: &DTensor) -> Result<DTensor> {
        let (m, s) = {
            let _guard = self.mesh.no_grad();
            let max =
                Max { dims: [self.shape().dim("cross_entropy", -1)?].into_iter().collect(), keep: true };
            let m = DTensor::apply_one(&max, &[self])?.reduce_partial()?;
            let s = DTensor::apply_one(&SumExp, &[self, &m])?.reduce_partial()?;
            (m, s)
        };
        DTensor::apply_one(&CrossEntropy, &[self, target, &m, &s])
    }

    /// Applies causal attention to queries, keys and values `[batch, heads, time, width]`:
    /// `softmax(scale * q k^T) v`; each query sees the keys up to its own time. Keys and values may have fewer
    /// heads (grouped queries). Communicates nothing if batch or heads are sharded.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let v = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [1, 2, 2, 1])?, "(S1)".parse()?)?;
    ///     let y = v.attention(&v, &v, 0.5)?;
    ///     assert_eq!(y.spec().to_string(), "f32[1, 2, 2, 1]@(dp:S1)");
    ///     // The first query of each head sees the first key alone.
    ///     assert_eq!(y.slice(2, 0, 1)?.full_tensor()?.to_vec::<f32>()?, [1.0, 3.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses shapes that do not match, and a number of queries other than that of keys: see
    /// [`DTensor::attention_at`].
    pub fn attention(&self, k: &DTensor, v: &DTensor, scale: f64) -> Result<DTensor> {
        self.attention_dropout(k, v, scale, 0.0, Draw { seed: 0, number: 0 })
    }

    /// Applies [`DTensor::attention`] to queries that follow keys of earlier times, as when decoding with a cache:
    /// query `i` has the time `q_offset + i` and sees the keys up to that time; key `j` has the time `j`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::Layout, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let x = Tensor::from_vec((0..16).map(|i| (i as f32 * 0.7).sin()).collect(), [1, 1, 8, 2])?;
    ///     let x = DTensor::distribute(&mesh, &x, Layout::replicated(1))?;
    ///     let whole = x.attention(&x, &x, 0.5)?;
    ///     let last = x.slice(2, 6, 2)?.attention_at(&x, &x, 0.5, 6)?;
    ///     assert_eq!(
    ///         last.full_tensor()?.to_vec::<f32>()?,
    ///         whole.slice(2, 6, 2)?.full_tensor()?.to_vec::<f32>()?
    ///     );
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses shapes that do not match, and queries at times that have no key.
    pub fn attention_at(&self, k: &DTensor, v: &DTensor, scale: f64, q_offset: usize) -> Result<DTensor> {
        let draw = Unkeyed(Draw { seed: 0, number: 0 });
        let op = Attention { scale: Bits(scale), p: Bits(0.0), q_offset: Some(q_offset), draw };
        Ok(DTensor::apply(&op, &[self, k, v])?.remove(0))
    }

    /// Applies [`DTensor::attention`], and drops attention probabilities with probability `p`. `from` is a
    /// `&mut Generator` or a `Draw`. The same elements are dropped on every layout.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, rng::Draw, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let draw = Draw { seed: 7, number: 0 };
    ///     let values = Tensor::from_vec((0..8).map(|i| i as f32).collect(), [1, 2, 4, 1])?;
    ///     let dropped = |layout: &str| -> isoshard::Result<Vec<f32>> {
    ///         let x = DTensor::distribute(&mesh, &values, layout.parse()?)?;
    ///         x.attention_dropout(&x, &x, 1.0, 0.5, draw)?.full_tensor()?.to_vec()
    ///     };
    ///     assert_eq!(dropped("(R)")?, dropped("(S1)")?);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses shapes that do not match, a `p` outside `[0, 1]`, and generators that differ between ranks.
    pub fn attention_dropout(
        &self,
        k: &DTensor,
        v: &DTensor,
        scale: f64,
        p: f64,
        from: impl IntoDraw,
    ) -> Result<DTensor> {
        let draw = from.into_draw("attention", &self.mesh)?;
        let op = Attention { scale: Bits(scale), p: Bits(p), q_offset: None, draw: Unkeyed(draw) };
        Ok(DTensor::apply(&op, &[self, k, v])?.remove(0))
    }

    /// Zeroes each element with probability `p`, and multiplies the others by `1 / (1 - p)`. The mask is a function
    /// of the draw and the element's global index, so it is equal on every layout. `from` is a `&mut Generator` or a
    /// `Draw`. Communicates nothing, except to compare a generator at its [first draw](IntoDraw) on a mesh.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, rng::Generator, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let dropped = |layout: &str| -> isoshard::Result<Vec<f32>> {
    ///         let x = DTensor::full(&mesh, DType::F32, [8], 1.0, layout.parse()?)?;
    ///         x.dropout(0.5, &mut Generator::new(7))?.full_tensor()?.to_vec()
    ///     };
    ///     assert!(dropped("(S0)")?.iter().all(|v| [0.0, 2.0].contains(v)));
    ///     assert_eq!(dropped("(S0)")?, dropped("(R)")?);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a `p` outside `[0, 1]`, and generators that differ between ranks.
    pub fn dropout(&self, p: f64, from: impl IntoDraw) -> Result<DTensor> {
        let draw = from.into_draw("dropout", &self.mesh)?;
        DTensor::apply_one(&Dropout { p: Bits(p), draw: Unkeyed(draw) }, &[self])
    }
}
