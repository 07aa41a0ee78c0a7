//! Activation functions that are compositions of other operators.

use crate::dtensor::tensor::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::ops::{Bits, Clamp};
use crate::tensor::Scalar;

/// Activation functions that are compositions of other operators.
impl DTensor {
    /// Returns `min(max(x, 0), 6)`. The gradient is 0 from 6 on and up to 0. Communicates nothing unless this tensor is
    /// a partial sum.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![-1.0f32, 2.0, 9.0], [3])?, "(S0)")?;
    ///     assert_eq!(x.relu6()?.full_tensor()?.to_vec::<f32>()?, [0.0, 2.0, 6.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses integers and bools.
    pub fn relu6(&self) -> Result<DTensor> {
        self.hardtanh(0.0, 6.0).map_err(|e| e.called("relu6"))
    }

    /// Limits elements to the interval from `min` to `max`, as [`DTensor::clamp`]. Communicates nothing unless this
    /// tensor is a partial sum.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![-2.0f32, 0.5, 9.0], [3])?, "(S0)")?;
    ///     assert_eq!(x.hardtanh(-1.0, 1.0)?.full_tensor()?.to_vec::<f32>()?, [-1.0, 0.5, 1.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses integers and bools, and a bound that is NaN.
    pub fn hardtanh(&self, min: f64, max: f64) -> Result<DTensor> {
        self.dtype().expect_float("hardtanh")?;
        self.clamp(min, max)
    }

    /// Returns `x` if it is positive, else `x · slope` (Maas, Hannun, Ng 2013). Communicates nothing unless this tensor
    /// is `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![-2.0f32, 0.5, 9.0], [3])?, "(S0)")?;
    ///     assert_eq!(x.leaky_relu(0.25)?.full_tensor()?.to_vec::<f32>()?, [-0.5, 0.5, 9.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses integers and bools.
    pub fn leaky_relu(&self, slope: f64) -> Result<DTensor> {
        self.dtype().expect_float("leaky_relu")?;
        self.with_number("leaky_relu", slope.into(), |x, slope| x.prelu(slope))
    }

    /// Returns `value` if `x` is at most `threshold`, else `x`. NaN stays NaN. Communicates nothing unless this tensor is
    /// `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![-2.0f32, 0.5, 9.0], [3])?, "(S0)")?;
    ///     assert_eq!(x.threshold(1.0, 7.0)?.full_tensor()?.to_vec::<f32>()?, [7.0, 7.0, 9.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a number that an integer dtype does not have.
    pub fn threshold(&self, threshold: impl Into<Scalar>, value: impl Into<Scalar>) -> Result<DTensor> {
        let below = self.le_scalar(threshold).map_err(|e| e.called("threshold"))?;
        below.select(&self.number("threshold", value.into())?, self)
    }

    /// Returns `x` if it is positive, else `alpha (e^(x / alpha) - 1)`: an exponential linear unit whose slope is 1 at
    /// 0 for every `alpha` (Barron 2017). Communicates nothing unless this tensor is `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![-2.0f32, 0.0, 9.0], [3])?, "(S0)")?;
    ///     assert_eq!(format!("{:.3?}", x.celu(2.0)?.full_tensor()?.to_f64_vec()), "[-1.264, 0.000, 9.000]");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses integers and bools, and `alpha` 0.
    pub fn celu(&self, alpha: f64) -> Result<DTensor> {
        self.dtype().expect_float("celu")?;
        if alpha == 0.0 || alpha.is_nan() {
            return Err(Error::invalid("celu", "wants an alpha that is not 0", format!("{alpha:?}"), ""));
        }
        let (min, max) = (Bits(f64::NEG_INFINITY), Bits(0.0));
        let below = DTensor::apply_one(&Clamp { min, max, open: false }, &[self])?;
        let below = below.div_scalar(alpha)?.expm1()?.mul_scalar(alpha)?;
        self.relu()?.add(&below)
    }

