//! Losses per element, and losses of vectors.
//!
//! The methods communicate nothing unless they reduce: a mean or sum over a sharded tensor reduces one number. As for
//! [`DTensor::matmul`], exact mode reduces over a sharded dim only if no boundary cuts a leaf of the reduction tree;
//! otherwise the operands are redistributed.

use super::loss_reduction::LossReduction;
use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::ops::{InversePowerOfTwo, Mask};
use crate::tensor::DType;

/// Losses per element, and losses of vectors.
impl DTensor {
    /// Returns the squared error `(self - target)²`. Shapes broadcast. Communicates as its [reduction](LossReduction)
    /// does if both operands have one shape and layout, or one is replicated; otherwise one is redistributed first.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh, LossReduction}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 5.0], [3])?, "(S0)")?;
    ///     let y = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 1.0, 1.0], [3])?, "(S0)")?;
    ///     assert_eq!(x.mse_loss(&y, LossReduction::None)?.full_tensor()?.to_vec::<f32>()?, [0.0, 1.0, 16.0]);
    ///     assert_eq!(x.mse_loss(&y, LossReduction::Sum)?.item()?, 17.0);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses shapes that do not broadcast, dtypes that differ, and dtypes that are not floating-point.
    pub fn mse_loss(&self, target: &DTensor, reduction: LossReduction) -> Result<DTensor> {
        let loss = || reduction.apply(&self.sub(target)?.pow_scalar(2.0)?);
        loss().map_err(|e| e.called("mse_loss"))
    }

    /// Returns the absolute error `|self - target|`. Shapes broadcast. Communicates as its [reduction](LossReduction)
    /// does if both operands have one shape and layout, or one is replicated; otherwise one is redistributed first.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh, LossReduction}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 6.0], [3])?, "(S0)")?;
    ///     let y = DTensor::full(&mesh, x.dtype(), [1], "(R)", 3.0)?;
    ///     assert_eq!(x.l1_loss(&y, LossReduction::Mean)?.item()?, 2.0);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`DTensor::mse_loss`] refuses.
    pub fn l1_loss(&self, target: &DTensor, reduction: LossReduction) -> Result<DTensor> {
        let loss = || reduction.apply(&self.sub(target)?.abs()?);
        loss().map_err(|e| e.called("l1_loss"))
    }

    /// Returns Huber's loss (1964) of the error `d = |self - target|`: `d² / 2` up to `delta`, and `delta (d - delta /
    /// 2)` above. Shapes broadcast. Communicates as its [reduction](LossReduction) does if both operands have one
    /// layout, or one is replicated; otherwise one is redistributed first.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh, LossReduction}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, -6.0], [2])?, "(S0)")?;
    ///     let zero = DTensor::zeros(&mesh, x.dtype(), [2], "(S0)")?;
    ///     let loss = x.huber_loss(&zero, 2.0, LossReduction::None)?;
    ///     assert_eq!(loss.full_tensor()?.to_vec::<f32>()?, [0.5, 10.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a `delta` that is not positive, and what [`DTensor::mse_loss`] refuses.
    pub fn huber_loss(&self, target: &DTensor, delta: f64, reduction: LossReduction) -> Result<DTensor> {
        expect_bound("huber_loss", "delta is positive and finite", delta, delta > 0.0)?;
        let loss = || reduction.apply(&self.huber(target, delta)?);
        loss().map_err(|e| e.called("huber_loss"))
    }

    /// Returns the smooth absolute error (Girshick, *Fast R-CNN*, 2015): `d² / (2 beta)` for `d = |self - target|` up
    /// to `beta`, and `d - beta / 2` above. It is [Huber's loss](DTensor::huber_loss) divided by `beta`; `beta = 0`
    /// gives the [absolute error](DTensor::l1_loss). Shapes broadcast. Communicates as its [reduction](LossReduction)
    /// does if both operands have one shape and layout, or one is replicated; otherwise one is redistributed first.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh, LossReduction}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, -6.0], [2])?, "(S0)")?;
    ///     let zero = DTensor::zeros(&mesh, x.dtype(), [2], "(S0)")?;
    ///     let loss = x.smooth_l1_loss(&zero, 2.0, LossReduction::None)?;
    ///     assert_eq!(loss.full_tensor()?.to_vec::<f32>()?, [0.25, 5.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a `beta` that is negative or not finite, and what [`DTensor::mse_loss`] refuses.
    pub fn smooth_l1_loss(&self, target: &DTensor, beta: f64, reduction: LossReduction) -> Result<DTensor> {
        expect_bound("smooth_l1_loss", "beta is finite and not negative", beta, beta >= 0.0)?;
        let loss = || match beta {
            0.0 => self.l1_loss(target, reduction),
            _ => reduction.apply(&self.huber(target, beta)?.mul_scalar(1.0 / beta)?),
        };
        loss().map_err(|e| e.called("smooth_l1_loss"))
    }

