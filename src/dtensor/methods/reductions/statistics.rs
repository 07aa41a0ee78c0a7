//! Variance, standard deviation, logarithms of sums of exponentials, norms, and counts.
//!
//! They consist of sums along the reduction tree, so a sharded reduced dim is not gathered: ranks exchange a few numbers
//! per result.

use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::ops::{
    Bits, Compare, CompareKind, InversePowerOfTwo, Mask, Max, Select, Sum, SumTerm, TermSum, accumulator,
};
use crate::tensor::{DType, Dims};

/// Statistics over dims.
impl DTensor {
    /// Returns the variance over `dims`, with the divisor `n - correction` for `n` elements: 0 for the variance of these
    /// elements, 1 for the unbiased estimate. With `keep`, the dims stay with extent 1.
    ///
    /// Computed in two passes in f32 (f64 for f64): the sum of squared deviations from the rounded mean, corrected for the
    /// rounding (Chan, Golub, LeVeque, 1983). If a reduced dim is sharded, ranks reduce three numbers per result. The
    /// result is NaN if `n` is 0, and infinite or NaN if `n` equals `correction`, as in PyTorch. It is infinite if the sum
    /// of squares is, and inaccurate if squares are subnormal: [`DTensor::std`] has no such range.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 6.0], [4])?, "(S0)")?;
    ///     assert_eq!(x.var(&[0], 0, false)?.item()?, 3.5);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dims that the tensor does not have, dims that repeat, and dtypes that are not floating-point.
    pub fn var(&self, dims: &[isize], correction: usize, keep: bool) -> Result<DTensor> {
        let dims = self.dims("var", dims)?;
        self.expect_reducible("var", &dims)?;
        self.variance(&dims, correction)?.finish(self.dtype(), &dims, keep)
    }

    /// Returns the standard deviation over `dims`: the square root of [`DTensor::var`]. Its gradient is 0 if all
    /// elements are equal.
    ///
    /// Elements of magnitudes that make squares overflow or underflow are first scaled by a power of two, so that it is
    /// right for all finite ones. Communicates as `var` does, and reduces one maximum more per result unless the dtype
    /// is f16, whose squares are in the range of f32.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 5.0, 2.0, 2.0], [2, 2])?, "(S1)")?;
    ///     assert_eq!(x.std(&[1], 0, false)?.full_tensor()?.to_vec::<f32>()?, [2.0, 0.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`DTensor::var`] refuses.
    pub fn std(&self, dims: &[isize], correction: usize, keep: bool) -> Result<DTensor> {
        let (dims, list) = (self.dims("std", dims)?, dims);
        self.expect_reducible("std", &dims)?;
        let root = match self.square_scale(list)? {
            None => self.variance(&dims, correction)?.root_or_zero(0.5)?,
            Some(scale) => {
                let scaled = self.mul(&scale.cast(self.dtype())?)?;
                let root = scaled.variance(&dims, correction)?.root_or_zero(0.5)?;
                let wide = root.dtype();
                root.div(&scale.cast(wide)?)?
            }
        };
        root.finish(self.dtype(), &dims, keep)
    }

    /// Returns `ln(sum(e^x))` over `dims`, computed without overflow: the maximum is subtracted first. With `keep`, the
    /// dims stay with extent 1.
    ///
    /// If a reduced dim is sharded, ranks reduce one maximum and one sum per result. The result is -inf if all elements
    /// are -inf, and inf if one is inf; gradients are NaN there, as in PyTorch.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1e3f32, 1e3], [1, 2])?, "(S1)")?;
    ///     let y = x.logsumexp(&[1], false)?.item()?;
    ///     assert!((y - (1e3 + 2f64.ln())).abs() < 1e-4);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dims that the tensor does not have, dims that repeat, dims without elements, and dtypes that are not
    /// floating-point.
    pub fn logsumexp(&self, dims: &[isize], keep: bool) -> Result<DTensor> {
        let dims = self.dims("logsumexp", dims)?;
        self.expect_reducible("logsumexp", &dims)?;
        if dims.iter().any(|&d| self.shape()[d] == 0) {
            let given = format!("dims {dims:?} of {}", self.spec());
            return Err(Error::invalid("logsumexp", "no elements to sum", given, ""));
        }
        let shift = {
            let _guard = self.mesh.no_grad();
            let max =
                DTensor::apply_one(&Max { dims: dims.clone(), keep: true }, &[self])?.reduce_partial()?;
            let max = max.cast(accumulator(self.dtype()))?;
            // An infinite or NaN maximum is not subtracted; the exponentials then give the result's special case.
            let finite = max.sub(&max)?.eq(&max.zeros_like()?)?;
            DTensor::apply_one(&Mask { on: true }, &[&finite, &max])?
        };
        let sums = self.sum_terms(SumTerm::ExpDifference, &dims, &shift)?.reduce_partial()?;
        sums.log()?.add(&shift)?.finish(self.dtype(), &dims, keep)
    }

