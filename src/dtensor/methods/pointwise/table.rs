//! Pointwise operators: the rows of the table in `ops::pointwise`, comparisons, selection, powers and casts.
//!
//! Binary operators broadcast by NumPy's rules.

use crate::dtensor::tensor::dtensor::DTensor;
use crate::error::Result;
use crate::ops::{
    self, Bits, Cast, Compare, CompareKind, Op, Pointwise, PowScalar, Select, activations_table,
    arithmetic_table, bits_table, elementary_table, logarithmic_table, piecewise_table, rounding_table,
    signatures, smooth_activations_table, special_table, trigonometric_table,
};
use crate::tensor::DType;

/// Writes one comparison per row: the documentation, `method = kind, the bools of the example;`.
macro_rules! relations {
    ($($(#[$doc:meta])* $name:ident = $kind:ident, $want:tt;)*) => {$(
        $(#[$doc])*
        /// Communicates nothing if both operands have one shape and layout, or one is replicated, and none is `Partial`.
        ///
        /// ```
        /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
        /// spmd(2, |rank| {
        ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
        ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0], [3])?, "(S0)")?;
        ///     let y = DTensor::distribute(&mesh, &Tensor::from_vec(vec![2.0f32], [1])?, "(R)")?;
        #[doc = concat!("    let bools = x.", stringify!($name), "(&y)?.full_tensor()?.to_vec::<bool>()?;")]
        #[doc = concat!("    assert_eq!(bools, ", stringify!($want), ");")]
        ///     Ok(())
        /// })?;
        /// # Ok::<(), isoshard::Error>(())
        /// ```
        ///
        /// # Errors
        /// Refuses shapes that do not broadcast, and different dtypes.
        pub fn $name(&self, other: &DTensor) -> Result<DTensor> {
            self.broadcast_apply(&Compare { kind: CompareKind::$kind }, other)
        }
    )*};
}