    /// Splits `dim` into two halves `a` and `b` and returns `a · sigmoid(b)`: the gated linear unit (Dauphin et al.
    /// 2017). Communicates nothing if the ranks hold `dim` whole.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = Tensor::from_vec(vec![2.0f32, 4.0, 0.0, 0.0], [1, 4])?;
    ///     let x = DTensor::distribute(&mesh, &x, "(R)")?;
    ///     assert_eq!(x.glu(-1)?.full_tensor()?.to_vec::<f32>()?, [1.0, 2.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have, and an odd extent.
    pub fn glu(&self, dim: isize) -> Result<DTensor> {
        let [a, b] = self.halves("glu", dim)?;
        a.mul(&b.sigmoid().map_err(|e| e.called("glu"))?)
    }

    /// Splits `dim` into two halves `a` and `b` and returns `gelu(a) · b` (Shazeer 2020).
    /// Communicates nothing if the ranks hold `dim` whole.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = Tensor::from_vec(vec![2.0f32, 4.0, 0.0, 0.0], [1, 4])?;
    ///     let x = DTensor::distribute(&mesh, &x, "(R)")?;
    ///     assert_eq!(x.geglu(-1)?.full_tensor()?.to_vec::<f32>()?, [0.0, 0.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have, and an odd extent.
    pub fn geglu(&self, dim: isize) -> Result<DTensor> {
        let [a, b] = self.halves("geglu", dim)?;
        a.gelu().map_err(|e| e.called("geglu"))?.mul(&b)
    }

    /// Splits `dim` into two halves `a` and `b` and returns `silu(a) · b` (Shazeer 2020).
    /// Communicates nothing if the ranks hold `dim` whole.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = Tensor::from_vec(vec![2.0f32, 4.0, 0.0, 0.0], [1, 4])?;
    ///     let x = DTensor::distribute(&mesh, &x, "(R)")?;
    ///     assert_eq!(x.swiglu(-1)?.full_tensor()?.to_vec::<f32>()?, [0.0, 0.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have, and an odd extent.
    pub fn swiglu(&self, dim: isize) -> Result<DTensor> {
        let [a, b] = self.halves("swiglu", dim)?;
        a.silu().map_err(|e| e.called("swiglu"))?.mul(&b)
    }

    /// Splits a dim in the middle.
    fn halves(&self, verb: &'static str, dim: isize) -> Result<[DTensor; 2]> {
        let extent = self.shape()[self.shape().dim(verb, dim)?];
        if !extent.is_multiple_of(2) {
            let given = format!("dim {dim} of {}", self.spec());
            return Err(Error::invalid(verb, "wants a dim of even extent", given, "pad or slice it"));
        }
        let mut halves = self.split(&[extent / 2, extent / 2], dim)?;
        let b = halves.pop().expect("two halves");
        Ok([halves.remove(0), b])
    }

    /// Returns [`softplus`](DTensor::softplus) of `beta · x`, divided by `beta`, and `x` itself if `beta · x` is above
    /// `threshold` (20 in PyTorch). Communicates nothing unless this tensor is `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![0.0f64, 3.0], [2])?, "(S0)")?;
    ///     let y = x.softplus_with(2.0, 4.0)?.full_tensor()?.to_f64_vec();
    ///     assert_eq!(y, [2f64.ln() / 2.0, 3.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a `beta` that is 0 or not finite, and dtypes that are not floating-point.
    pub fn softplus_with(&self, beta: f64, threshold: f64) -> Result<DTensor> {
        if beta == 0.0 || !beta.is_finite() {
            let rule = "beta is a finite number other than 0";
            return Err(Error::invalid("softplus_with", rule, beta.to_string(), "choose another beta"));
        }
        let scaled = self.mul_scalar(beta).map_err(|e| e.called("softplus_with"))?;
        let soft = scaled.softplus().map_err(|e| e.called("softplus_with"))?.mul_scalar(1.0 / beta)?;
        scaled.gt(&scaled.full_like(threshold)?)?.select(self, &soft)
    }
}
