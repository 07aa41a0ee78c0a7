//! Conversions between all dtypes.
//!
//! A conversion is a path of one to three steps between dtypes; each step is a loop over bytes that is compiled once.
//! f16 and bf16 are converted by way of f32, and bool is read as u8. Elements are converted chunk by chunk, so that a
//! chunk stays in the first-level cache between steps.

use half::{bf16, f16};
use smallvec::{SmallVec, smallvec};

use super::strided_rows::StridedRows;
use crate::element::{DType, Element, odd_f32};
use crate::isa::simd::{Isa, Kernel, dispatch, opaque_index};
use crate::num::real::Widen;
use crate::threads::parts::RowsMut;
use crate::threads::team::for_each_part;

/// Returns true if a contiguous copy of the rows costs less than their conversion in place, or if only a copy can be converted.
pub fn casts_packed(rows: &StridedRows<1>) -> bool {
    (rows.row_len() < SHORT_ROW && rows.row_count() > 1) || rows.row_stride(0) > 1
}

/// Converts all rows of `src` to contiguous elements of another dtype. The bytes come with their dtypes; in rows the
/// elements are contiguous or repeated.
///
/// ```
/// use isoshard_kernels::{DType, StridedRows, cast};
/// let mut out = [0u8; 3];
/// let src: &[f32] = &[-1.9, 300.0, f32::NAN];
/// let rows = StridedRows::new(&[3], [&[1]]);
/// cast(&rows, (bytemuck::cast_slice(src), DType::F32), (&mut out, DType::U8));
/// assert_eq!(out, [0, 255, 0]);
/// ```
pub fn cast(rows: &StridedRows<1>, (src, from): (&[u8], DType), (dst, to): (&mut [u8], DType)) {
    convert(rows, (src, from.size_bytes()), (dst, to.size_bytes()), &path(from, to));
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
