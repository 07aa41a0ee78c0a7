//! The vector types of tiles: AVX-512, AVX2 with FMA, and plain arrays.
//!
//! All of them round a multiply-add once, so the value of a lane does not depend on the vector type.

/// A vector with lanes of type `T`.
///
/// # Safety
/// All methods need the instruction set of the type, and pointers to as many elements as there are lanes.
pub(in crate::gemm) unsafe trait Vector: Copy {
    /// The type of a lane.
    type T: Copy;
    /// The number of lanes.
    const LANES: usize;
    /// Returns the identity of addition, -0.0, in every lane.
    unsafe fn sum_identity() -> Self;
    /// Returns `x` in every lane.
    unsafe fn splat(x: Self::T) -> Self;
    /// Loads from memory with any alignment.
    unsafe fn load(p: *const Self::T) -> Self;
    /// Stores to memory with any alignment.
    unsafe fn store(self, p: *mut Self::T);
    /// Returns `self * b + c`, rounded once.
    unsafe fn fma(self, b: Self, c: Self) -> Self;
    /// Returns the sum.
    unsafe fn add(self, b: Self) -> Self;
    /// Returns the product.
    unsafe fn mul(self, b: Self) -> Self;
}

#[cfg(target_arch = "x86_64")]
macro_rules! vectors {
    ($($v:ty, $t:ty, $lanes:expr, $set1:ident, $load:ident, $store:ident, $fma:ident, $add:ident, $mul:ident;)*) => {$(
        // SAFETY: each method is one instruction of the type's instruction set.
        unsafe impl Vector for $v {
            type T = $t;
            const LANES: usize = $lanes;
            #[inline(always)]
            unsafe fn sum_identity() -> Self {
                // SAFETY: the caller's promise.
                unsafe { x86::$set1(-0.0) }
            }
            #[inline(always)]
            unsafe fn splat(x: $t) -> Self {
                // SAFETY: the caller's promise.
                unsafe { x86::$set1(x) }
            }
            #[inline(always)]
            unsafe fn load(p: *const $t) -> Self {
                // SAFETY: the caller's promise.
                unsafe { x86::$load(p) }
            }
            #[inline(always)]
            unsafe fn store(self, p: *mut $t) {
                // SAFETY: the caller's promise.
                unsafe { x86::$store(p, self) }
            }
            #[inline(always)]
            unsafe fn fma(self, b: Self, c: Self) -> Self {
                // SAFETY: the caller's promise.
                unsafe { x86::$fma(self, b, c) }
            }
            #[inline(always)]
            unsafe fn add(self, b: Self) -> Self {
                // SAFETY: the caller's promise.
                unsafe { x86::$add(self, b) }
            }
            #[inline(always)]
            unsafe fn mul(self, b: Self) -> Self {
                // SAFETY: the caller's promise.
                unsafe { x86::$mul(self, b) }
            }
        }
    )*};
}

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64 as x86;

#[cfg(target_arch = "x86_64")]
vectors! {
    x86::__m512, f32, 16, _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_fmadd_ps, _mm512_add_ps, _mm512_mul_ps;
    x86::__m512d, f64, 8, _mm512_set1_pd, _mm512_loadu_pd, _mm512_storeu_pd, _mm512_fmadd_pd, _mm512_add_pd, _mm512_mul_pd;
    x86::__m256, f32, 8, _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_fmadd_ps, _mm256_add_ps, _mm256_mul_ps;
    x86::__m256d, f64, 4, _mm256_set1_pd, _mm256_loadu_pd, _mm256_storeu_pd, _mm256_fmadd_pd, _mm256_add_pd, _mm256_mul_pd;
}

/// A vector as an array, for every CPU.
#[derive(Clone, Copy)]
pub(in crate::gemm) struct ArrayVector<T, const N: usize>(pub(in crate::gemm) [T; N]);

