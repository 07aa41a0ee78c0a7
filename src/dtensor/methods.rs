//! Operators as methods of `DTensor`: pointwise operators, comparisons, products and reductions.
//!
//! Methods that change only the shape are in `shapes.rs`, layers and losses in `layers.rs`. Binary operators
//! broadcast by NumPy's rules, and a negative dim counts from the last. A method communicates nothing if a sharding
//! rule of its operator fits the operands' layouts; otherwise operands are redistributed to the layouts that cost least.

use super::tensor::DTensor;
use crate::error::Result;
use crate::ops::{
    self, Argmax, Bits, Cast, Compare, CompareKind, Matmul, Max, Min, Op, PowScalar, Select, Sum,
    pointwise_table, signatures,
};
use crate::tensor::{DType, Dims};

macro_rules! relations {
    ($($(#[$doc:meta])* $name:ident = $kind:ident;)*) => {$(
        $(#[$doc])*
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
    ($([$(#[$doc:meta])*] $Type:ident $name:ident($x:ident $(, $y:ident)*) ($($s:ident)?);)*) => {
        /// Pointwise operators: one method per row of the table in `ops::pointwise`.
        impl DTensor {
            $(method! { $(#[$doc])* $Type $name ($($y)*) ($($s)?) })*
        }
    };
}
macro_rules! method {
    ($(#[$doc:meta])* $Type:ident $name:ident () ()) => {
        $(#[$doc])*
        ///
        /// # Errors
        /// Refuses dtypes that the operator does not have.
        pub fn $name(&self) -> Result<DTensor> {
            DTensor::apply_one(&ops::$Type, &[self])
        }
    };
    ($(#[$doc:meta])* $Type:ident $name:ident () ($s:ident)) => {
        $(#[$doc])*
        ///
        /// # Errors
        /// Refuses dtypes that the operator does not have.
        pub fn $name(&self, $s: f64) -> Result<DTensor> {
            DTensor::apply_one(&ops::$Type::by($s), &[self])
        }
    };
    ($(#[$doc:meta])* $Type:ident $name:ident ($y:ident) ()) => {
        $(#[$doc])*
        ///
        /// `self` is the first operand; shapes broadcast.
        ///
        /// # Errors
        /// Refuses shapes that do not broadcast, and what the operator refuses.
        pub fn $name(&self, $y: &DTensor) -> Result<DTensor> {
            self.broadcast_apply(&ops::$Type, $y)
        }
    };
}
macro_rules! table_methods {
    (methods { $($method:tt)* } derivatives { $($derivative:tt)* }) => {
        signatures! { methods: $($method)* }
    };
}
pointwise_table!(table_methods);

/// Comparisons, selection, powers and casts.
impl DTensor {
    relations! {
        /// Returns `self == other` per element, as bool.
        ///
        /// ```
        /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
        /// spmd(2, |rank| {
        ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
        ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0], [3])?, "(S0)".parse()?)?;
        ///     let y = DTensor::distribute(&mesh, &Tensor::from_vec(vec![2.0f32], [1])?, "(R)".parse()?)?;
        ///     assert_eq!(x.eq(&y)?.full_tensor()?.to_vec::<bool>()?, [false, true, false]);
        ///     Ok(())
        /// })?;
        /// # Ok::<(), isoshard::Error>(())
        /// ```
        eq = Eq;
        /// Returns `self != other` per element, as bool.
        ///
        /// ```
        /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
        /// spmd(2, |rank| {
        ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
        ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0], [3])?, "(S0)".parse()?)?;
        ///     let y = DTensor::distribute(&mesh, &Tensor::from_vec(vec![2.0f32], [1])?, "(R)".parse()?)?;
        ///     assert_eq!(x.ne(&y)?.full_tensor()?.to_vec::<bool>()?, [true, false, true]);
        ///     Ok(())
        /// })?;
        /// # Ok::<(), isoshard::Error>(())
        /// ```
        ne = Ne;
        /// Returns `self < other` per element, as bool.
        ///
        /// ```
        /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
        /// spmd(2, |rank| {
        ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
        ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0], [3])?, "(S0)".parse()?)?;
        ///     let y = DTensor::distribute(&mesh, &Tensor::from_vec(vec![2.0f32], [1])?, "(R)".parse()?)?;
        ///     assert_eq!(x.lt(&y)?.full_tensor()?.to_vec::<bool>()?, [true, false, false]);
        ///     Ok(())
        /// })?;
        /// # Ok::<(), isoshard::Error>(())
        /// ```
        lt = Lt;
        /// Returns `self <= other` per element, as bool.
        ///
        /// ```
        /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
        /// spmd(2, |rank| {
        ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
        ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0], [3])?, "(S0)".parse()?)?;
        ///     let y = DTensor::distribute(&mesh, &Tensor::from_vec(vec![2.0f32], [1])?, "(R)".parse()?)?;
        ///     assert_eq!(x.le(&y)?.full_tensor()?.to_vec::<bool>()?, [true, true, false]);
        ///     Ok(())
        /// })?;
        /// # Ok::<(), isoshard::Error>(())
        /// ```
        le = Le;
        /// Returns `self > other` per element, as bool.
        ///
        /// ```
        /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
        /// spmd(2, |rank| {
        ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
        ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0], [3])?, "(S0)".parse()?)?;
        ///     let y = DTensor::distribute(&mesh, &Tensor::from_vec(vec![2.0f32], [1])?, "(R)".parse()?)?;
        ///     assert_eq!(x.gt(&y)?.full_tensor()?.to_vec::<bool>()?, [false, false, true]);
        ///     Ok(())
        /// })?;
        /// # Ok::<(), isoshard::Error>(())
        /// ```
        gt = Gt;
        /// Returns `self >= other` per element, as bool.
        ///
        /// ```
        /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
        /// spmd(2, |rank| {
        ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
        ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0], [3])?, "(S0)".parse()?)?;
        ///     let y = DTensor::distribute(&mesh, &Tensor::from_vec(vec![2.0f32], [1])?, "(R)".parse()?)?;
        ///     assert_eq!(x.ge(&y)?.full_tensor()?.to_vec::<bool>()?, [false, true, true]);
        ///     Ok(())
        /// })?;
        /// # Ok::<(), isoshard::Error>(())
        /// ```
        ge = Ge;
    }

    /// Raises each element to a constant power. Communicates nothing unless this tensor is `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 4.0], [3])?, "(S0)".parse()?)?;
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

    /// Returns, per element, `yes` if `self` (a bool tensor) is true, otherwise `no`. Shapes broadcast.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![-1.0f32, 2.0, -3.0], [3])?, "(S0)".parse()?)?;
    ///     let zero = DTensor::zeros(&mesh, x.dtype(), [1], "(R)".parse()?)?;
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

    /// Converts the elements to another dtype.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::{DType, Tensor}};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0], [3])?, "(S0)".parse()?)?;
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

    fn broadcast_apply(&self, op: &dyn Op, other: &DTensor) -> Result<DTensor> {
        if self.shape() == other.shape() {
            return DTensor::apply_one(op, &[self, other]);
        }
        let shape = self.shape().broadcast(op.name(), other.shape())?;
        DTensor::apply_one(op, &[&self.expand(&shape)?, &other.expand(&shape)?])
    }
}

