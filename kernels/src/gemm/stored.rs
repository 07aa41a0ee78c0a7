//! The element types that operands are stored in, with the kernels that read them as they are, for each instruction set.

use half::{bf16, f16};

use super::lines::{LineVector, StoredIn, UnitsIn};
use super::strip::{Strip, sums_of_strip};
use super::thin_tile::{ThinTile, sums_of_columns, sums_of_lines};
use super::tile::Tiled;
use super::vector::{ArrayVector, Vector};
use super::widen::{widen_lines, widen_rows};
use crate::isa::simd::Isa;
use crate::num::real::{Real, Widen, narrow_bf16, narrow_f16, widen_bf16, widen_f16};

/// A function that computes the sums of a [`ThinTile`].
pub(super) type ThinFn<E> = unsafe fn(&ThinTile<'_, E>);

/// A function that computes the sums of a [`Strip`].
pub(super) type StripFn<E> = unsafe fn(&Strip<'_, E>);

/// A function that copies elements, widened: [`widen_rows`] or [`widen_lines`].
pub(super) type WidenFn<E> = unsafe fn(*const E, usize, usize, usize, *mut <E as Widen>::Wide, usize);

/// The kernels of one instruction set. Those for `rows` rows have the number `rows - 1` in each list.
pub(super) struct StoredKernels<E: Widen + 'static> {
    /// The number of lines that are read side by side, and of elements that each must have.
    pub(super) line_lanes: (usize, usize),
    /// The kernels for such lines.
    pub(super) lines: &'static [ThinFn<E>],
    /// The number of contiguous columns in a vector.
    pub(super) lanes: usize,
    /// The kernels for several vectors of contiguous columns, with the number of vectors.
    pub(super) columns: &'static [(usize, ThinFn<E>)],
    /// The kernels for one vector of contiguous columns.
    pub(super) column: &'static [ThinFn<E>],
    /// The kernels for strips of contiguous columns; more rows would have too many sums.
    pub(super) strips: &'static [StripFn<E>],
    /// Copies rows.
    pub(super) widen_rows: WidenFn<E>,
    /// Copies lines to columns.
    pub(super) widen_lines: WidenFn<E>,
}

/// An element type that operands are stored in.
pub(super) trait Stored: Widen<Wide: Real + Tiled> {
    /// Returns the kernels for `isa`, which this CPU must have.
    fn stored_kernels(isa: Isa) -> &'static StoredKernels<Self>;
    /// Returns the number that the loops compute with.
    fn widen(self) -> Self::Wide;
    /// Returns the nearest element.
    fn narrow(x: Self::Wide) -> Self;
}

/// Lists kernels by rows, with leaves side by side, as many chains as multiply-adds are under way at a time, and vectors of
/// columns, as many as there are registers for.
macro_rules! kernels {
    ($name:ident, $isa:ident, $e:ty, $v:ty, $few:ty, [$($rows:literal: $leaves:literal $vectors:literal,)*], [$($few_rows:literal: $depth:literal,)*]) => {
        pub(super) static $name: StoredKernels<$e> = StoredKernels {
            line_lanes: (<$few as Vector>::LANES, <$few as LineVector>::PIECE * <$e as UnitsIn<$few>>::PER_UNIT),
            lines: &[$($isa::lines::<$few, $e, $rows, $leaves>),*],
            lanes: <$v as Vector>::LANES,
            columns: &[$(($vectors, $isa::columns::<$v, $e, $rows, $vectors>)),*],
            column: &[$($isa::columns::<$v, $e, $rows, 1>),*],
            strips: &[$($isa::strips::<$v, $e, $few_rows, $depth>),*],
            widen_rows: $isa::rows_wide::<$v, $e>,
            widen_lines: $isa::lines_wide::<$few, $e>,
        };
    };
}

macro_rules! stored {
    ($($e:ident: $avx512:ident $avx2:ident $plain:ident, $v512:ident $v256:ident $array:ty, $widen:expr, $narrow:expr;)*) => {
        #[cfg(target_arch = "x86_64")]
        mod x86 {
            use std::arch::x86_64::{__m256, __m256d, __m512, __m512d};

            use super::*;

            $(
                kernels!($avx512, for_avx512, $e, $v512, $v256, [
                    1: 4 16, 2: 4 8, 3: 2 6, 4: 2 5, 5: 1 4, 6: 1 4, 7: 1 3, 8: 1 3,
                ], [1: 8, 2: 8, 3: 4, 4: 4,]);
                kernels!($avx2, for_avx2, $e, $v256, $v256, [
                    1: 4 8, 2: 2 5, 3: 2 3, 4: 1 2, 5: 1 2, 6: 1 2,
                ], [1: 8, 2: 8, 3: 4, 4: 4,]);
            )*
        }

        $(
            kernels!($plain, for_every_cpu, $e, $array, $array, [1: 4 8, 2: 2 4, 3: 2 2, 4: 1 2,], [1: 8, 2: 8, 3: 4, 4: 4,]);

            impl Stored for $e {
                fn stored_kernels(isa: Isa) -> &'static StoredKernels<$e> {
                    match isa {
                        #[cfg(target_arch = "x86_64")]
                        Isa::Avx512 => &x86::$avx512,
                        #[cfg(target_arch = "x86_64")]
                        Isa::Avx2 => &x86::$avx2,
                        _ => &$plain,
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
        )*
    };
}

stored! {
    f32: AVX512_F32 AVX2_F32 PLAIN_F32, __m512 __m256 ArrayVector<f32, 4>, |x| x, |x| x;
    f64: AVX512_F64 AVX2_F64 PLAIN_F64, __m512d __m256d ArrayVector<f64, 2>, |x| x, |x| x;
    bf16: AVX512_BF16 AVX2_BF16 PLAIN_BF16, __m512 __m256 ArrayVector<f32, 4>,
        |x: bf16| widen_bf16(x.to_bits()), |x| bf16::from_bits(narrow_bf16(x));
    f16: AVX512_F16 AVX2_F16 PLAIN_F16, __m512 __m256 ArrayVector<f32, 4>,
        |x: f16| widen_f16(x.to_bits()), |x| f16::from_bits(narrow_f16(x));
}

/// Compiles the kernels for an instruction set.
macro_rules! compiled {
    ($name:ident $(, #[$attribute:meta])*) => {
        mod $name {
            use super::*;

            $(#[$attribute])*
            pub(super) unsafe fn lines<V, E, const ROWS: usize, const LEAVES: usize>(t: &ThinTile<'_, E>)
            where
                V: LineVector,
                E: UnitsIn<V> + Widen<Wide = V::T>,
            {
                // SAFETY: the caller's promise.
                unsafe { sums_of_lines::<V, E, ROWS, LEAVES>(t) }
            }

            $(#[$attribute])*
            pub(super) unsafe fn columns<V, E, const ROWS: usize, const VECTORS: usize>(t: &ThinTile<'_, E>)
            where
                V: Vector,
                E: StoredIn<V> + Widen<Wide = V::T>,
            {
                // SAFETY: the caller's promise.
                unsafe { sums_of_columns::<V, E, ROWS, VECTORS>(t) }
            }

            $(#[$attribute])*
            pub(super) unsafe fn strips<V, E, const ROWS: usize, const DEPTH: usize>(t: &Strip<'_, E>)
            where
                V: Vector,
                E: StoredIn<V> + Widen<Wide = V::T>,
            {
                // SAFETY: the caller's promise.
                unsafe { sums_of_strip::<V, E, ROWS, DEPTH>(t) }
            }

            $(#[$attribute])*
            pub(super) unsafe fn rows_wide<V, E>(
                src: *const E, src_step: usize, rows: usize, len: usize, dst: *mut V::T, dst_step: usize,
            ) where
                V: Vector,
                E: StoredIn<V> + Widen<Wide = V::T>,
            {
                // SAFETY: the caller's promise.
                unsafe { widen_rows::<V, E>(src, src_step, rows, len, dst, dst_step) }
            }

            $(#[$attribute])*
            pub(super) unsafe fn lines_wide<V, E>(
                src: *const E, src_step: usize, lines: usize, len: usize, dst: *mut V::T, dst_step: usize,
            ) where
                V: LineVector,
                E: UnitsIn<V> + Widen<Wide = V::T>,
            {
                // SAFETY: the caller's promise.
                unsafe { widen_lines::<V, E>(src, src_step, lines, len, dst, dst_step) }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
compiled!(for_avx512, #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")]);
#[cfg(target_arch = "x86_64")]
compiled!(for_avx2, #[target_feature(enable = "avx2,fma,f16c")]);
compiled!(for_every_cpu);
