//! Comparisons and bounds with numbers, logic on bools, and tests of floats.

use half::{bf16, f16};

use crate::dtensor::tensor::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::ops::{Bits, Clamp, FloatTest, FloatTestKind, Mask};
use crate::placement::Layout;
use crate::tensor::{DType, Scalar};

/// Writes one comparison with a number per row: the documentation, `method = comparison, the bools of the example;`.
macro_rules! scalar_relations {
    ($($(#[$doc:meta])* $name:ident = $relation:ident, $want:tt;)*) => {$(
        $(#[$doc])*
        /// Communicates nothing unless this tensor is `Partial`.
        ///
        /// ```
        /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
        /// spmd(2, |rank| {
        ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
        ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![-1.0f32, 2.0, 3.0], [3])?, "(S0)")?;
        #[doc = concat!("    let bools = x.", stringify!($name), "(2.0)?.full_tensor()?.to_vec::<bool>()?;")]
        #[doc = concat!("    assert_eq!(bools, ", stringify!($want), ");")]
        ///     Ok(())
        /// })?;
        /// # Ok::<(), isoshard::Error>(())
        /// ```
        ///
        /// # Errors
        /// Refuses a number that an integer dtype does not have, such as 2.5.
        pub fn $name(&self, value: impl Into<Scalar>) -> Result<DTensor> {
            self.$relation(&self.number(stringify!($name), value.into())?)
        }
    )*};
}

/// Writes one method on two tensors as bools per row: the documentation, `method = operator, the bools of the example;`.
macro_rules! connectives {
    ($($(#[$doc:meta])* $name:ident = $bitwise:ident, $want:tt;)*) => {$(
        $(#[$doc])*
        /// Numbers are first compared with 0, so NaN counts as true. Shapes broadcast. Communicates nothing if both operands
        /// have one shape and layout, or one is replicated, and none is `Partial`.
        ///
        /// ```
        /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
        /// spmd(2, |rank| {
        ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
        ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![true, true, false], [3])?, "(S0)")?;
        ///     let y = DTensor::distribute(&mesh, &Tensor::from_vec(vec![true, false, false], [3])?, "(S0)")?;
        #[doc = concat!("    let bools = x.", stringify!($name), "(&y)?.full_tensor()?.to_vec::<bool>()?;")]
        #[doc = concat!("    assert_eq!(bools, ", stringify!($want), ");")]
        ///     Ok(())
        /// })?;
        /// # Ok::<(), isoshard::Error>(())
        /// ```
        ///
        /// # Errors
        /// Refuses shapes that do not broadcast.
        pub fn $name(&self, other: &DTensor) -> Result<DTensor> {
            let bools = self.cast(DType::Bool)?.$bitwise(&other.cast(DType::Bool)?);
            bools.map_err(|e| e.called(stringify!($name)))
        }
    )*};
}

/// Writes one test of floats per row: the documentation, `method = kind, for integers the comparison of the tensor with
/// itself, the bools of the example;`.
macro_rules! float_tests {
    ($($(#[$doc:meta])* $name:ident = $kind:ident, $of_integers:ident, $want:tt;)*) => {$(
        $(#[$doc])*
        /// Communicates nothing unless this tensor is `Partial`.
        ///
        /// ```
        /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
        /// spmd(2, |rank| {
        ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
        ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0, f64::NAN, f64::INFINITY], [3])?, "(S0)")?;
        #[doc = concat!("    assert_eq!(x.", stringify!($name), "()?.full_tensor()?.to_vec::<bool>()?, ", stringify!($want), ");")]
        ///     Ok(())
        /// })?;
        /// # Ok::<(), isoshard::Error>(())
        /// ```
        ///
        /// # Errors
        /// Returns an error if a `Partial` operand has to be reduced and communication fails.
        pub fn $name(&self) -> Result<DTensor> {
            if !self.dtype().is_float() {
                return self.$of_integers(self);
            }
            DTensor::apply_one(&FloatTest { kind: FloatTestKind::$kind }, &[self])
        }
    )*};
}

