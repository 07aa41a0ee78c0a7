//! Conversions between all dtypes.

use half::{bf16, f16};

use super::map::map1;
use crate::error::Result;
use crate::tensor::{DType, Tensor};

/// `x` in another dtype.
///
/// Floats round to the nearest, ties to even, and only once, also from f64 to f16 and bf16 (i64 goes there through f64).
/// A float becomes an integer by truncation toward zero, saturating, NaN becoming 0; an integer a narrower one by
/// wrapping; a number a bool by `x != 0` (NaN is true).
///
/// # Errors
/// None: every pair is defined.
pub fn cast(x: &Tensor, dtype: DType) -> Result<Tensor> {
    match x.dtype() {
        from if from == dtype => Ok(x.clone()),
        DType::F32 => from_f32(x, dtype),
        DType::F16 => halves!(f16, x, dtype),
        DType::BF16 => halves!(bf16, x, dtype),
        DType::F64 => numbers!(f64, x, dtype, odd_f32),
        DType::I64 => numbers!(i64, x, dtype, |x: i64| odd_f32(x as f64)),
        DType::I32 => numbers!(i32, x, dtype, |x: i32| odd_f32(f64::from(x))),
        DType::U8 => numbers!(u8, x, dtype, f32::from),
        DType::Bool => match dtype {
            DType::F32 => map1::<bool, f32, _>(x, |x| f32::from(u8::from(x))),
            DType::F64 => map1::<bool, f64, _>(x, |x| f64::from(u8::from(x))),
            DType::F16 => map1::<bool, f16, _>(x, |x| f32::from(u8::from(x))),
            DType::BF16 => map1::<bool, bf16, _>(x, |x| f32::from(u8::from(x))),
            DType::I64 => map1::<bool, i64, _>(x, i64::from),
            DType::I32 => map1::<bool, i32, _>(x, i32::from),
            DType::U8 => map1::<bool, u8, _>(x, u8::from),
            DType::Bool => Ok(x.clone()),
        },
    }
}

fn from_f32(x: &Tensor, dtype: DType) -> Result<Tensor> {
    halves!(f32, x, dtype)
}

/// From a type that is read as f32.
macro_rules! halves {
    ($from:ty, $x:expr, $dtype:expr) => {
        match $dtype {
            DType::F32 => map1::<$from, f32, _>($x, |x| x),
            DType::F64 => map1::<$from, f64, _>($x, f64::from),
            DType::F16 => map1::<$from, f16, _>($x, |x| x),
            DType::BF16 => map1::<$from, bf16, _>($x, |x| x),
            DType::I64 => map1::<$from, i64, _>($x, |x| x as i64),
            DType::I32 => map1::<$from, i32, _>($x, |x| x as i32),
            DType::U8 => map1::<$from, u8, _>($x, |x| x as u8),
            DType::Bool => map1::<$from, bool, _>($x, |x| x != 0.0),
        }
    };
}
use halves;

/// From another number; `$odd` gives the f32 that f16 and bf16 are rounded from.
macro_rules! numbers {
    ($from:ty, $x:expr, $dtype:expr, $odd:expr) => {
        match $dtype {
            DType::F32 => map1::<$from, f32, _>($x, |x| x as f32),
            DType::F64 => map1::<$from, f64, _>($x, |x| x as f64),
            DType::F16 => map1::<$from, f16, _>($x, $odd),
            DType::BF16 => map1::<$from, bf16, _>($x, $odd),
            DType::I64 => map1::<$from, i64, _>($x, |x| x as i64),
            DType::I32 => map1::<$from, i32, _>($x, |x| x as i32),
            DType::U8 => map1::<$from, u8, _>($x, |x| x as u8),
            DType::Bool => map1::<$from, bool, _>($x, |x| x != <$from>::default()),
        }
    };
}
use numbers;

/// `x` rounded to odd: of the f32 around an `x` that is none, the one with an odd significand. Rounding that to a
/// still narrower type gives what rounding `x` once would have.
#[inline(always)]
fn odd_f32(x: f64) -> f32 {
    let y = x as f32;
    let bits = y.to_bits();
    let toward_zero = f64::from(y).abs() > x.abs();
    let other = if toward_zero { bits.wrapping_sub(1) } else { bits.wrapping_add(1) };
    let keep = f64::from(y) == x || bits & 1 == 1;
    f32::from_bits(if keep { bits } else { other })
}
