//! Softmax and normalisation over a dim.

use smallvec::SmallVec;

use crate::dtensor::DTensor;
use crate::dtensor::call::recompute_cheap::mark_as_computed;
use crate::error::Result;
use crate::ops::{AddLayerNorm, AddRmsNorm, Bits, LayerNorm, LogSoftmax, Op, RmsNorm, Softmax};
use crate::tensor::short_list;

/// Softmax and normalisation.
impl DTensor {
    /// Returns `exp(x) / sum(exp(x))` along `dim`, computed without overflow. Communicates nothing if the ranks hold
    /// `dim` whole.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![0.0f32, 0.0, 9.0, 9.0], [2, 2])?, "(S0)")?;
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

    /// Returns the logarithm of [`DTensor::softmax`], computed without overflow. Communicates as `softmax` does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![0.0f32, 0.0, 9.0, 9.0], [2, 2])?, "(S0)")?;
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
    /// f32, f16 and bf16 are right for elements of any magnitude with an `eps` from 1e-12 on, and without one as long as the
    /// deviations are above 1e-18 (below, the variance is subnormal in f32).
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 3.0, 2.0, 6.0], [2, 2])?, "(S0)")?;
    ///     let weight = DTensor::full(&mesh, x.dtype(), [2], "(R)", 10.0)?;
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
        let op = LayerNorm { eps: Bits(eps), weight: true, bias: bias.is_some() };
        let ins: SmallVec<[&DTensor; 3]> = short_list([self, weight].into_iter().chain(bias));
        Ok(DTensor::apply(&op, &ins)?.remove(0))
    }

    /// Applies root-mean-square normalisation over the last dim (Zhang and Sennrich, 2019):
    /// `x / sqrt(mean(x * x) + eps) * weight`. Communicates nothing if the ranks hold the last dim whole. Its range is that of
    /// [`DTensor::layer_norm`].
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![2.0f32, 2.0, 4.0, -4.0], [2, 2])?, "(S0)")?;
    ///     let weight = DTensor::full(&mesh, x.dtype(), [2], "(R)", 3.0)?;
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

    /// Returns `s = x + residual` after a [`DTensor::layer_norm`], and `s`, in one pass: `(norm(s), s)`.
    ///
    /// In f32 and f64 results and gradients have the bits of the two operators. In f16 and bf16 the norm is that of the
    /// sum before it is rounded, so a program says which it means by what it calls. Both give the same bits on every mesh.
    /// Communicates nothing if the ranks hold the last dim whole.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let put = |x: &[f32]| DTensor::distribute(&mesh, &Tensor::from_slice(x, [2, 2])?, "(S0)");
    ///     let (x, residual) = (put(&[1.0, 1.0, 2.0, 2.0])?, put(&[0.0, 2.0, 0.0, 4.0])?);
    ///     let weight = DTensor::full(&mesh, x.dtype(), [2], "(R)", 10.0)?;
    ///     let (y, sum) = x.add_layer_norm(&residual, &weight, None, 0.0)?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [-10.0, 10.0, -10.0, 10.0]);
    ///     assert_eq!(sum.full_tensor()?.to_vec::<f32>()?, [1.0, 3.0, 2.0, 6.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a residual of another dtype or shape, and what [`DTensor::layer_norm`] refuses.
    pub fn add_layer_norm(
        &self,
        residual: &DTensor,
        weight: &DTensor,
        bias: Option<&DTensor>,
        eps: f64,
    ) -> Result<(DTensor, DTensor)> {
        let op = AddLayerNorm { eps: Bits(eps), bias: bias.is_some() };
        let norm = LayerNorm { eps: Bits(eps), weight: true, bias: bias.is_some() };
        let weights: SmallVec<[&DTensor; 2]> = short_list(std::iter::once(weight).chain(bias));
        self.add_norm(residual, &op, &norm, &weights)
    }

    /// Returns `s = x + residual` after a [`DTensor::rms_norm`], and `s`, in one pass: `(norm(s), s)`. Rounds and
    /// communicates as [`DTensor::add_layer_norm`] does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let full = |shape: &[usize], value, layout: &str| DTensor::full(&mesh, DType::F32, shape, layout, value);
    ///     let (x, residual, weight) = (full(&[2, 4], 1.0, "(S0)")?, full(&[2, 4], 2.0, "(S0)")?, full(&[4], 5.0, "(R)")?);
    ///     let (y, sum) = x.add_rms_norm(&residual, &weight, 0.0)?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [5.0; 8]);
    ///     assert_eq!(sum.full_tensor()?.to_vec::<f32>()?, [3.0; 8]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a residual of another dtype or shape, and what [`DTensor::rms_norm`] refuses.
    pub fn add_rms_norm(&self, residual: &DTensor, weight: &DTensor, eps: f64) -> Result<(DTensor, DTensor)> {
        let (op, norm) = (AddRmsNorm { eps: Bits(eps) }, RmsNorm { eps: Bits(eps) });
        self.add_norm(residual, &op, &norm, &[weight])
    }

    /// Applies `op`, whose first result is that of `norm` for the second one.
    fn add_norm(
        &self,
        residual: &DTensor,
        op: &dyn Op,
        norm: &dyn Op,
        weights: &[&DTensor],
    ) -> Result<(DTensor, DTensor)> {
        let ins: SmallVec<[&DTensor; 4]> =
            [self, residual].into_iter().chain(weights.iter().copied()).collect();
        let mut results = DTensor::apply(op, &ins)?;
        if let [y, sum, ..] = &mut results[..]
            && !y.dtype().is_half()
        {
            let ins: SmallVec<[&DTensor; 3]> =
                std::iter::once(&*sum).chain(weights.iter().copied()).collect();
            mark_as_computed(y, norm, &ins)?;
        }
        let y = results.remove(0);
        Ok((y, results.remove(0)))
    }
}
