//! Vectors with a leaf per lane: the lowest levels of the [summation tree](crate::sums::tree), for as many leaves at once as a
//! vector has lanes.
//!
//! The elements of a leaf are neighbours in memory, so the halves of a node lie in one vector. [`Lanes::level`] therefore
//! takes two vectors, moves the left halves of their nodes to one vector and the right halves to another, and joins
//! these. One such level makes one vector of two, and no lane is idle. [`collapse`] begins with a vector of each of `N`
//! leaves, and after all levels lane `i` holds the node over leaf `i`.

#[cfg(target_arch = "x86_64")]
use crate::element::DType;
use crate::isa::simd::Isa;
use crate::num::real::{Num, is_nan, select};
#[cfg(target_arch = "x86_64")]
use crate::sums::reducer::JoinOperation;
use crate::sums::reducer::Reducer;

/// Vectors of `N` lanes, a power of two up to 16. A vector is an array; the compiler keeps it in registers.
pub(crate) trait Lanes<const N: usize>: Copy {
    /// Joins each lane of `a` with that of `b`.
    fn join<T: Num, F: Reducer<T>>(self, a: [T; N], b: [T; N]) -> [T; N];

    /// Joins the nodes of two vectors that are `D` lanes apart: lane `i` and lane `i + D`, if `i` lacks the bit `D`. The
    /// nodes of `a` are at such lanes `i` of the result, those of `b` at `i + D`. If `D` is 1 or 2 the order may be another
    /// one, as long as the levels 1, 2, ..., `N / 2` of `N` vectors leave the node of vector `i` in lane `i`.
    fn level<T: Num, F: Reducer<T>, const D: usize>(self, a: [T; N], b: [T; N]) -> [T; N];

    /// Returns `x` in lanes in which it is beyond `best`, that is larger if `MAX` and else smaller, and `best` in the others:
    /// also if `x` is NaN, or a zero of another sign.
    fn beyond<T: Num, const MAX: bool>(self, x: [T; N], best: [T; N]) -> [T; N];

    /// Returns `marks`, but a number that is not 0 in lanes in which `x` or `y` is NaN. Marks begin as zeros.
    fn mark_nan<T: Num>(self, x: [T; N], y: [T; N], marks: [T; N]) -> [T; N];

    /// Loads the first `len` elements, followed by `pad`.
    ///
    /// # Safety
    /// `x` points to `len` elements, and `len` is at most `N`.
    unsafe fn load_first<T: Num>(self, x: *const T, len: usize, pad: T) -> [T; N];

    /// Loads the squares of `N` elements.
    ///
    /// # Safety
    /// `x` points to `N` elements.
    #[inline(always)]
    unsafe fn load_squares(self, x: *const f32) -> [f64; N] {
        // SAFETY: the caller's promise.
        unsafe { self.load_first_squares(x, N) }
    }

    /// Loads the squares of the first `len` elements, followed by zeros.
    ///
    /// # Safety
    /// `x` points to `len` elements, and `len` is at most `N`.
    #[inline(always)]
    unsafe fn load_first_squares(self, x: *const f32, len: usize) -> [f64; N] {
        let mut squares = [0.0; N];
        for (i, square) in squares.iter_mut().enumerate().take(len) {
            // SAFETY: the caller's promise.
            let x = f64::from(unsafe { *x.add(i) });
            *square = x * x;
        }
        squares
    }

    /// Runs a part of a computation: inlined, but in a function of its own in builds with debug assertions. A part that
    /// many places inline makes functions so long, with the checks of each place, that compiling them takes minutes.
    fn apart<T: Num, F: Reducer<T>, P: LanesPart<T, F, N>>(self, part: P);
}

/// True if [`Lanes::apart`] calls a function.
const APART: bool = cfg!(debug_assertions);

/// A computation that is compiled for each kind of vectors by itself. So it does not depend on its caller's instruction
/// set, nor on what of the caller is inlined.
pub(crate) trait LanesFold<T: Num, F: Reducer<T>> {
    /// True if the fold joins leaves, so that its speed depends on their number.
    const JOINS_LEAVES: bool;

    /// Runs the computation. Implementations are `#[inline(always)]`.
    fn run<L: Lanes<N>, const N: usize>(self, lanes: L);

    /// Runs the computation if there are no vectors but those that the compiler makes.
    #[inline(always)]
    fn run_plain(self)
    where
        Self: Sized,
    {
        self.run::<_, 4>(PlainLanes);
    }
}

/// A part of a computation on vectors of `N` lanes, for [`Lanes::apart`].
pub(crate) trait LanesPart<T: Num, F: Reducer<T>, const N: usize> {
    /// Runs the part. Implementations are `#[inline(always)]`.
    fn run<L: Lanes<N>>(self, lanes: L);
}

