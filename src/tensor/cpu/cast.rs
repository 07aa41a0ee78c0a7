//! Conversions between all dtypes.
//!
//! A conversion is a path of one to three steps between dtypes; each step is a loop over bytes that is compiled once.
//! f16 and bf16 are converted by way of f32, and bool is read as u8. The tensor is converted chunk by chunk, so that a
//! chunk stays in the first-level cache between steps.

use half::{bf16, f16};
use smallvec::{SmallVec, smallvec};

use super::StridedRows;
use super::parts::RowsMut;
use super::real::Widen;
use super::simd::{Isa, Kernel, dispatch, opaque_index};
use super::threads::for_each_part;
use crate::error::Result;
use crate::tensor::dtype::odd_f32;
use crate::tensor::{DType, Element, Tensor};

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
    let short = rows.row_len() < SHORT_ROW && rows.row_count() > 1;
    if short || rows.row_stride(0) > 1 {
        return cast(&x.packed_copy(), dtype);
    }
    let path = path(x.dtype(), dtype);
    convert(&rows, (src, x.dtype().size_bytes()), (out.bytes_mut(), dtype.size_bytes()), &path);
    Ok(out)
}

/// The number of elements in a chunk, if there are several steps.
const CHUNK: usize = 512;
/// If rows are shorter than this, a contiguous copy costs less than a call per row.
const SHORT_ROW: usize = 32;

/// One step of a conversion: its loop, and the size of an element of its result.
#[derive(Clone, Copy)]
struct CastStep {
    run: fn(&[u8], &mut [u8]),
    size: usize,
}

type CastPath = SmallVec<[CastStep; 3]>;

/// Converts every chunk of the source along the path. The source and the result come with their elements' sizes.
fn convert(
    rows: &StridedRows<1>,
    (src, src_size): (&[u8], usize),
    (dst, dst_size): (&mut [u8], usize),
    path: &[CastStep],
) {
    let repeated = rows.row_stride(0) == 0;
    let chunk = if path.len() == 1 { usize::MAX } else { CHUNK };
    let all = rows.row_count() * rows.row_len();
    for_each_part(all, all, RowsMut { data: dst, len: dst_size }, |at, dst| {
        let first = at.start;
        let mut buffers = vec![[0u64; CHUNK]; path.len() - 1];
        rows.each_chunk_of(at, chunk, &mut |&[row], start, len, o| {
            let dst = &mut dst.data[(o - first) * dst_size..][..len * dst_size];
            if repeated {
                let mut buffer = 0u64;
                let one = &mut bytemuck::bytes_of_mut(&mut buffer)[..dst_size];
                follow(path, &src[row * src_size..][..src_size], one, &mut buffers);
                match one {
                    [one] => dst.fill(*one),
                    [_, _] => bytemuck::cast_slice_mut::<u8, u16>(dst).fill(bytemuck::cast_slice(one)[0]),
                    [_, _, _, _] => {
                        bytemuck::cast_slice_mut::<u8, u32>(dst).fill(bytemuck::cast_slice(one)[0])
                    }
                    _ => bytemuck::cast_slice_mut::<u8, u64>(dst).fill(buffer),
                }
                return;
            }
            follow(path, &src[(row + start) * src_size..][..len * src_size], dst, &mut buffers);
        });
    });
}

/// Converts one chunk along the path, with a buffer for each step but the last.
fn follow(path: &[CastStep], src: &[u8], dst: &mut [u8], buffers: &mut [[u64; CHUNK]]) {
    let ([step, rest @ ..], [buffer, buffers @ ..]) = (path, buffers) else {
        return (path[0].run)(src, dst);
    };
    let middle = &mut bytemuck::cast_slice_mut(buffer)[..dst.len() / path[path.len() - 1].size * step.size];
    (step.run)(src, middle);
    follow(rest, middle, dst, buffers);
}