    /// Returns the norm of order `p` over `dims`: `(Σ |x|^p)^(1/p)`, the number of elements that are not 0 for `p = 0`, the
    /// largest magnitude for infinity and the smallest for negative infinity. With `keep`, the dims stay with extent 1.
    ///
    /// f32, f16 and bf16 are computed in f64 for `p` from 1 to 6. f64 and other orders are first scaled by a power of two of
    /// the largest magnitude, or of the smallest for a negative `p`, so that no power overflows or underflows; beyond 512
    /// and -512 they are divided by it. A negative order gives 0 if an element is 0, as its limit. The gradient is 0 if `x`
    /// is 0, and at a norm of 0. It is shared evenly among equal extremes.
    ///
    /// If a reduced dim is sharded, ranks reduce one number per result, and one maximum or minimum more if elements are
    /// scaled.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![3e30f32, -4e30], [2])?, "(S0)")?;
    ///     let norm = |p: f64| x.norm(p, &[0], false)?.item();
    ///     assert_eq!(norm(2.0)? as f32, 5e30); // squares of f32 would overflow
    ///     assert_eq!((norm(0.0)?, norm(f64::INFINITY)? as f32), (2.0, 4e30));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dims that the tensor does not have, dims that repeat, dtypes that are not floating-point, a `p` that is
    /// NaN, and dims without elements for negative or infinite `p`.
    pub fn norm(&self, p: f64, dims: &[isize], keep: bool) -> Result<DTensor> {
        let (dims, list) = (self.dims("norm", dims)?, dims);
        self.expect_reducible("norm", &dims)?;
        let is_empty = dims.iter().any(|&d| self.shape()[d] == 0);
        if p.is_nan() || (is_empty && !(0.0..f64::INFINITY).contains(&p)) {
            let given = format!("p = {p} over dims {dims:?} of {}", self.spec());
            return Err(Error::invalid("norm", "has no such value", given, "use an order that is positive"));
        }
        if p == 0.0 {
            return self.count_nonzero(list, keep)?.cast(self.dtype());
        }
        if p == f64::INFINITY {
            return self.abs()?.max(list, keep);
        }
        if p == f64::NEG_INFINITY {
            return self.abs()?.min(list, keep);
        }
        let in_range = (1.0..=6.0).contains(&p) && self.dtype() != DType::F64;
        if in_range || is_empty {
            let scale = self.ones_beside(&dims)?;
            return self.power_norm(p, &dims, &scale)?.finish(self.dtype(), &dims, keep);
        }
        let extreme = {
            let _guard = self.mesh.no_grad();
            self.leading_magnitude(p, list)?
        };
        if p.abs() <= 512.0 {
            let scale = DTensor::apply_one(&InversePowerOfTwo, &[&extreme])?;
            return self.power_norm(p, &dims, &scale)?.finish(self.dtype(), &dims, keep);
        }
        // Divided by the extreme, its power is 1 for every order.
        let divisor = extreme.finite_or_one()?;
        let ratios = self.cast(DType::F64)?.div(&divisor)?;
        let norm = ratios.power_norm(p, &dims, &self.ones_beside(&dims)?)?.mul(&divisor)?;
        norm.finish(self.dtype(), &dims, keep)
    }

    /// Returns the norm of order `p` over `dims`, which stay with extent 1, in f64. Elements are multiplied by `scale`
    /// before they are raised to the power.
    fn power_norm(&self, p: f64, dims: &Dims, scale: &DTensor) -> Result<DTensor> {
        let sums = self.sum_terms(SumTerm::Power(Bits(p)), dims, scale)?.reduce_partial()?;
        sums.root_or_zero(1.0 / p)?.div(scale)
    }