/// Runs `fold` with vectors of `isa`. Integers have plain ones.
///
/// The vectors of AVX-512 are those of f32 in rows of at least as many leaves as these have lanes, if the fold joins
/// leaves: AVX2 is faster for shorter rows and for extremes, and as fast for f64 (`benches/results/2026-11-27-xeon.md`).
#[inline(always)]
pub(crate) fn run<T: Num, F: Reducer<T>, R: LanesFold<T, F>>(isa: Isa, leaves: usize, fold: R) {
    #[cfg(target_arch = "x86_64")]
    if const { matches!(T::DTYPE, DType::F32) } {
        if const { R::JOINS_LEAVES } && isa == Isa::Avx512 && leaves >= 16 {
            // SAFETY: the CPU has `isa`, as `Isa::current` says; the elements are f32.
            return unsafe { x86::run_avx512::<T, F, R, 16>(fold) };
        }
        if isa >= Isa::Avx2 {
            // SAFETY: as above.
            return unsafe { x86::run_avx2::<T, F, R, 8>(fold) };
        }
    } else if const { matches!(T::DTYPE, DType::F64) } && isa >= Isa::Avx2 {
        // SAFETY: the CPU has `isa`; the elements are f64.
        return unsafe { x86::run_avx2::<T, F, R, 4>(fold) };
    }
    let _ = (isa, leaves);
    run_plain::<T, F, R>(fold);
}

/// Runs `fold` with plain vectors. It is not inlined, so that its callers stay short.
#[inline(never)]
fn run_plain<T: Num, F: Reducer<T>, R: LanesFold<T, F>>(fold: R) {
    fold.run_plain();
}

/// Runs `part` with plain vectors.
#[inline(never)]
fn apart_plain<T: Num, F: Reducer<T>, P: LanesPart<T, F, N>, const N: usize>(part: P) {
    part.run(PlainLanes);
}

/// `K` vectors for each of `N` leaves.
pub(crate) trait LaneSource<T, const N: usize, const K: usize>: Copy {
    /// Returns the vectors of leaf `i`, which is below `N`.
    fn vectors(self, i: usize) -> [[T; N]; K];
}

/// Joins all elements of each vector: lane `i` of result `k` is the node over vector `k` of leaf `i`. The vectors of a leaf
/// are loaded one after the other, so that memory is read in order.
#[inline(always)]
pub(crate) fn collapse<T: Num, F: Reducer<T>, L, S, const N: usize, const K: usize>(
    lanes: L,
    x: S,
) -> [[T; N]; K]
where
    L: Lanes<N>,
    S: LaneSource<T, N, K>,
{
    match N {
        4 => fours::<T, F, L, S, N, K>(lanes, x, 0),
        8 => eights::<T, F, L, S, N, K>(lanes, x, 0),
        _ => {
            let (a, b) = (eights::<T, F, L, S, N, K>(lanes, x, 0), eights::<T, F, L, S, N, K>(lanes, x, 8));
            levels::<T, F, L, N, K, 8>(lanes, a, b)
        }
    }
}

#[inline(always)]
fn eights<T: Num, F: Reducer<T>, L: Lanes<N>, S, const N: usize, const K: usize>(
    lanes: L,
    x: S,
    i: usize,
) -> [[T; N]; K]
where
    S: LaneSource<T, N, K>,
{
    let (a, b) = (fours::<T, F, L, S, N, K>(lanes, x, i), fours::<T, F, L, S, N, K>(lanes, x, i + 4));
    levels::<T, F, L, N, K, 4>(lanes, a, b)
}

#[inline(always)]
fn fours<T: Num, F: Reducer<T>, L: Lanes<N>, S, const N: usize, const K: usize>(
    lanes: L,
    x: S,
    i: usize,
) -> [[T; N]; K]
where
    S: LaneSource<T, N, K>,
{
    let (a, b) = (x.vectors(i), x.vectors(i + 1));
    let first = levels::<T, F, L, N, K, 1>(lanes, a, b);
    let (a, b) = (x.vectors(i + 2), x.vectors(i + 3));
    levels::<T, F, L, N, K, 2>(lanes, first, levels::<T, F, L, N, K, 1>(lanes, a, b))
}

#[inline(always)]
fn levels<T: Num, F: Reducer<T>, L: Lanes<N>, const N: usize, const K: usize, const D: usize>(
    lanes: L,
    mut a: [[T; N]; K],
    b: [[T; N]; K],
) -> [[T; N]; K] {
    for (a, b) in a.iter_mut().zip(b) {
        *a = lanes.level::<T, F, D>(*a, b);
    }
    a
}

