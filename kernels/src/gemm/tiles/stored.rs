//! The element types that operands are stored in, with the kernels that read them as they are, for each instruction set.

use half::{bf16, f16};

use super::lines::{LineVector, StoredIn, UnitsIn};
use super::strip::{Strip, sums_of_strip};
use super::thin_tile::{ThinTile, sums_of_lines};
use super::tile::Tiled;
use super::vector::{ArrayVector, Vector};
use super::widening::{widen_lines, widen_rows};
use crate::isa::simd::Isa;
use crate::num::real::{Real, Widen, narrow_bf16, narrow_f16, widen_bf16, widen_f16};

/// A function that computes the sums of a [`ThinTile`].
pub(in crate::gemm) type ThinFn<E> = unsafe fn(&ThinTile<'_, E>);

/// A function that computes the sums of a [`Strip`].
pub(in crate::gemm) type StripFn<E> = unsafe fn(&Strip<'_, E>);

/// A function that copies elements, widened: [`widen_rows`] or [`widen_lines`].
pub(in crate::gemm) type WidenFn<E> =
    unsafe fn(*const E, usize, usize, usize, *mut <E as Widen>::Wide, usize);

/// The kernels of one instruction set. Those of thin products have a number of rows, and are listed by it.
pub(in crate::gemm) struct StoredKernels<E: Widen + 'static> {
    /// The number of lines that are read side by side, and of elements that each must have.
    pub(in crate::gemm) line_lanes: (usize, usize),
    /// The kernels for such lines.
    pub(in crate::gemm) lines: &'static [(usize, ThinFn<E>)],
    /// The number of contiguous columns in a vector.
    pub(in crate::gemm) lanes: usize,
    /// The kernels for strips of contiguous columns; more rows would have too many sums.
    pub(in crate::gemm) strips: &'static [(usize, StripFn<E>)],
    /// Copies rows.
    pub(in crate::gemm) widen_rows: WidenFn<E>,
    /// Copies lines to columns, if they are widened.
    pub(in crate::gemm) widen_lines: Option<WidenFn<E>>,
}

/// An element type that operands are stored in.
pub(in crate::gemm) trait Stored: Widen<Wide: Real + Tiled> {
    /// Returns the kernels for `isa`, which this CPU must have.
    fn stored_kernels(isa: Isa) -> &'static StoredKernels<Self>;
    /// Returns the number that the loops compute with.
    fn widen(self) -> Self::Wide;
    /// Returns the nearest element.
    fn narrow(x: Self::Wide) -> Self;
}

/// Lists kernels by rows: for lines with leaves side by side, as many chains as multiply-adds are under way at a time, and for strips
/// with rows of the matrix side by side.
macro_rules! kernels {
    ($name:ident: $e:ty, $isa:ident, lines of $few:ty: [$($rows:literal: $leaves:literal,)*],
        strips of $v:ty: [$($few_rows:literal: $depth:literal,)*], widened by $by:ident: $rows_by:ty $(, $lines_by:ty)?) => {
        pub(in crate::gemm) static $name: StoredKernels<$e> = StoredKernels {
            line_lanes: (<$few as Vector>::LANES, <$few as LineVector>::PIECE * <$e as UnitsIn<$few>>::PER_UNIT),
            lines: &[$(($rows, $isa::lines::<$few, $e, $rows, $leaves>)),*],
            lanes: <$v as Vector>::LANES,
            strips: &[$(($few_rows, $isa::strips::<$v, $e, $few_rows, $depth>)),*],
            ..kernels!(@copies $e, $by: $rows_by $(, $lines_by)?)
        };
    };
    ($name:ident: $e:ty, widened by $by:ident: $rows_by:ty $(, $lines_by:ty)?) => {
        pub(in crate::gemm) static $name: StoredKernels<$e> = kernels!(@copies $e, $by: $rows_by $(, $lines_by)?);
    };
    (@copies $e:ty, $by:ident: $rows_by:ty) => {
        StoredKernels {
            line_lanes: (0, 0),
            lines: &[],
            lanes: 0,
            strips: &[],
            widen_rows: $by::rows_wide::<$rows_by, $e>,
            widen_lines: None,
        }
    };
    (@copies $e:ty, $by:ident: $rows_by:ty, $lines_by:ty) => {
        StoredKernels {
            line_lanes: (<$lines_by as Vector>::LANES, 0),
            widen_lines: Some($by::lines_wide::<$lines_by, $e>),
            ..kernels!(@copies $e, $by: $rows_by)
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{__m256, __m256d, __m512};

    use super::*;

    macro_rules! thin_products {
        ($avx512:ident $avx2:ident: $e:ty, $strips512:tt $strips256:tt $(, $lines_by:ty)?) => {
            kernels!($avx512: $e, for_avx512, lines of __m256: [1: 4, 2: 4, 3: 2, 4: 2, 6: 1, 8: 1,],
                strips of __m512: $strips512, widened by for_avx2: __m256 $(, $lines_by)?);
            kernels!($avx2: $e, for_avx2, lines of __m256: [1: 4, 2: 2, 3: 2, 4: 1, 6: 1,],
                strips of __m256: $strips256, widened by for_avx2: __m256 $(, $lines_by)?);
        };
    }

    // Wide tiles read more rows of f32 in place faster than strips do.
    thin_products!(AVX512_F32 AVX2_F32: f32, [1: 8, 2: 8, 4: 4,] [1: 8, 2: 8, 4: 4, 6: 4,]);
    thin_products!(AVX512_BF16 AVX2_BF16: bf16, [1: 8, 2: 8, 4: 4, 8: 4,] [1: 8, 2: 8, 4: 4, 6: 4,], __m256);
    thin_products!(AVX512_F16 AVX2_F16: f16, [1: 8, 2: 8, 4: 4, 8: 4,] [1: 8, 2: 8, 4: 4, 6: 4,], __m256);
    kernels!(AVX2_F64: f64, widened by for_avx2: __m256d);
}

/// The kernels for every CPU. On x86-64 they are for tests, and for CPUs that emulate multiply-adds: one of each kind.
mod plain {
    use super::*;

    type F32x4 = ArrayVector<f32, 4>;

    macro_rules! thin_products {
        ($lines:tt, $strips:tt) => {
            kernels!(F32: f32, for_every_cpu, lines of F32x4: $lines, strips of F32x4: $strips, widened by for_every_cpu: F32x4);
            kernels!(BF16: bf16, for_every_cpu, lines of F32x4: $lines, strips of F32x4: $strips,
                widened by for_every_cpu: F32x4, F32x4);
            kernels!(F16: f16, for_every_cpu, lines of F32x4: $lines, strips of F32x4: $strips,
                widened by for_every_cpu: F32x4, F32x4);
        };
    }

    #[cfg(target_arch = "x86_64")]
    thin_products!([1: 1,], [1: 1,]);
    #[cfg(not(target_arch = "x86_64"))]
    thin_products!([1: 4, 2: 2, 4: 1,], [1: 8, 2: 8, 4: 4,]);
    kernels!(F64: f64, widened by for_every_cpu: ArrayVector<f64, 2>);
}

macro_rules! stored {
    ($($e:ident: $avx512:ident $avx2:ident $plain:ident, $widen:expr, $narrow:expr;)*) => {$(
        impl Stored for $e {
            fn stored_kernels(isa: Isa) -> &'static StoredKernels<$e> {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 => &x86::$avx512,
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => &x86::$avx2,
                    _ => &plain::$plain,
                }
            }
            #[inline(always)]
            fn widen(self) -> Self::Wide {
                $widen(self)
            }
            #[inline(always)]
            fn narrow(x: Self::Wide) -> Self {
                $narrow(x)
            }
        }
    )*};
}

stored! {
    f32: AVX512_F32 AVX2_F32 F32, |x| x, |x| x;
    f64: AVX2_F64 AVX2_F64 F64, |x| x, |x| x;
    bf16: AVX512_BF16 AVX2_BF16 BF16, |x: bf16| widen_bf16(x.to_bits()), |x| bf16::from_bits(narrow_bf16(x));
    f16: AVX512_F16 AVX2_F16 F16, |x: f16| widen_f16(x.to_bits()), |x| f16::from_bits(narrow_f16(x));
}

/// Compiles the kernels of thin products for an instruction set.
macro_rules! compiled_products {
    ($(#[$attribute:meta])*) => {
        $(#[$attribute])*
        pub(in crate::gemm) unsafe fn lines<V, E, const ROWS: usize, const LEAVES: usize>(t: &ThinTile<'_, E>)
        where
            V: LineVector,
            E: UnitsIn<V> + Widen<Wide = V::T>,
        {
            // SAFETY: the caller's promise.
            unsafe { sums_of_lines::<V, E, ROWS, LEAVES>(t) }
        }

        $(#[$attribute])*
        pub(in crate::gemm) unsafe fn strips<V, E, const ROWS: usize, const DEPTH: usize>(t: &Strip<'_, E>)
        where
            V: Vector,
            E: StoredIn<V> + Widen<Wide = V::T>,
        {
            // SAFETY: the caller's promise.
            unsafe { sums_of_strip::<V, E, ROWS, DEPTH>(t) }
        }
    };
}

/// Compiles the copies for an instruction set.
macro_rules! compiled_copies {
    ($(#[$attribute:meta])*) => {
        $(#[$attribute])*
        pub(in crate::gemm) unsafe fn rows_wide<V, E>(
            src: *const E, src_step: usize, rows: usize, len: usize, dst: *mut V::T, dst_step: usize,
        ) where
            V: Vector,
            E: StoredIn<V> + Widen<Wide = V::T>,
        {
            // SAFETY: the caller's promise.
            unsafe { widen_rows::<V, E>(src, src_step, rows, len, dst, dst_step) }
        }

        $(#[$attribute])*
        pub(in crate::gemm) unsafe fn lines_wide<V, E>(
            src: *const E, src_step: usize, lines: usize, len: usize, dst: *mut V::T, dst_step: usize,
        ) where
            V: LineVector,
            E: UnitsIn<V> + Widen<Wide = V::T>,
        {
            // SAFETY: the caller's promise.
            unsafe { widen_lines::<V, E>(src, src_step, lines, len, dst, dst_step) }
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod for_avx512 {
    use super::*;

    compiled_products!(#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")]);
}

#[cfg(target_arch = "x86_64")]
mod for_avx2 {
    use super::*;

    compiled_products!(#[target_feature(enable = "avx2,fma,f16c")]);
    compiled_copies!(#[target_feature(enable = "avx2,fma,f16c")]);
}

mod for_every_cpu {
    use super::*;

    compiled_products!();
    compiled_copies!();
}