    /// Returns `c (d - c / 2)` for `d = |self - target|` and `c = min(d, delta)`.
    fn huber(&self, target: &DTensor, delta: f64) -> Result<DTensor> {
        let distance = self.sub(target)?.abs()?;
        let bounded = distance.minimum(&distance.number_like(delta)?)?;
        distance.sub(&bounded.mul_scalar(0.5)?)?.mul(&bounded)
    }

    /// Returns the terms of the Kullback-Leibler divergence of these log-probabilities from `target`:
    /// `p (ln(p) - self)`, where `p` is `target`, or `exp(target)` with `log_target`. Shapes broadcast. Terms with
    /// `p = 0` are 0.
    ///
    /// The divergence of distributions is the sum over their elements. [`LossReduction::Mean`] divides by the number of
    /// elements; divide the sum by the number of distributions for their mean divergence (PyTorch's `batchmean`).
    /// Communicates as its [reduction](LossReduction) does if both operands have one shape and layout, or one is replicated;
    /// otherwise one is redistributed first.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh, LossReduction}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let p = DTensor::distribute(&mesh, &Tensor::from_vec(vec![0.5f64, 0.5, 0.0], [3])?, "(S0)")?;
    ///     let q = DTensor::full(&mesh, p.dtype(), [3], "(S0)", 0.25)?;
    ///     let divergence = q.log()?.kl_div_loss(&p, false, LossReduction::Sum)?.item()?;
    ///     assert!((divergence - 2f64.ln()).abs() < 1e-15);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`DTensor::mse_loss`] refuses.
    pub fn kl_div_loss(
        &self,
        target: &DTensor,
        log_target: bool,
        reduction: LossReduction,
    ) -> Result<DTensor> {
        let shape = self.shape().broadcast("kl_div_loss", target.shape())?;
        let (logq, target) = (self.expand(shape.clone())?, target.expand(shape)?);
        let (p, logp) = if log_target { (target.exp()?, target) } else { (target.clone(), target) };
        let positive = p.ne(&p.number_like(0.0)?)?;
        let masked = |x: &DTensor| DTensor::apply_one(&Mask { on: true }, &[&positive, x]);
        let distance = if log_target {
            masked(&logp.sub(&logq)?)?
        } else {
            // The logarithm of 1 in place of that of 0 keeps the gradient finite.
            positive.select(&p, &p.number_like(1.0)?)?.log()?.sub(&masked(&logq)?)?
        };
        reduction.apply(&p.mul(&distance)?)
    }

    /// Returns the cosine of the angle between vectors along `dim`:
    /// `x · y / (max(|x|, eps) max(|y|, eps))`. Shapes broadcast. All dtypes compute in f64 and round once; f64 vectors
    /// are first scaled by a power of two of their largest element, so that no square overflows or underflows.
    ///
    /// If `dim` is sharded, the ranks reduce three numbers per vector, and two maxima for f64, and gather nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![3.0f32, 4.0, 0.0, 2.0], [2, 2])?, "(S1)")?;
    ///     let y = DTensor::distribute(&mesh, &Tensor::from_vec(vec![4.0f32, 3.0], [2])?, "(S0)")?;
    ///     let cos = x.cosine_similarity(&y, -1, 1e-8)?.full_tensor()?.to_vec::<f32>()?;
    ///     assert!((cos[0] - 0.96).abs() < 1e-6 && (cos[1] - 0.6).abs() < 1e-6);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses shapes that do not broadcast, a dim that the result of broadcasting lacks, dtypes that differ or are not
    /// floating-point, and an `eps` that is negative or not finite.
    pub fn cosine_similarity(&self, other: &DTensor, dim: isize, eps: f64) -> Result<DTensor> {
        const VERB: &str = "cosine_similarity";
        expect_bound(VERB, "eps is finite and not negative", eps, eps >= 0.0)?;
        let cosine = CosineTerms::new(VERB, [self, other], dim, false)?;
        let norms = cosine.each(|square, scale| {
            let bound = match scale {
                Some(scale) => scale.mul_scalar(eps)?,
                None => square.number_like(eps)?,
            };
            square.root_or_zero(0.5)?.maximum(&bound)
        })?;
        cosine.over(&norms)?.cast(self.dtype())
    }