/// Joins lanes as the compiler does.
#[inline(always)]
fn joined<T: Num, F: Reducer<T>, const N: usize>(a: [T; N], b: [T; N]) -> [T; N] {
    let mut joined = a;
    for (a, b) in joined.iter_mut().zip(b) {
        *a = F::join(*a, b);
    }
    joined
}

/// Compares lanes as the compiler does.
#[inline(always)]
fn beyond<T: Num, const MAX: bool, const N: usize>(x: [T; N], mut best: [T; N]) -> [T; N] {
    for (best, x) in best.iter_mut().zip(x) {
        *best = select(if MAX { x > *best } else { x < *best }, x, *best);
    }
    best
}

/// Marks NaNs as the compiler does.
#[inline(always)]
fn mark_nan<T: Num, const N: usize>(x: [T; N], y: [T; N], mut marks: [T; N]) -> [T; N] {
    for (mark, (x, y)) in marks.iter_mut().zip(x.into_iter().zip(y)) {
        *mark = select(is_nan(x) | is_nan(y), T::ONE, *mark);
    }
    marks
}

/// Vectors as the compiler makes them.
#[derive(Clone, Copy)]
pub(crate) struct PlainLanes;

impl<const N: usize> Lanes<N> for PlainLanes {
    #[inline(always)]
    fn join<T: Num, F: Reducer<T>>(self, a: [T; N], b: [T; N]) -> [T; N] {
        joined::<T, F, N>(a, b)
    }

    #[inline(always)]
    fn beyond<T: Num, const MAX: bool>(self, x: [T; N], best: [T; N]) -> [T; N] {
        beyond::<T, MAX, N>(x, best)
    }

    #[inline(always)]
    fn mark_nan<T: Num>(self, x: [T; N], y: [T; N], marks: [T; N]) -> [T; N] {
        mark_nan::<T, N>(x, y, marks)
    }

    #[inline(always)]
    fn level<T: Num, F: Reducer<T>, const D: usize>(self, a: [T; N], b: [T; N]) -> [T; N] {
        let (mut left, mut right) = (a, b);
        for i in 0..N {
            if i & D == 0 {
                right[i] = a[i + D];
            } else {
                left[i] = b[i - D];
            }
        }
        joined::<T, F, N>(left, right)
    }

    #[inline(always)]
    unsafe fn load_first<T: Num>(self, x: *const T, len: usize, pad: T) -> [T; N] {
        let mut vector = [pad; N];
        for (i, lane) in vector.iter_mut().enumerate().take(len) {
            // SAFETY: the caller's promise.
            *lane = unsafe { *x.add(i) };
        }
        vector
    }

    #[inline(always)]
    fn apart<T: Num, F: Reducer<T>, P: LanesPart<T, F, N>>(self, part: P) {
        if APART {
            apart_plain::<T, F, P, N>(part);
        } else {
            part.run(self);
        }
    }
}

