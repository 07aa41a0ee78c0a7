//! Conversions between all dtypes.

use half::{bf16, f16};

use super::map::map1;
use crate::error::Result;
use crate::tensor::dtype::odd_f32;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Element;

    fn to<T: Element>(x: &Tensor, dtype: DType) -> Vec<T> {
        cast(x, dtype).unwrap().to_vec().unwrap()
    }

    #[test]
    fn every_pair_keeps_small_integers() {
        let x = Tensor::from_vec(vec![0i64, 1, 2, 100], [4]).unwrap();
        for from in DType::ALL {
            let source = cast(&x, from).unwrap();
            for dtype in DType::ALL {
                let got = cast(&source, dtype).unwrap();
                let lost = from == DType::Bool || dtype == DType::Bool;
                let want = if lost { [0.0, 1.0, 1.0, 1.0] } else { [0.0, 1.0, 2.0, 100.0] };
                assert_eq!((got.dtype(), got.to_f64_vec()), (dtype, want.to_vec()), "{from} to {dtype}");
            }
        }
    }

    #[test]
    fn saturates_truncates_and_wraps() {
        let x = Tensor::from_vec(vec![-1.9f32, 1.9, 1e30, f32::NAN, f32::NEG_INFINITY, 300.0], [6]).unwrap();
        assert_eq!(to::<i32>(&x, DType::I32), [-1, 1, i32::MAX, 0, i32::MIN, 300]);
        assert_eq!(to::<u8>(&x, DType::U8), [0, 1, 255, 0, 0, 255]);
        assert_eq!(to::<i64>(&x, DType::I64)[4], i64::MIN);
        assert_eq!(to::<bool>(&x, DType::Bool), [true; 6]);
        let x = Tensor::from_vec(vec![300i32, -1], [2]).unwrap();
        assert_eq!(to::<u8>(&x, DType::U8), [44, 255]);
    }

    #[test]
    fn rounds_once_to_nearest_even() {
        // 1 + 2^-8 is a tie in bf16, and a little more is not: through f32 that would be lost.
        let (tie, above) = (1.0 + 2f64.powi(-8), 1.0 + 2f64.powi(-8) + 2f64.powi(-40));
        let values =
            vec![tie, above, -above, 3.0 * 2f64.powi(-8) + 1.0, 1e300, -1e-300, 0.1, f64::NAN, f64::INFINITY];
        let x = Tensor::from_vec(values.clone(), [9]).unwrap();
        assert_eq!(
            to::<bf16>(&x, DType::BF16)[..4].iter().map(|x| x.to_f64()).collect::<Vec<_>>(),
            [1.0, 1.007_812_5, -1.007_812_5, 1.015_625]
        );
        let (bf, h) = (to::<bf16>(&x, DType::BF16), to::<f16>(&x, DType::F16));
        for (i, &v) in values.iter().enumerate().skip(4).filter(|(_, v)| !v.is_nan()) {
            assert_eq!((bf[i], h[i]), (Element::from_f64(v), Element::from_f64(v)), "{v:e}");
        }
        assert!(bf[7].is_nan() && h[7].is_nan());
        let sweep: Vec<f64> = (0..20_000)
            .map(|i| (f64::from(i) * 0.37 - 3000.0).exp2().min(1e9) + f64::from(i) * 1.000_3)
            .collect();
        let x = Tensor::from_vec(sweep.clone(), [20_000]).unwrap();
        for (v, got) in sweep.iter().zip(to::<f16>(&x, DType::F16)) {
            assert_eq!(got, Element::from_f64(*v), "{v:e}");
        }
    }
}