macro_rules! lanes {
    ($($t:ty, $n:expr, $fma:path;)*) => {$(
        // SAFETY: plain loops over the lanes.
        unsafe impl Vector for ArrayVector<$t, $n> {
            type T = $t;
            const LANES: usize = $n;
            #[inline(always)]
            unsafe fn sum_identity() -> Self {
                ArrayVector([-0.0; $n])
            }
            #[inline(always)]
            unsafe fn splat(x: $t) -> Self {
                ArrayVector([x; $n])
            }
            #[inline(always)]
            unsafe fn load(p: *const $t) -> Self {
                // SAFETY: the caller's promise; an array needs no more alignment than its elements.
                ArrayVector(unsafe { p.cast::<[$t; $n]>().read() })
            }
            #[inline(always)]
            unsafe fn store(self, p: *mut $t) {
                // SAFETY: as above.
                unsafe { p.cast::<[$t; $n]>().write(self.0) }
            }
            #[inline(always)]
            unsafe fn fma(self, b: Self, mut c: Self) -> Self {
                for i in 0..$n {
                    c.0[i] = $fma(self.0[i], b.0[i], c.0[i]);
                }
                c
            }
            #[inline(always)]
            unsafe fn add(mut self, b: Self) -> Self {
                for i in 0..$n {
                    self.0[i] += b.0[i];
                }
                self
            }
            #[inline(always)]
            unsafe fn mul(mut self, b: Self) -> Self {
                for i in 0..$n {
                    self.0[i] *= b.0[i];
                }
                self
            }
        }
    )*};
}

lanes! {
    f32, 4, fma_f32;
    f64, 2, f64::mul_add;
}

/// Returns `a * b + c`, rounded once, also if the CPU has no instruction for it; a library call per element would be
/// slow.
///
/// In f64 the product is exact. The sum is rounded to odd: if the exact sum is between two f64, the one with the odd
/// significand is taken, which follows from the rounding error (Knuth's two-sum). Rounding it to f32, which is less
/// than half as wide, equals rounding the exact sum (Boldo and Melquiond, IEEE Transactions on Computers 57, 2008).
#[inline(always)]
pub(in crate::gemm) fn fma_f32(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(any(target_feature = "fma", not(target_arch = "x86_64"))) {
        return a.mul_add(b, c);
    }
    let (p, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let sum = p + c;
    let of_c = sum - p;
    let error = (p - (sum - of_c)) + (c - of_c);
    let bits = sum.to_bits();
    // One step away from zero if the error has the sum's sign, else towards it. Both comparisons are false for NaN.
    let step = if (error.to_bits() ^ bits) >> 63 == 0 { 1 } else { u64::MAX };
    let inexact = (error > 0.0) | (error < 0.0);
    let odd = bits.wrapping_add(if inexact & (bits & 1 == 0) { step } else { 0 });
    f64::from_bits(odd) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_emulated_product_and_sum_rounds_once() {
        let specials = [
            0.0f32,
            -0.0,
            1.0,
            -1.0,
            f32::MAX,
            f32::MIN_POSITIVE,
            1e-45,
            -1e-45,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::NAN,
            1.0 + f32::EPSILON,
            0.5 - f32::EPSILON / 4.0,
        ];
        let same = |a: f32, b: f32, c: f32| {
            let (got, want) = (fma_f32(a, b, c), a.mul_add(b, c));
            let equal = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
            assert!(equal, "{a:e} * {b:e} + {c:e}: {got:e}, not {want:e}");
        };
        for a in specials {
            for b in specials {
                specials.iter().for_each(|&c| same(a, b, c));
            }
        }
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 32) as u32
        };
        for _ in 0..300_000 {
            let (a, b) = (f32::from_bits(next()), f32::from_bits(next()));
            same(a, b, f32::from_bits(next()));
            // Cancellation, ties, and values next to ties.
            let p = a * b;
            same(a, b, f32::from_bits((-p).to_bits().wrapping_add(next() % 5).wrapping_sub(2)));
            same(a, b, p * f32::from_bits((127 - 24 + (next() % 49)) << 23));
        }
    }
}