/// Levels by shuffles, which compilers do not find by themselves. The halves are joined in any order, since joins commute:
/// a blend then moves the halves that are in their lanes already, and one shuffle the others.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::mem::transmute_copy;

    use super::{APART, JoinOperation, Lanes, LanesFold, LanesPart, Num, Reducer, joined};
    use crate::isa::simd::opaque;

    /// Runs `fold` with vectors of AVX-512.
    ///
    /// # Safety
    /// The CPU has these features, and `N` elements have 64 bytes.
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")]
    pub(crate) unsafe fn run_avx512<T: Num, F: Reducer<T>, R: LanesFold<T, F>, const N: usize>(fold: R)
    where
        Avx512Lanes: Lanes<N>,
    {
        fold.run::<_, N>(Avx512Lanes(()));
    }

    /// Runs `part` with vectors of AVX-512.
    ///
    /// # Safety
    /// As above.
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")]
    unsafe fn apart_avx512<T: Num, F: Reducer<T>, P: LanesPart<T, F, N>, const N: usize>(part: P)
    where
        Avx512Lanes: Lanes<N>,
    {
        part.run(Avx512Lanes(()));
    }

    /// Runs `fold` with vectors of AVX2.
    ///
    /// # Safety
    /// The CPU has these features, and `N` elements have 32 bytes.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(crate) unsafe fn run_avx2<T: Num, F: Reducer<T>, R: LanesFold<T, F>, const N: usize>(fold: R)
    where
        Avx2Lanes: Lanes<N>,
    {
        fold.run::<_, N>(Avx2Lanes(()));
    }

    /// Runs `part` with vectors of AVX2.
    ///
    /// # Safety
    /// As above.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn apart_avx2<T: Num, F: Reducer<T>, P: LanesPart<T, F, N>, const N: usize>(part: P)
    where
        Avx2Lanes: Lanes<N>,
    {
        part.run(Avx2Lanes(()));
    }

    /// Vectors of 64 bytes. Only [`run_avx512`] makes it, so its conditions hold.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx512Lanes(());

    /// Vectors of 32 bytes. Only [`run_avx2`] makes it, so its conditions hold.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx2Lanes(());

    /// Returns an array's bits as a vector, or a vector's as an array.
    ///
    /// # Safety
    /// Both have the same size, and any bits are a value of `B`.
    #[inline(always)]
    unsafe fn bits<A, B>(x: A) -> B {
        // SAFETY: the caller's promise.
        unsafe { transmute_copy(&x) }
    }

    macro_rules! marks {
        ($($name:ident, $v:ty, $x:ident, $y:ident, $marks:ident, $body:expr;)*) => {$(
            /// Marks lanes in which an operand is NaN.
            ///
            /// # Safety
            /// The CPU has these vectors.
            #[inline(always)]
            unsafe fn $name($x: $v, $y: $v, $marks: $v) -> $v {
                // SAFETY: the caller's promise.
                unsafe { $body }
            }
        )*};
    }

    marks! {
        mark_512_ps, __m512, x, y, marks,
            _mm512_mask_mov_ps(marks, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, y), _mm512_set1_ps(1.0));
        mark_256_ps, __m256, x, y, marks, _mm256_or_ps(marks, _mm256_cmp_ps::<_CMP_UNORD_Q>(x, y));
        mark_256_pd, __m256d, x, y, marks, _mm256_or_pd(marks, _mm256_cmp_pd::<_CMP_UNORD_Q>(x, y));
    }

    /// Writes the functions that differ in types and names only: the join, and the level from its shuffles. Compilers take
    /// vectors apart if the join is a loop, so sums and products of floats have their own instructions.
    macro_rules! joins_and_levels {
        ($n:literal, $v:ty, $apart:ident, [$add:ident, $mul:ident, $max:ident, $min:ident, $mark:ident],
            |$a:ident, $b:ident, $D:ident| $shuffles:expr) => {
            #[inline(always)]
            fn join<T: Num, F: Reducer<T>>(self, a: [T; $n], b: [T; $n]) -> [T; $n] {
                // SAFETY: the maker of `self` has promised that the CPU has these vectors, and that they have the size
                // of the arrays; elements are numbers, so all bits are values.
                unsafe {
                    match F::OPERATION {
                        JoinOperation::Add => bits($add(bits(a), bits(b))),
                        JoinOperation::Mul => bits($mul(bits(a), bits(b))),
                        JoinOperation::Other => joined::<T, F, $n>(a, b),
                    }
                }
            }

            #[inline(always)]
            fn apart<T: Num, F: Reducer<T>, P: LanesPart<T, F, $n>>(self, part: P) {
                if APART {
                    // SAFETY: as above.
                    unsafe { $apart::<T, F, P, $n>(part) }
                } else {
                    part.run(self);
                }
            }

            #[inline(always)]
            fn beyond<T: Num, const MAX: bool>(self, x: [T; $n], best: [T; $n]) -> [T; $n] {
                // SAFETY: as above. The instruction returns its second operand unless the first is beyond it.
                unsafe { if MAX { bits($max(bits(x), bits(best))) } else { bits($min(bits(x), bits(best))) } }
            }

            #[inline(always)]
            fn mark_nan<T: Num>(self, x: [T; $n], y: [T; $n], marks: [T; $n]) -> [T; $n] {
                // SAFETY: as above.
                unsafe { bits($mark(bits(x), bits(y), bits(marks))) }
            }

            #[inline(always)]
            fn level<T: Num, F: Reducer<T>, const $D: usize>(self, a: [T; $n], b: [T; $n]) -> [T; $n] {
                // SAFETY: as above.
                let (left, right) = unsafe {
                    let ($a, $b) = (bits::<_, $v>(a), bits::<_, $v>(b));
                    let (left, right) = $shuffles;
                    (bits(left), bits(right))
                };
                self.join::<T, F>(left, right)
            }
        };
    }

    /// Masks whose lowest bits are set, by their number.
    static MASKS: [u16; 17] = {
        let mut masks = [0; 17];
        let mut i = 1;
        while i < 17 {
            masks[i] = masks[i - 1] << 1 | 1;
            i += 1;
        }
        masks
    };

    impl Lanes<16> for Avx512Lanes {
        joins_and_levels!(
            16,
            __m512,
            apart_avx512,
            [_mm512_add_ps, _mm512_mul_ps, _mm512_max_ps, _mm512_min_ps, mark_512_ps],
            |a, b, D| match D {
                1 => {
                    let to = _mm512_setr_epi32(1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30);
                    (_mm512_mask_blend_ps(0xaaaa, a, b), _mm512_permutex2var_ps(a, to, b))
                }
                2 => (_mm512_mask_blend_ps(0xcccc, a, b), _mm512_shuffle_ps::<0x4e>(a, b)),
                4 => {
                    let to = _mm512_setr_epi32(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
                    (_mm512_mask_blend_ps(0xf0f0, a, b), _mm512_permutex2var_ps(a, to, b))
                }
                _ => (_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4::<0x4e>(a, b)),
            }
        );

        #[inline(always)]
        unsafe fn load_first<T: Num>(self, x: *const T, len: usize, pad: T) -> [T; 16] {
            // SAFETY: as above; the mask selects the elements that the caller promises.
            unsafe {
                let pad = _mm512_set1_ps(bits(pad));
                bits(_mm512_mask_loadu_ps(pad, *MASKS.get_unchecked(len), x.cast()))
            }
        }
    }

    /// All bits set, then none: a window of it selects the first elements of a vector.
    static KEPT: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];

    /// Returns a vector whose first `len` numbers of 32 bits have all bits set.
    ///
    /// # Safety
    /// The CPU has AVX2, and `len` is at most 8.
    #[inline(always)]
    unsafe fn kept(len: usize) -> __m256i {
        // SAFETY: the window is inside, since it begins at one of the first 9 numbers.
        unsafe { _mm256_loadu_si256(KEPT.as_ptr().add(8 - len).cast()) }
    }

    impl Lanes<8> for Avx2Lanes {
        // Levels 1 and 2 shuffle twice, which costs as much as two blends and a shuffle.
        joins_and_levels!(
            8,
            __m256,
            apart_avx2,
            [_mm256_add_ps, _mm256_mul_ps, _mm256_max_ps, _mm256_min_ps, mark_256_ps],
            |a, b, D| match D {
                1 | 2 => (opaque(_mm256_shuffle_ps::<0x88>(a, b)), _mm256_shuffle_ps::<0xdd>(a, b)),
                _ => (_mm256_blend_ps::<0xf0>(a, b), _mm256_permute2f128_ps::<0x21>(a, b)),
            }
        );

        #[inline(always)]
        unsafe fn load_first<T: Num>(self, x: *const T, len: usize, pad: T) -> [T; 8] {
            // SAFETY: as above.
            unsafe {
                let (pad, kept) = (_mm256_set1_ps(bits(pad)), kept(len));
                let loaded = _mm256_maskload_ps(x.cast(), kept);
                bits(_mm256_blendv_ps(pad, loaded, _mm256_castsi256_ps(kept)))
            }
        }
    }

    impl Lanes<4> for Avx2Lanes {
        joins_and_levels!(
            4,
            __m256d,
            apart_avx2,
            [_mm256_add_pd, _mm256_mul_pd, _mm256_max_pd, _mm256_min_pd, mark_256_pd],
            |a, b, D| match D {
                1 => (_mm256_blend_pd::<0xa>(a, b), _mm256_shuffle_pd::<0x5>(a, b)),
                _ => (_mm256_blend_pd::<0xc>(a, b), _mm256_permute2f128_pd::<0x21>(a, b)),
            }
        );

        #[inline(always)]
        unsafe fn load_first<T: Num>(self, x: *const T, len: usize, pad: T) -> [T; 4] {
            // SAFETY: as above.
            unsafe {
                let (pad, kept) = (_mm256_set1_pd(bits(pad)), kept(2 * len));
                let loaded = _mm256_maskload_pd(x.cast(), kept);
                bits(_mm256_blendv_pd(pad, loaded, _mm256_castsi256_pd(kept)))
            }
        }

        #[inline(always)]
        unsafe fn load_squares(self, x: *const f32) -> [f64; 4] {
            // SAFETY: as above.
            unsafe {
                let x = _mm256_cvtps_pd(_mm_loadu_ps(x));
                bits(_mm256_mul_pd(x, x))
            }
        }

        #[inline(always)]
        unsafe fn load_first_squares(self, x: *const f32, len: usize) -> [f64; 4] {
            // SAFETY: as above.
            unsafe {
                let x = _mm256_cvtps_pd(_mm_maskload_ps(x, _mm256_castsi256_si128(kept(len))));
                bits(_mm256_mul_pd(x, x))
            }
        }
    }
}