/// Writes one method per row of the pointwise operators' table.
macro_rules! methods {
    ($([$(#[$doc:meta])*] $Type:ident $name:ident($x:ident $(, $y:ident)*) ($($s:ident),*);)*) => {
        /// Pointwise operators: one method per row of the table in `ops::pointwise`.
        impl DTensor {
            $(method! { $(#[$doc])* $Type $name ($($y)*) ($($s)*) })*
        }
    };
}
macro_rules! method {
    ($(#[$doc:meta])* $Type:ident $name:ident () ()) => {
        $(#[$doc])*
        ///
        /// Communicates nothing unless this tensor is `Partial`.
        ///
        /// # Errors
        /// Refuses dtypes that the operator does not have.
        pub fn $name(&self) -> Result<DTensor> {
            DTensor::apply_one(&ops::$Type, &[self])
        }
    };
    ($(#[$doc:meta])* $Type:ident $name:ident () ($($s:ident)+)) => {
        $(#[$doc])*
        ///
        /// Communicates nothing unless this tensor is `Partial`.
        ///
        /// # Errors
        /// Refuses dtypes that the operator does not have, and for integers numbers that are not whole.
        pub fn $name(&self, $($s: f64),+) -> Result<DTensor> {
            DTensor::apply_one(&ops::$Type::by($($s),+), &[self])
        }
    };
    ($(#[$doc:meta])* $Type:ident $name:ident ($y:ident) ()) => {
        $(#[$doc])*
        ///
        /// `self` is the first operand; shapes broadcast. Communicates nothing if the operands have one shape and layout, or are
        /// replicated, and none is `Partial`.
        ///
        /// # Errors
        /// Refuses shapes that do not broadcast, and what the operator refuses.
        pub fn $name(&self, $y: &DTensor) -> Result<DTensor> {
            self.broadcast_apply(&ops::$Type, $y)
        }
    };
    ($(#[$doc:meta])* $Type:ident $name:ident ($y:ident $z:ident) ($($s:ident)*)) => {
        $(#[$doc])*
        ///
        /// `self` is the first operand; shapes broadcast. Communicates nothing if the operands have one shape and layout, or are
        /// replicated, and none is `Partial`.
        ///
        /// # Errors
        /// Refuses shapes that do not broadcast, and what the operator refuses.
        pub fn $name(&self, $y: &DTensor, $z: &DTensor $(, $s: f64)*) -> Result<DTensor> {
            let verb = ops::$Type::NAME;
            let shape = self.shape().broadcast(verb, $y.shape())?.broadcast(verb, $z.shape())?;
            let op = operator!($Type $($s)*);
            DTensor::apply_one(&op, &[&self.expand(&shape)?, &$y.expand(&shape)?, &$z.expand(&shape)?])
        }
    };
}
macro_rules! operator {
    ($Type:ident) => {
        ops::$Type
    };
    ($Type:ident $($s:ident)+) => {
        ops::$Type::by($($s),+)
    };
}
macro_rules! table_methods {
    (methods { $($method:tt)* } derivatives { $($derivative:tt)* }) => {
        signatures! { methods: $($method)* }
    };
}
arithmetic_table!(table_methods);
elementary_table!(table_methods);
logarithmic_table!(table_methods);
smooth_activations_table!(table_methods);
special_table!(table_methods);
trigonometric_table!(table_methods);
activations_table!(table_methods);
bits_table!(table_methods);
piecewise_table!(table_methods);
rounding_table!(table_methods);

/// Comparisons, selection, powers and casts.
impl DTensor {
    relations! {
        /// Returns `self == other` per element, as bool.
        eq = Eq, [false, true, false];
        /// Returns `self != other` per element, as bool.
        ne = Ne, [true, false, true];
        /// Returns `self < other` per element, as bool.
        lt = Lt, [true, false, false];
        /// Returns `self <= other` per element, as bool.
        le = Le, [true, true, false];
        /// Returns `self > other` per element, as bool.
        gt = Gt, [false, false, true];
        /// Returns `self >= other` per element, as bool.
        ge = Ge, [false, true, true];
    }

    /// Raises each element to a constant power. Communicates nothing unless this tensor is `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 4.0], [3])?, "(S0)")?;
    ///     assert_eq!(x.pow_scalar(2.0)?.full_tensor()?.to_vec::<f32>()?, [1.0, 4.0, 16.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dtypes that are not floating-point.
    pub fn pow_scalar(&self, exponent: f64) -> Result<DTensor> {
        DTensor::apply_one(&PowScalar { exponent: Bits(exponent) }, &[self])
    }

    /// Returns, per element, `yes` if `self` (a bool tensor) is true, otherwise `no`. Shapes broadcast. Communicates
    /// nothing if all operands have one shape and layout, or are replicated, and none is a partial sum.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![-1.0f32, 2.0, -3.0], [3])?, "(S0)")?;
    ///     let zero = DTensor::zeros(&mesh, x.dtype(), [1], "(R)")?;
    ///     let relu = x.gt(&zero)?.select(&x, &zero)?;
    ///     assert_eq!(relu.full_tensor()?.to_vec::<f32>()?, [0.0, 2.0, 0.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses shapes that do not broadcast, a condition that is not bool, and dtypes of `yes` and `no` that differ.
    pub fn select(&self, yes: &DTensor, no: &DTensor) -> Result<DTensor> {
        let shape = self.shape().broadcast("select", yes.shape())?.broadcast("select", no.shape())?;
        DTensor::apply_one(&Select, &[&self.expand(&shape)?, &yes.expand(&shape)?, &no.expand(&shape)?])
    }

    /// Converts the elements to another dtype. Communicates nothing unless this tensor is `Partial`; partial maxima and
    /// minima stay partial if the conversion never decreases.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::{DType, Tensor}};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0], [3])?, "(S0)")?;
    ///     assert_eq!(x.cast(DType::I64)?.full_tensor()?.to_vec::<i64>()?, [1, 2, 3]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if a `Partial` operand has to be reduced and communication fails.
    pub fn cast(&self, dtype: DType) -> Result<DTensor> {
        if dtype == self.dtype() { Ok(self.clone()) } else { DTensor::apply_one(&Cast { dtype }, &[self]) }
    }

    pub(in crate::dtensor::methods) fn broadcast_apply(
        &self,
        op: &dyn Op,
        other: &DTensor,
    ) -> Result<DTensor> {
        if self.shape() == other.shape() {
            return DTensor::apply_one(op, &[self, other]);
        }
        let shape = self.shape().broadcast(op.name(), other.shape())?;
        DTensor::apply_one(op, &[&self.expand(&shape)?, &other.expand(&shape)?])
    }
}
