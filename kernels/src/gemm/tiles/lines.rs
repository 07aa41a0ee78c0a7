//! Lines that are contiguous along the contraction, read as vectors of their columns: transposed in registers.
//!
//! A vector's lanes are lines. A *unit* is what a lane takes of its line at once: an element, or a pair of neighbouring
//! 16-bit elements, which become two vectors after the transposition.

use half::{bf16, f16};

use super::vector::{ArrayVector, Vector};
use crate::num::real::{widen_bf16, widen_f16};

/// A vector that reads as many lines as it has lanes.
///
/// # Safety
/// The method needs the instruction set of the type. `lines` and `step`, in bytes, lead to as many lines as there are
/// lanes, with the units of a piece in each. Memory is read with any alignment.
pub(in crate::gemm) unsafe trait LineVector: Vector {
    /// The number of units in a piece.
    const PIECE: usize;
    /// The units of a piece, one after the other.
    type Piece: AsRef<[Self]>;
    /// Reads a piece: 16 bytes of each line.
    unsafe fn piece(lines: *const u8, step: usize) -> Self::Piece;
}

/// An element type that is loaded into vectors of type `V`.
///
/// # Safety
/// The method needs the instruction set of the vector type.
pub(in crate::gemm) unsafe trait StoredIn<V>: Copy {
    /// Loads neighbouring elements, one per lane, with any alignment.
    unsafe fn load_lanes(p: *const Self) -> V;
}

/// An element type whose units lie in vectors of type `V`.
///
/// # Safety
/// The method needs the instruction set of the vector type. A unit has the size of a lane.
pub(in crate::gemm) unsafe trait UnitsIn<V>: StoredIn<V> {
    /// The number of elements in a unit: 1 or 2.
    const PER_UNIT: usize;
    /// Returns the elements of each lane's unit, in ascending order. Those beyond the unit's are not used.
    unsafe fn columns(unit: V) -> [V; 2];
}

macro_rules! stored_alone {
    ($($t:ty)*) => {$(
        // SAFETY: a lane is an element.
        unsafe impl<V: Vector<T = $t>> StoredIn<V> for $t {
            #[inline(always)]
            unsafe fn load_lanes(p: *const $t) -> V {
                // SAFETY: the caller's promise.
                unsafe { V::load(p) }
            }
        }

        // SAFETY: as above.
        unsafe impl<V: Vector<T = $t>> UnitsIn<V> for $t {
            const PER_UNIT: usize = 1;
            #[inline(always)]
            unsafe fn columns(unit: V) -> [V; 2] {
                [unit; 2]
            }
        }
    )*};
}

stored_alone!(f32 f64);

macro_rules! array_lines {
    ($($t:ty, $n:literal;)*) => {$(
        // SAFETY: plain loops over the lanes.
        unsafe impl LineVector for ArrayVector<$t, $n> {
            const PIECE: usize = $n;
            type Piece = [Self; $n];
            #[inline(always)]
            unsafe fn piece(lines: *const u8, step: usize) -> [Self; $n] {
                let mut columns = [ArrayVector([0.0; $n]); $n];
                for lane in 0..$n {
                    // SAFETY: the caller's promise.
                    let line = unsafe { lines.add(lane * step).cast::<[$t; $n]>().read_unaligned() };
                    for (column, x) in columns.iter_mut().zip(line) {
                        column.0[lane] = x;
                    }
                }
                columns
            }
        }
    )*};
}

array_lines! {
    f32, 4;
}

macro_rules! array_pairs {
    ($($t:ty, $widen:path;)*) => {$(
        // SAFETY: plain loops over the lanes.
        unsafe impl StoredIn<ArrayVector<f32, 4>> for $t {
            #[inline(always)]
            unsafe fn load_lanes(p: *const $t) -> ArrayVector<f32, 4> {
                // SAFETY: the caller's promise; an array needs no more alignment than its elements.
                ArrayVector(unsafe { p.cast::<[u16; 4]>().read() }.map($widen))
            }
        }

        // SAFETY: as above.
        unsafe impl UnitsIn<ArrayVector<f32, 4>> for $t {
            const PER_UNIT: usize = 2;
            #[inline(always)]
            unsafe fn columns(unit: ArrayVector<f32, 4>) -> [ArrayVector<f32, 4>; 2] {
                let mut columns = [ArrayVector([0.0; 4]); 2];
                for (lane, pair) in unit.0.iter().enumerate() {
                    let [a, b, c, d] = pair.to_ne_bytes();
                    columns[0].0[lane] = $widen(u16::from_ne_bytes([a, b]));
                    columns[1].0[lane] = $widen(u16::from_ne_bytes([c, d]));
                }
                columns
            }
        }
    )*};
}

