//! Conversions between all dtypes.

use isoshard_kernels::{StridedRows, casts_packed};

use crate::error::Result;
use crate::tensor::{DType, Tensor};

/// Returns `x` in another dtype.
///
/// - To a float: rounds to the nearest value, ties to even, once, also from f64 to f16 and bf16 (i64 to f16 or bf16
///   goes through f64).
/// - From a float to an integer: truncates toward zero and saturates; NaN becomes 0.
/// - From an integer to a narrower one: wraps.
/// - To bool: `x != 0`, so NaN is true.
///
/// ```
/// use isoshard::tensor::{DType, Tensor, cpu};
/// let x = Tensor::from_vec(vec![-1.9f32, 300.0, f32::NAN], [3])?;
/// assert_eq!(cpu::cast(&x, DType::U8)?.to_vec::<u8>()?, [0, 255, 0]);
/// assert_eq!(cpu::cast(&x, DType::Bool)?.to_vec::<bool>()?, [true; 3]);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Returns an error if the elements are not in the CPU's memory.
pub fn cast(x: &Tensor, dtype: DType) -> Result<Tensor> {
    if x.dtype() == dtype {
        return Ok(x.clone());
    }
    let src = x.data_bytes()?;
    let mut out = Tensor::uninit(dtype, x.shape());
    if out.numel() == 0 {
        return Ok(out);
    }
    let rows = StridedRows::new(x.shape(), [x.strides()]);
    if casts_packed(&rows) {
        return cast(&x.packed_copy(), dtype);
    }
    isoshard_kernels::cast(&rows, (src, x.dtype()), (out.bytes_mut(), dtype));
    Ok(out)
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

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

    /// Checks the numbers half way between any two neighbours of a dtype, and the f64 next to them. `bits` are those of
    /// infinity, and `above` is the power of two above the largest number.
    fn check_midpoints<T: Element + PartialEq>(bits: u16, number: fn(u16) -> T, above: f64) {
        let values: Vec<f64> = (0..bits).map(|h| number(h).to_f64()).chain([above]).collect();
        let (mut x, mut want) = (Vec::new(), Vec::new());
        for (h, pair) in (0..bits).zip(values.windows(2)) {
            let middle = (pair[0] + pair[1]) / 2.0;
            for (x1, nearest) in [(middle.next_down(), h), (middle, h + (h & 1)), (middle.next_up(), h + 1)] {
                x.extend([x1, -x1]);
                want.extend([nearest, nearest | 0x8000]);
            }
        }
        let x = Tensor::from_vec(x.clone(), [x.len()]).unwrap();
        let got: Vec<T> = to(&x, T::DTYPE);
        let wrong = got.iter().zip(&want).position(|(got, &want)| *got != number(want));
        assert!(wrong.is_none(), "{}: {:?}", T::DTYPE, wrong.map(|i| (x.to_f64_vec()[i], want[i])));
    }

    #[test]
    fn every_midpoint_of_two_halves_and_its_neighbours_round_once() {
        check_midpoints(0x7c00, f16::from_bits, 65536.0);
        check_midpoints(0x7f80, bf16::from_bits, 2f64.powi(128));
    }

    #[test]
    fn rounds_once_to_nearest_even() {
        // 1 + 2^-8 is a tie in bf16; `above` is not, but would be one if it were rounded to f32 first.
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