/// Comparisons and arithmetic with numbers, logic, and tests of floats.
impl DTensor {
    scalar_relations! {
        /// Returns `self == value` per element, as bool.
        eq_scalar = eq, [false, true, false];
        /// Returns `self != value` per element, as bool.
        ne_scalar = ne, [true, false, true];
        /// Returns `self < value` per element, as bool.
        lt_scalar = lt, [true, false, false];
        /// Returns `self <= value` per element, as bool.
        le_scalar = le, [true, true, false];
        /// Returns `self > value` per element, as bool.
        gt_scalar = gt, [false, false, true];
        /// Returns `self >= value` per element, as bool.
        ge_scalar = ge, [false, true, true];
    }

    connectives! {
        /// Returns, per element, true if both are true.
        logical_and = bitwise_and, [true, false, false];
        /// Returns, per element, true if one or both are true.
        logical_or = bitwise_or, [true, true, false];
        /// Returns, per element, true if exactly one is true.
        logical_xor = bitwise_xor, [false, true, false];
    }

    float_tests! {
        /// Returns, per element, true if it is NaN. Integers never are.
        isnan = Nan, ne, [false, true, false];
        /// Returns, per element, true if it is an infinity of either sign. Integers never are.
        isinf = Infinite, ne, [false, false, true];
        /// Returns, per element, true if it is neither NaN nor infinite. Integers always are.
        isfinite = Finite, eq, [true, false, false];
    }

    /// Returns, per element, true if it is false. Numbers are first compared with 0. Communicates nothing unless this
    /// tensor is `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![true, true, false], [3])?, "(S0)")?;
    ///     assert_eq!(x.logical_not()?.full_tensor()?.to_vec::<bool>()?, [false, false, true]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if a `Partial` operand has to be reduced and communication fails.
    pub fn logical_not(&self) -> Result<DTensor> {
        self.cast(DType::Bool)?.bitwise_not()
    }

    /// Replaces the elements at which `mask`, a bool tensor, is true by a number. Shapes broadcast.
    ///
    /// If the number is 0 and the mask is replicated, a `Partial` tensor stays partial; with another number it is
    /// reduced first.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![-1.0f32, 2.0, 3.0], [3])?, "(S0)")?;
    ///     let mask = DTensor::distribute(&mesh, &Tensor::from_vec(vec![true, false, true], [3])?, "(S0)")?;
    ///     assert_eq!(x.masked_fill(&mask, 9.0)?.full_tensor()?.to_vec::<f32>()?, [9.0, 2.0, 9.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a mask that is not bool, shapes that do not broadcast, and a number that an integer dtype does not have.
    pub fn masked_fill(&self, mask: &DTensor, value: impl Into<Scalar>) -> Result<DTensor> {
        let (verb, value) = ("masked_fill", value.into());
        if mask.dtype() != DType::Bool {
            let given = format!("{} for {}", mask.spec(), self.spec());
            return Err(Error::invalid(verb, "the mask is not bool", given, "compare first"));
        }
        let shape = self.shape().broadcast(verb, mask.shape())?;
        let (x, mask) = (self.expand(&shape)?, mask.expand(&shape)?);
        if value.to_f64().to_bits() == 0 {
            return DTensor::apply_one(&Mask { on: false }, &[&mask, &x]);
        }
        mask.select(&self.number(verb, value)?, &x)
    }

    /// Replaces NaN by `nan`, and infinities by `highest` and `lowest`: by the largest and the smallest finite number
    /// of the dtype if these are `None`. Communicates nothing unless this tensor is `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![f32::NAN, f32::INFINITY, 2.0], [3])?, "(S0)")?;
    ///     let y = x.nan_to_num(0.0, Some(9.0), None)?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [0.0, 9.0, 2.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses integers and bools.
    pub fn nan_to_num(&self, nan: f64, highest: Option<f64>, lowest: Option<f64>) -> Result<DTensor> {
        self.dtype().expect_float("nan_to_num")?;
        let largest = match self.dtype() {
            DType::F64 => f64::MAX,
            DType::F16 => f64::from(f16::MAX),
            DType::BF16 => f64::from(bf16::MAX),
            _ => f64::from(f32::MAX),
        };
        let y = self.masked_fill(&self.isnan()?, nan)?;
        // A bound would change a replacement beyond it.
        if (highest, lowest) == (None, None) && nan.abs() <= largest {
            let (min, max) = (Bits(-largest), Bits(largest));
            return DTensor::apply_one(&Clamp { min, max, open: false }, &[&y]);
        }
        let y = y.masked_fill(&self.eq_scalar(f64::INFINITY)?, highest.unwrap_or(largest))?;
        y.masked_fill(&self.eq_scalar(f64::NEG_INFINITY)?, lowest.unwrap_or(-largest))
    }