array_pairs! {
    bf16, widen_bf16;
    f16, widen_f16;
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use half::{bf16, f16};

    use super::{LineVector, StoredIn, UnitsIn};

    /// Returns 16 bytes of two lines that are `apart` bytes apart.
    ///
    /// # Safety
    /// The memory is there; the CPU has AVX.
    #[inline(always)]
    unsafe fn two_lines(p: *const u8, apart: usize) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe {
            let (low, high) = (_mm_loadu_ps(p.cast()), _mm_loadu_ps(p.add(apart).cast()));
            _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(low), high)
        }
    }

    // SAFETY: each method reads 16 bytes of each line. Vectors of 256 bits read as fast as those of 512, with half as many
    // lines at a time, which the first cache and the prefetchers have room for however far apart they are.
    unsafe impl LineVector for __m256 {
        const PIECE: usize = 4;
        type Piece = [__m256; 4];
        #[inline(always)]
        unsafe fn piece(lines: *const u8, step: usize) -> [__m256; 4] {
            // SAFETY: the caller's promise.
            unsafe {
                let (a, b) = (two_lines(lines, 4 * step), two_lines(lines.add(step), 4 * step));
                let (c, d) =
                    (two_lines(lines.add(2 * step), 4 * step), two_lines(lines.add(3 * step), 4 * step));
                let (ab, cd) = (_mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(c, d));
                let (ab_high, cd_high) = (_mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(c, d));
                [
                    _mm256_shuffle_ps::<0x44>(ab, cd),
                    _mm256_shuffle_ps::<0xee>(ab, cd),
                    _mm256_shuffle_ps::<0x44>(ab_high, cd_high),
                    _mm256_shuffle_ps::<0xee>(ab_high, cd_high),
                ]
            }
        }
    }

    // SAFETY: integer instructions on the lanes' bits.
    unsafe impl StoredIn<__m512> for bf16 {
        #[inline(always)]
        unsafe fn load_lanes(p: *const bf16) -> __m512 {
            // SAFETY: the caller's promise.
            unsafe {
                let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
            }
        }
    }

    // SAFETY: as above.
    unsafe impl StoredIn<__m256> for bf16 {
        #[inline(always)]
        unsafe fn load_lanes(p: *const bf16) -> __m256 {
            // SAFETY: the caller's promise.
            unsafe {
                let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
            }
        }
    }

    // SAFETY: as above.
    unsafe impl UnitsIn<__m256> for bf16 {
        const PER_UNIT: usize = 2;
        #[inline(always)]
        unsafe fn columns(unit: __m256) -> [__m256; 2] {
            // SAFETY: the caller's promise.
            unsafe {
                let bits = _mm256_castps_si256(unit);
                let second = _mm256_and_si256(bits, _mm256_set1_epi32(!0xffff));
                [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits)), _mm256_castsi256_ps(second)]
            }
        }
    }

    // SAFETY: as above; every f16 is converted exactly.
    unsafe impl StoredIn<__m512> for f16 {
        #[inline(always)]
        unsafe fn load_lanes(p: *const f16) -> __m512 {
            // SAFETY: the caller's promise.
            unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
        }
    }

    // SAFETY: as above.
    unsafe impl StoredIn<__m256> for f16 {
        #[inline(always)]
        unsafe fn load_lanes(p: *const f16) -> __m256 {
            // SAFETY: the caller's promise.
            unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
        }
    }

    // SAFETY: as above.
    unsafe impl UnitsIn<__m256> for f16 {
        const PER_UNIT: usize = 2;
        #[inline(always)]
        unsafe fn columns(unit: __m256) -> [__m256; 2] {
            // SAFETY: the caller's promise.
            unsafe {
                let bits = _mm256_castps_si256(unit);
                let first = _mm256_and_si256(bits, _mm256_set1_epi32(0xffff));
                // Both halves of the lower four lanes, then of the others; then one half of all lanes after the other.
                let packed = _mm256_packus_epi32(first, _mm256_srli_epi32::<16>(bits));
                let sorted = _mm256_permute4x64_epi64::<0xd8>(packed);
                [
                    _mm256_cvtph_ps(_mm256_castsi256_si128(sorted)),
                    _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(sorted)),
                ]
            }
        }
    }
}