    /// Returns the magnitude that decides a norm of order `p`: over `dims`, which stay with extent 1, the largest for a
    /// positive order and the smallest for a negative one, in f64.
    pub(in crate::dtensor::methods) fn leading_magnitude(&self, p: f64, dims: &[isize]) -> Result<DTensor> {
        let magnitudes = self.abs()?;
        let extreme = if p > 0.0 { magnitudes.max(dims, true)? } else { magnitudes.min(dims, true)? };
        extreme.reduce_partial()?.cast(DType::F64)
    }

    /// Returns a power of two per result over `dims`, in f64, that brings elements where their squares, and the squares of
    /// their differences, neither overflow nor underflow in the accumulator. It is 1 if they are there already. `None` if
    /// no element of the dtype needs one, or if there are no elements.
    fn square_scale(&self, dims: &[isize]) -> Result<Option<DTensor>> {
        // Magnitudes from 2^-low to 2^high stay as they are: their differences are above 2^-(low + digits), with 24 or 53
        // digits, and as many squares as an address space has elements have a finite sum. A factor no further from 1
        // than necessary keeps the incoming gradient, which is divided by it, in range.
        let (low, high) = match self.dtype() {
            DType::F64 => (450, 450),
            DType::F32 | DType::BF16 => (38, 30),
            _ => return Ok(None),
        };
        if self.shape().numel() == 0 {
            return Ok(None);
        }
        let _guard = self.mesh.no_grad();
        let inverse = DTensor::apply_one(&InversePowerOfTwo, &[&self.leading_magnitude(1.0, dims)?])?;
        let kept = inverse.clamp((-high as f64).exp2(), (low as f64).exp2())?;
        inverse.div(&kept).map(Some)
    }

    /// Returns the elements that are finite and not 0, and 1 in place of the others. Has no gradient.
    fn finite_or_one(&self) -> Result<DTensor> {
        let _guard = self.mesh.no_grad();
        let usable = self.isfinite()?.bitwise_and(&self.is_nonzero()?)?;
        DTensor::apply_one(&Select, &[&usable, self, &self.ones_like()?])
    }

    /// Returns true if any element over `dims` is not 0. With `keep`, the dims stay with extent 1. NaN counts as not 0;
    /// over no elements the result is false. If a reduced dim is sharded, ranks reduce one byte per result.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![0i64, 2, 0, 0], [2, 2])?, "(S1)")?;
    ///     assert_eq!(x.any(&[1], false)?.full_tensor()?.to_vec::<bool>()?, [true, false]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dims that the tensor does not have, and dims that repeat.
    pub fn any(&self, dims: &[isize], keep: bool) -> Result<DTensor> {
        self.extreme_of_bools("any", dims, keep, false)
    }

    /// Returns true if all elements over `dims` are not 0. With `keep`, the dims stay with extent 1. NaN counts as not
    /// 0; over no elements the result is true. If a reduced dim is sharded, ranks reduce one byte per result.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![true, true, false, true], [2, 2])?, "(S0)")?;
    ///     assert_eq!(x.all(&[0], false)?.full_tensor()?.to_vec::<bool>()?, [false, true]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dims that the tensor does not have, and dims that repeat.
    pub fn all(&self, dims: &[isize], keep: bool) -> Result<DTensor> {
        self.extreme_of_bools("all", dims, keep, true)
    }

    /// Returns the number of elements over `dims` that are not 0, as i64. With `keep`, the dims stay with extent 1. NaN
    /// counts as not 0. If a reduced dim is sharded, the result is `Partial(sum)`, and nothing is
    /// communicated until it is reduced.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 0.0, -0.0, 3.0], [4])?, "(S0)")?;
    ///     assert_eq!(x.count_nonzero(&[0], false)?.full_tensor()?.to_vec::<i64>()?, [2]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dims that the tensor does not have, and dims that repeat.
    pub fn count_nonzero(&self, dims: &[isize], keep: bool) -> Result<DTensor> {
        let dims = self.dims("count_nonzero", dims)?;
        DTensor::apply_one(&Sum { dims, keep }, &[&self.is_nonzero()?])
    }