    /// Returns the loss of pairs of vectors along the last dim that should point in the same direction (target 1) or in
    /// different ones (target -1): `1 - cos`, or `max(0, cos - margin)`. Another target gives 0. Vectors
    /// `[.., width]` and targets `[..]`, of any dtype, give losses `[..]`.
    ///
    /// As in PyTorch, the cosine is `x · y / sqrt((|x|² + 1e-12) (|y|² + 1e-12))`. It is computed and communicated as in
    /// [`DTensor::cosine_similarity`].
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh, LossReduction}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 0.0, 0.0, 1.0], [2, 2])?, "(S1)")?;
    ///     let y = DTensor::distribute(&mesh, &Tensor::from_vec(vec![0.0f32, 1.0, 0.0, 1.0], [2, 2])?, "(S1)")?;
    ///     let target = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1i64, -1], [2])?, "(R)")?;
    ///     let loss = x.cosine_embedding_loss(&y, &target, 0.25, LossReduction::None)?;
    ///     let loss = loss.full_tensor()?.to_vec::<f32>()?;
    ///     assert!((loss[0] - 1.0).abs() < 1e-6 && (loss[1] - 0.75).abs() < 1e-6);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses vectors and targets whose shapes do not broadcast, dtypes that differ or are not floating-point, and a
    /// `margin` outside `[-1, 1]`.
    pub fn cosine_embedding_loss(
        &self,
        other: &DTensor,
        target: &DTensor,
        margin: f64,
        reduction: LossReduction,
    ) -> Result<DTensor> {
        const VERB: &str = "cosine_embedding_loss";
        expect_bound(VERB, "the margin lies in [-1, 1]", margin, (-1.0..=1.0).contains(&margin))?;
        let cosine = CosineTerms::new(VERB, [self, other], -1, true)?;
        let norms = cosine.each(|square, scale| match scale {
            Some(scale) => square.add(&scale.mul(scale)?.mul_scalar(1e-12)?)?.sqrt(),
            None => square.add_scalar(1e-12)?.sqrt(),
        })?;
        let cos = cosine.over(&norms)?;
        let (near, far) = (cos.neg()?.add_scalar(1.0)?, cos.add_scalar(-margin)?.relu()?);
        let is = |value: f64| target.eq(&target.number_like(value)?);
        let zero = cos.number_like(0.0)?;
        let losses = is(1.0)?.select(&near, &is(-1.0)?.select(&far, &zero)?)?;
        reduction.apply(&losses.cast(self.dtype())?)
    }
}

/// The sums of a cosine of two vectors, in f64. f64 vectors are scaled.
struct CosineTerms {
    /// The dim of the vectors, which has extent 1 in all sums.
    dim: usize,
    /// `x · y`.
    dot: DTensor,
    /// `x · x` and `y · y`, each with the factor by which the vector is multiplied, a power of two.
    squares: [(DTensor, Option<DTensor>); 2],
}

impl CosineTerms {
    /// Computes the sums along `dim` of the broadcast shape. With `shrink`, vectors are scaled down only.
    fn new(verb: &str, [x, y]: [&DTensor; 2], dim: isize, shrink: bool) -> Result<CosineTerms> {
        x.dtype().expect_float(verb)?;
        if x.dtype() != y.dtype() {
            let given = format!("{} and {}", x.spec(), y.spec());
            return Err(Error::invalid(verb, "the dtypes differ", given, "cast one of them"));
        }
        let shape = x.shape().broadcast(verb, y.shape())?;
        let dim = shape.dim(verb, dim)?;
        let scaled = |v: &DTensor| -> Result<(DTensor, Option<DTensor>)> {
            let v = v.cast(DType::F64)?.expand(shape.clone())?;
            if x.dtype() != DType::F64 || shape[dim] == 0 {
                return Ok((v, None));
            }
            let scale = {
                let _guard = v.mesh.no_grad();
                let scale =
                    DTensor::apply_one(&InversePowerOfTwo, &[&v.leading_magnitude(1.0, &[dim as isize])?])?;
                if shrink { scale.clamp_max(1.0)? } else { scale }
            };
            Ok((v.mul(&scale)?, Some(scale)))
        };
        let ((x, of_x), (y, of_y)) = (scaled(x)?, scaled(y)?);
        let sum = |a: &DTensor, b: &DTensor| a.mul(b)?.sum(&[dim as isize], true);
        Ok(CosineTerms { dim, dot: sum(&x, &y)?, squares: [(sum(&x, &x)?, of_x), (sum(&y, &y)?, of_y)] })
    }

    /// Returns a function of each square and scale.
    fn each(&self, of: impl Fn(&DTensor, Option<&DTensor>) -> Result<DTensor>) -> Result<[DTensor; 2]> {
        let [(x, of_x), (y, of_y)] = &self.squares;
        Ok([of(x, of_x.as_ref())?, of(y, of_y.as_ref())?])
    }

    /// Returns the product of the vectors divided by their norms, without the dim.
    fn over(&self, [x, y]: &[DTensor; 2]) -> Result<DTensor> {
        self.dot.div(&x.mul(y)?)?.squeeze(self.dim as isize)
    }
}

/// Refuses a number that is not finite, or for which `fits` is false.
pub(in crate::dtensor::methods) fn expect_bound(
    verb: &str,
    rule: &str,
    number: f64,
    fits: bool,
) -> Result<()> {
    if fits && number.is_finite() { Ok(()) } else { Err(Error::invalid(verb, rule, number.to_string(), "")) }
}