/// Returns a path of one step that applies a function to each element.
macro_rules! step {
    ($from:ty, $to:ty, $f:expr) => {
        one_step(
            |src, dst| {
                let (src, dst) =
                    (bytemuck::cast_slice::<u8, $from>(src), bytemuck::cast_slice_mut::<u8, $to>(dst));
                dispatch(CastLoop { src, dst, f: $f });
            },
            size_of::<$to>(),
        )
    };
}
/// Returns the steps from one dtype to another.
fn path(from: DType, to: DType) -> CastPath {
    use DType::{BF16, Bool, F16, F32, F64, I32, I64, U8};
    let by = |middle| path(from, middle).into_iter().chain(path(middle, to)).collect();
    match (from, to) {
        (F16, F32) => {
            one_step(|src, dst| f16::widen_into(bytemuck::cast_slice(src), bytemuck::cast_slice_mut(dst)), 4)
        }
        (BF16, F32) => {
            one_step(|src, dst| bf16::widen_into(bytemuck::cast_slice(src), bytemuck::cast_slice_mut(dst)), 4)
        }
        (F32, F16) => {
            one_step(|src, dst| f16::narrow_into(bytemuck::cast_slice(src), bytemuck::cast_slice_mut(dst)), 2)
        }
        (F32, BF16) => one_step(
            |src, dst| bf16::narrow_into(bytemuck::cast_slice(src), bytemuck::cast_slice_mut(dst)),
            2,
        ),
        (F16 | BF16, _) => by(F32),
        (F64, F16 | BF16) => {
            let mut steps = step!(f64, f32, odd_f32);
            steps.extend(path(F32, to));
            steps
        }
        (I64 | I32, F16 | BF16) => by(F64),
        (U8 | Bool, F16 | BF16) => by(F32),
        (F32, F64) => step!(f32, f64, f64::from),
        (F32, I64) => step!(f32, i64, |x| x as i64),
        (F32, I32) => step!(f32, i32, |x| x as i32),
        (F32, U8) => step!(f32, u8, |x| x as u8),
        (F32, Bool) => step!(f32, u8, |x| u8::from(x != 0.0)),
        (F64, F32) => step!(f64, f32, |x| x as f32),
        (F64, I64) => step!(f64, i64, |x| x as i64),
        (F64, I32) => step!(f64, i32, |x| x as i32),
        (F64, U8) => step!(f64, u8, |x| x as u8),
        (F64, Bool) => step!(f64, u8, |x| u8::from(x != 0.0)),
        (I64, F32) => step!(i64, f32, |x| x as f32),
        (I64, F64) => step!(i64, f64, |x| x as f64),
        (I64, I32) => step!(i64, i32, |x| x as i32),
        (I64, U8) => step!(i64, u8, |x| x as u8),
        (I64, Bool) => step!(i64, u8, |x| u8::from(x != 0)),
        (I32, F32) => step!(i32, f32, |x| x as f32),
        (I32, F64) => step!(i32, f64, f64::from),
        (I32, I64) => step!(i32, i64, i64::from),
        (I32, U8) => step!(i32, u8, |x| x as u8),
        (I32, Bool) => step!(i32, u8, |x| u8::from(x != 0)),
        (U8 | Bool, F32) => step!(u8, f32, f32::from),
        (U8 | Bool, F64) => step!(u8, f64, f64::from),
        (U8 | Bool, I64) => step!(u8, i64, i64::from),
        (U8 | Bool, I32) => step!(u8, i32, i32::from),
        (U8, Bool) => step!(u8, u8, |x| u8::from(x != 0)),
        (Bool, U8) | (F32, F32) | (F64, F64) | (I64, I64) | (I32, I32) | (U8, U8) | (Bool, Bool) => {
            one_step(|src, dst| dst.copy_from_slice(src), to.size_bytes())
        }
    }
}

/// Returns a path of one step over bytes.
fn one_step(run: fn(&[u8], &mut [u8]), size: usize) -> CastPath {
    smallvec![CastStep { run, size }]
}

struct CastLoop<'a, A, O, F> {
    src: &'a [A],
    dst: &'a mut [O],
    f: F,
}

impl<A: Element, O: Element, F: Fn(A) -> O> Kernel for CastLoop<'_, A, O, F> {
    type Out = ();
    const WIDEST: Isa = if A::DTYPE.is_float() || O::DTYPE.is_float() { Isa::Avx2 } else { Isa::Baseline };
    #[inline(always)]
    fn run(self) {
        for (to, &from) in self.dst.iter_mut().zip(self.src) {
            *to = (self.f)(from);
        }
    }
    #[inline(always)]
    fn run_small(self) {
        for i in 0..self.dst.len() {
            let i = opaque_index(i);
            self.dst[i] = (self.f)(self.src[i]);
        }
    }
}

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