    /// Limits elements to the interval from `min` to `max`; if `min` is larger, every element becomes `max`. NaN stays
    /// NaN. Partial maxima and minima stay partial. The gradient is 0 outside of the interval
    /// and at its ends. [`DTensor::maximum`] and
    /// [`DTensor::minimum`] take tensors as bounds.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![-1.0f32, 2.0, 3.0], [3])?, "(S0)")?;
    ///     assert_eq!(x.clamp(0.0, 2.5)?.full_tensor()?.to_vec::<f32>()?, [0.0, 2.0, 2.5]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses bool, and a bound that is NaN.
    pub fn clamp(&self, min: impl Into<Scalar>, max: impl Into<Scalar>) -> Result<DTensor> {
        let (min, max) = (min.into(), max.into());
        if self.dtype() == DType::I64 && !(min.is_f64() && max.is_f64()) {
            // Bounds that are no f64 are tensors.
            let above = match min {
                Scalar::Integer(_) => self.maximum(&self.number("clamp", min)?)?,
                Scalar::Float(_) => self.clamp_min(min)?,
            };
            return match max {
                Scalar::Integer(_) => above.minimum(&self.number("clamp", max)?),
                Scalar::Float(_) => above.clamp_max(max),
            };
        }
        let (min, max) = (Bits(min.to_f64()), Bits(max.to_f64()));
        DTensor::apply_one(&Clamp { min, max, open: true }, &[self])
    }

    /// Returns the larger of each element and a number: [`DTensor::clamp`] with one bound. Communicates nothing unless
    /// this tensor is a partial sum.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![-1.0f32, 2.0, 3.0], [3])?, "(S0)")?;
    ///     assert_eq!(x.clamp_min(1.0)?.full_tensor()?.to_vec::<f32>()?, [1.0, 2.0, 3.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses bool, and a bound that is NaN.
    pub fn clamp_min(&self, min: impl Into<Scalar>) -> Result<DTensor> {
        self.clamp(min, f64::INFINITY)
    }

    /// Returns the smaller of each element and a number: [`DTensor::clamp`] with one bound. Communicates nothing unless
    /// this tensor is a partial sum.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![-1.0f32, 2.0, 3.0], [3])?, "(S0)")?;
    ///     assert_eq!(x.clamp_max(1.0)?.full_tensor()?.to_vec::<f32>()?, [-1.0, 1.0, 1.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses bool, and a bound that is NaN.
    pub fn clamp_max(&self, max: impl Into<Scalar>) -> Result<DTensor> {
        self.clamp(f64::NEG_INFINITY, max)
    }

    /// Divides every element by a number. Unlike a product with the reciprocal, the quotient is rounded once.
    /// Communicates nothing unless this tensor is `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![-1.0f32, 2.0, 3.0], [3])?, "(S0)")?;
    ///     assert_eq!(x.div_scalar(4.0)?.full_tensor()?.to_vec::<f32>()?, [-0.25, 0.5, 0.75]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses integers and bools.
    pub fn div_scalar(&self, divisor: impl Into<Scalar>) -> Result<DTensor> {
        self.with_number("div_scalar", divisor.into(), |x, divisor| x.div(divisor))
    }