    /// Returns the variance over `dims` in the accumulator's dtype; the dims stay with extent 1.
    fn variance(&self, dims: &Dims, correction: usize) -> Result<DTensor> {
        let mean = {
            let _guard = self.mesh.no_grad();
            self.mean_over(dims.clone(), true)?.reduce_partial()?
        };
        let n = dims.iter().map(|&d| self.shape()[d]).product::<usize>() as f64;
        let squares = self.sum_terms(SumTerm::SquaredDeviation, dims, &mean)?.reduce_partial()?;
        // The sum of deviations is what the mean's rounding has left. The variance does not depend on the mean that is
        // subtracted, so its gradient may treat the mean as a constant.
        let rest = self.sum_terms(SumTerm::Deviation, dims, &mean)?.reduce_partial()?;
        let rest = rest.mul(&rest)?.mul_scalar(1.0 / n)?;
        // Beside infinite squares the correction may be infinite as well.
        let overflows = {
            let _guard = self.mesh.no_grad();
            squares.isinf()?
        };
        let rest = DTensor::apply_one(&Mask { on: false }, &[&overflows, &rest])?;
        squares.sub(&rest)?.relu()?.mul_scalar(1.0 / (n - correction as f64).max(0.0))
    }

    fn sum_terms(&self, term: SumTerm, dims: &Dims, with: &DTensor) -> Result<DTensor> {
        DTensor::apply_one(&TermSum { term, dims: dims.clone() }, &[self, with])
    }

    /// Returns this tensor, which is not negative, to the power `p`. For a positive `p`, the gradient is 0 if it is 0.
    pub(in crate::dtensor::methods) fn root_or_zero(&self, p: f64) -> Result<DTensor> {
        if p < 0.0 {
            // A sum of negative powers is 0 only if all elements are infinite.
            return self.pow_scalar(p);
        }
        let (is_zero, one) = {
            let _guard = self.mesh.no_grad();
            let zero = Compare { kind: CompareKind::Eq };
            (DTensor::apply_one(&zero, &[self, &self.zeros_like()?])?, self.ones_like()?)
        };
        let positive = DTensor::apply_one(&Select, &[&is_zero, &one, self])?;
        let root = if p == 0.5 { positive.sqrt()? } else { positive.pow_scalar(p)? };
        DTensor::apply_one(&Mask { on: false }, &[&is_zero, &root])
    }

    /// Rounds a statistic to `dtype`, and removes `dims` unless they are kept.
    fn finish(&self, dtype: DType, dims: &[usize], keep: bool) -> Result<DTensor> {
        let x = self.cast(dtype)?;
        if keep {
            return Ok(x);
        }
        let kept: Vec<usize> = (0..x.shape().len()).filter(|d| !dims.contains(d)).collect();
        x.reshape(kept.iter().map(|&d| x.shape()[d]).collect::<crate::tensor::Shape>())
    }

    /// Returns ones in f64, with extent 1 at `dims`, for [`SumTerm::Power`].
    fn ones_beside(&self, dims: &[usize]) -> Result<DTensor> {
        let shape: crate::tensor::Shape =
            (0..self.shape().len()).map(|d| if dims.contains(&d) { 1 } else { self.shape()[d] }).collect();
        let layout = crate::placement::Layout::replicated(self.mesh.mesh().ndim());
        DTensor::full(&self.mesh, DType::F64, shape, layout, 1.0)
    }

    fn is_nonzero(&self) -> Result<DTensor> {
        if self.dtype() == DType::Bool { Ok(self.clone()) } else { self.ne(&self.zeros_like()?) }
    }

    fn extreme_of_bools(&self, verb: &str, list: &[isize], keep: bool, all: bool) -> Result<DTensor> {
        let dims = self.dims(verb, list)?;
        let bools = self.is_nonzero()?;
        if dims.iter().any(|&d| self.shape()[d] == 0) {
            // The number of elements that are not 0 is 0 here, and has the right shape and layout.
            let none =
                DTensor::apply_one(&Sum { dims, keep }, &[&bools])?.reduce_partial()?.cast(DType::Bool)?;
            return none.full_like(all);
        }
        // Bools have no `Partial` layout, so the ranks reduce bytes.
        let sharded = dims.iter().any(|&d| bools.cuts(d));
        let x = if sharded { bools.cast(DType::U8)? } else { bools };
        let extreme = if all { x.min(list, keep)? } else { x.max(list, keep)? };
        if sharded { extreme.cast(DType::Bool) } else { Ok(extreme) }
    }

    fn expect_reducible(&self, verb: &str, dims: &[usize]) -> Result<()> {
        self.dtype().expect_float(verb)?;
        if dims.windows(2).any(|w| w[0] == w[1]) {
            let given = format!("dims {dims:?} of {}", self.spec());
            return Err(Error::invalid(verb, "no such dims", given, "name each once"));
        }
        Ok(())
    }
}
