//! Elements: the types of the kernels' package, numbers as arguments, and a match over dtypes.

use std::fmt;

use half::{bf16, f16};
use isoshard_kernels::DType;

/// A number as an argument, which is converted to the tensor's dtype when it is used.
///
/// ```
/// use isoshard::tensor::{DType, Scalar, Tensor};
/// assert_eq!(Scalar::from(0.5f32), Scalar::Float(0.5));
/// let large = (1i64 << 60) + 1; // no f64
/// assert_eq!(Tensor::full(DType::I64, [1], large).to_vec::<i64>()?, [large]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq)]
pub enum Scalar {
    /// A floating-point number.
    Float(f64),
    /// An integer or a bool. i64 tensors take it exactly, other dtypes as an f64.
    Integer(i64),
}

impl Scalar {
    /// Returns the number, rounded to f64 if it is an integer beyond 2^53.
    ///
    /// ```
    /// use isoshard::tensor::Scalar;
    /// assert_eq!(Scalar::from(7u8).to_f64(), 7.0);
    /// ```
    pub fn to_f64(self) -> f64 {
        match self {
            Scalar::Float(x) => x,
            Scalar::Integer(x) => x as f64,
        }
    }

    /// Returns true if f64 has the number.
    pub(crate) fn is_f64(self) -> bool {
        match self {
            Scalar::Float(_) => true,
            Scalar::Integer(x) => x.unsigned_abs() <= 1 << 53,
        }
    }

    /// Returns the number as an i64 element: truncated toward zero and saturated.
    pub(crate) fn to_i64(self) -> i64 {
        match self {
            Scalar::Float(x) => x as i64,
            Scalar::Integer(x) => x,
        }
    }
}

impl fmt::Debug for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scalar::Float(x) => write!(f, "{x:?}"),
            Scalar::Integer(x) => write!(f, "{x}"),
        }
    }
}

macro_rules! scalar_from {
    ($Variant:ident: $($t:ty)*) => {$(
        impl From<$t> for Scalar {
            fn from(x: $t) -> Self {
                Scalar::$Variant(x.into())
            }
        }
    )*};
}

scalar_from!(Float: f32 f64 f16 bf16);
scalar_from!(Integer: i64 i32 u32 u8 bool);

impl From<usize> for Scalar {
    /// An integer beyond those of i64 is rounded to f64.
    fn from(x: usize) -> Self {
        i64::try_from(x).map_or(Scalar::Float(x as f64), Scalar::Integer)
    }
}

/// Evaluates `$body` with `$T` as the Rust type of a dtype.
///
/// `any` accepts all eight dtypes; `float` the four floating-point ones, and returns an error that names `$verb` for
/// others.
macro_rules! for_dtype {
    (any $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::tensor::DType::F32 => {
                type $T = f32;
                $body
            }
            $crate::tensor::DType::F64 => {
                type $T = f64;
                $body
            }
            $crate::tensor::DType::F16 => {
                type $T = half::f16;
                $body
            }
            $crate::tensor::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            $crate::tensor::DType::I64 => {
                type $T = i64;
                $body
            }
            $crate::tensor::DType::I32 => {
                type $T = i32;
                $body
            }
            $crate::tensor::DType::U8 => {
                type $T = u8;
                $body
            }
            $crate::tensor::DType::Bool => {
                type $T = bool;
                $body
            }
        }
    };
    (float $verb:expr, $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::tensor::DType::F32 => {
                type $T = f32;
                $body
            }
            $crate::tensor::DType::F64 => {
                type $T = f64;
                $body
            }
            $crate::tensor::DType::F16 => {
                type $T = half::f16;
                $body
            }
            $crate::tensor::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            other => {
                let refused = other.expect_float($verb).expect_err("the floating dtypes are matched above");
                Err($crate::error::Error::from(refused))
            }
        }
    };
}
pub(crate) use for_dtype;

/// Returns a dtype's name in safetensors files.
pub(crate) fn safetensors_dtype(dtype: DType) -> safetensors::Dtype {
    match dtype {
        DType::F32 => safetensors::Dtype::F32,
        DType::F64 => safetensors::Dtype::F64,
        DType::F16 => safetensors::Dtype::F16,
        DType::BF16 => safetensors::Dtype::BF16,
        DType::I64 => safetensors::Dtype::I64,
        DType::I32 => safetensors::Dtype::I32,
        DType::U8 => safetensors::Dtype::U8,
        DType::Bool => safetensors::Dtype::BOOL,
    }
}