    /// Interpolates towards `end` by one weight for all elements, as [`DTensor::lerp`]: 0 gives this tensor, 1 gives
    /// `end`. Communicates nothing if both operands have one shape and layout, or one is replicated, and none is `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![-1.0f32, 2.0, 3.0], [3])?, "(S0)")?;
    ///     let end = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 4.0, 5.0], [3])?, "(S0)")?;
    ///     assert_eq!(x.lerp_scalar(&end, 0.5)?.full_tensor()?.to_vec::<f32>()?, [0.0, 3.0, 4.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses shapes that do not broadcast, integers, and different dtypes.
    pub fn lerp_scalar(&self, end: &DTensor, weight: f64) -> Result<DTensor> {
        if end.dtype() != self.dtype() {
            let given = format!("{} and {}", self.spec(), end.spec());
            return Err(Error::invalid("lerp_scalar", "the dtypes differ", given, "cast one of them"));
        }
        self.with_number("lerp_scalar", weight.into(), |x, weight| x.lerp(&end.cast(x.dtype())?, weight))
    }

    /// Returns the square of each element. Integers wrap. Communicates nothing unless this tensor is `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![-1.0f32, 2.0, 3.0], [3])?, "(S0)")?;
    ///     assert_eq!(x.square()?.full_tensor()?.to_vec::<f32>()?, [1.0, 4.0, 9.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses bool.
    pub fn square(&self) -> Result<DTensor> {
        let square = if self.dtype().is_float() { self.pow_scalar(2.0) } else { self.mul(self) };
        square.map_err(|e| e.called("square"))
    }

    /// Returns the reciprocal `1 / x` of each element. Communicates nothing unless this tensor is `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![-1.0f32, 2.0, 4.0], [3])?, "(S0)")?;
    ///     assert_eq!(x.reciprocal()?.full_tensor()?.to_vec::<f32>()?, [-1.0, 0.5, 0.25]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses integers and bools.
    pub fn reciprocal(&self) -> Result<DTensor> {
        self.pow_scalar(-1.0).map_err(|e| e.called("reciprocal"))
    }

    /// Applies `f` to this tensor and a number. If f16 or bf16 would round the number, both are f32, and the result is
    /// rounded.
    pub(in crate::dtensor::methods) fn with_number(
        &self,
        verb: &'static str,
        value: Scalar,
        f: impl Fn(&DTensor, &DTensor) -> Result<DTensor>,
    ) -> Result<DTensor> {
        if self.has_number(value) {
            return f(self, &self.number(verb, value)?);
        }
        let wide = self.cast(DType::F32)?;
        f(&wide, &wide.number(verb, value)?)?.cast(self.dtype())
    }

    /// Returns false if f16 or bf16 would round a number.
    pub(in crate::dtensor::methods) fn has_number(&self, value: Scalar) -> bool {
        let number = value.to_f64();
        let rounded = match self.dtype() {
            DType::F16 => f16::from_f64(number).to_f64(),
            DType::BF16 => bf16::from_f64(number).to_f64(),
            DType::F64 | DType::F32 | DType::I64 | DType::I32 | DType::U8 | DType::Bool => number,
        };
        rounded == number || number.is_nan()
    }

    /// Returns a number as a replicated tensor of shape `[]` and of this tensor's dtype. Communicates nothing.
    pub(in crate::dtensor) fn number(&self, verb: &'static str, value: Scalar) -> Result<DTensor> {
        let number = value.to_f64();
        let in_range = match (self.dtype(), value) {
            (DType::I64, Scalar::Integer(_)) => true,
            (DType::I64, Scalar::Float(_)) => (i64::MIN as f64..-(i64::MIN as f64)).contains(&number),
            (DType::I32, _) => (f64::from(i32::MIN)..=f64::from(i32::MAX)).contains(&number),
            (DType::U8, _) => (0.0..=255.0).contains(&number),
            (DType::Bool, _) => (0.0..=1.0).contains(&number),
            (DType::F32 | DType::F64 | DType::F16 | DType::BF16, _) => true,
        };
        if !self.dtype().is_float() && (number.trunc() != number || !in_range) {
            let (rule, given) =
                ("the dtype does not have this number", format!("{value:?} for {}", self.spec()));
            return Err(Error::invalid(verb, rule, given, "cast the tensor first"));
        }
        let mesh = self.mesh();
        DTensor::full(mesh, self.dtype(), [], Layout::replicated(mesh.mesh().ndim()), value)
    }
}