/// Products and reductions.
impl DTensor {
    /// Returns the matrix product over the last two dims. The other dims are batch dims, which must be equal; an
    /// operand of two dims has none.
    ///
    /// Communicates nothing if the rows of the first operand (`S0` times `R`), the columns of the second (`R` times
    /// `S1`) or the batch are sharded. If the summed dim is sharded (`S1` times `S0`), the result is `Partial`, and
    /// the operator that reads it reduces it if necessary. In exact mode this requires that no shard boundary cuts a leaf
    /// of the reduction tree (at most 32 indices); otherwise the operands are redistributed.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::full(&mesh, DType::F32, [2, 64], 0.5, "(S1)".parse()?)?;
    ///     let w = DTensor::full(&mesh, DType::F32, [64, 3], 2.0, "(S0)".parse()?)?;
    ///     let y = x.matmul(&w)?;
    ///     assert_eq!(y.spec().to_string(), "f32[2, 3]@(dp:P(sum))");
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [64.0; 6]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses operands with fewer than two dims, and extents that do not match.
    pub fn matmul(&self, other: &DTensor) -> Result<DTensor> {
        DTensor::apply_one(&Matmul::for_dims(self.shape().len(), other.shape().len())?, &[self, other])
    }

    /// Returns the product over named dims. A dim that the result lacks is summed over.
    ///
    /// Layouts and communication are as for [`DTensor::matmul`].
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec((0..8).map(|i| i as f32).collect(), [2, 2, 2])?, "(S0)".parse()?)?;
    ///     let w = DTensor::full(&mesh, x.dtype(), [3, 2], 1.0, "(R)".parse()?)?;
    ///     let y = x.einsum("b t k, n k -> b t n", &w)?;
    ///     assert_eq!(y.spec().to_string(), "f32[2, 2, 3]@(dp:S0)");
    ///     assert_eq!(y.slice(2, 0, 1)?.full_tensor()?.to_vec::<f32>()?, [1.0, 5.0, 9.0, 13.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a signature that cannot be read, and extents that do not match it.
    pub fn einsum(&self, signature: &str, other: &DTensor) -> Result<DTensor> {
        DTensor::apply_one(&Matmul::new(signature)?, &[self, other])
    }

    /// Returns the sum over `dims`; with `keep`, they stay with extent 1.
    ///
    /// If a summed dim is sharded, the result is `Partial` along that axis and nothing is communicated until it is
    /// reduced.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3])?, "(S0)".parse()?)?;
    ///     assert_eq!(x.sum(&[-1], true)?.spec().to_string(), "f32[2, 1]@(dp:S0)");
    ///     let columns = x.sum(&[0], false)?;
    ///     assert_eq!(columns.layout().to_string(), "(P(sum))");
    ///     assert_eq!(columns.full_tensor()?.to_vec::<f32>()?, [5.0, 7.0, 9.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dims that the tensor does not have, and dims that repeat.
    pub fn sum(&self, dims: &[isize], keep: bool) -> Result<DTensor> {
        DTensor::apply_one(&Sum { dims: self.dims("sum", dims)?, keep }, &[self])
    }

    /// Returns the sum of all elements, with shape `[]`. The result is `Partial` if the tensor is sharded.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0], [3])?, "(S0)".parse()?)?;
    ///     assert_eq!(x.sum_all()?.full_tensor()?.item()?, 6.0);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if an operand has to be redistributed and communication fails.
    pub fn sum_all(&self) -> Result<DTensor> {
        DTensor::apply_one(&Sum { dims: (0..self.shape().len()).collect(), keep: false }, &[self])
    }

    /// Returns the mean over `dims`: the [sum](DTensor::sum) divided by the global number of elements. With `keep`,
    /// the dims stay with extent 1.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 6.0], [2, 2])?, "(S0)".parse()?)?;
    ///     assert_eq!(x.mean(&[0], false)?.full_tensor()?.to_vec::<f32>()?, [2.0, 4.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dims that the tensor does not have, and dims that repeat.
    pub fn mean(&self, dims: &[isize], keep: bool) -> Result<DTensor> {
        let count: usize = self.dims("mean", dims)?.iter().map(|&d| self.shape()[d]).product();
        self.sum(dims, keep)?.mul_scalar(1.0 / count as f64)
    }

    /// Returns the mean of all elements, with shape `[]`. If the tensor is sharded, exact mode all-reduces one number per
    /// finished node of the sum before the division.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 6.0], [4])?, "(S0)".parse()?)?;
    ///     assert_eq!(x.mean_all()?.full_tensor()?.item()?, 3.0);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dtypes that are not floating-point.
    pub fn mean_all(&self) -> Result<DTensor> {
        self.sum_all()?.mul_scalar(1.0 / self.shape().numel() as f64)
    }

    /// Returns the maximum over `dims`; NaN wins. With `keep`, the dims stay with extent 1. The gradient is shared
    /// evenly among equal maxima. If a reduced dim is sharded, the result is `Partial(max)`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 5.0, 7.0, 3.0], [2, 2])?, "(S0)".parse()?)?;
    ///     let max = x.max(&[0], false)?;
    ///     assert_eq!(max.layout().to_string(), "(P(max))");
    ///     assert_eq!(max.full_tensor()?.to_vec::<f32>()?, [7.0, 5.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dims that the tensor does not have, and a maximum over no elements.
    pub fn max(&self, dims: &[isize], keep: bool) -> Result<DTensor> {
        DTensor::apply_one(&Max { dims: self.dims("max", dims)?, keep }, &[self])
    }

    /// Returns the minimum over `dims`; NaN wins. With `keep`, the dims stay with extent 1. The gradient is shared
    /// evenly among equal minima. If a reduced dim is sharded, the result is `Partial(min)`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 5.0, 7.0, 3.0], [2, 2])?, "(S0)".parse()?)?;
    ///     assert_eq!(x.min(&[1], true)?.full_tensor()?.to_vec::<f32>()?, [1.0, 3.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dims that the tensor does not have, and a minimum over no elements.
    pub fn min(&self, dims: &[isize], keep: bool) -> Result<DTensor> {
        DTensor::apply_one(&Min { dims: self.dims("min", dims)?, keep }, &[self])
    }

    /// Returns the first index of the maximum along `dim`, as i64. Communicates nothing if the ranks hold `dim`
    /// whole.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 5.0, 7.0, 3.0], [2, 2])?, "(S0)".parse()?)?;
    ///     assert_eq!(x.argmax(-1)?.full_tensor()?.to_vec::<i64>()?, [1, 0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dim that the tensor does not have, and a dim of extent 0.
    pub fn argmax(&self, dim: isize) -> Result<DTensor> {
        DTensor::apply_one(&Argmax { dim: self.shape().dim("argmax", dim)? }, &[self])
    }

    /// Resolves negative dims, and sorts.
    fn dims(&self, verb: &str, dims: &[isize]) -> Result<Dims> {
        let mut dims: Dims = dims.iter().map(|&d| self.shape().dim(verb, d)).collect::<Result<_>>()?;
        dims.sort_unstable();
        Ok(dims)
    }
}
