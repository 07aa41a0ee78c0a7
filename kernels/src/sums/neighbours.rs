//! Joins of neighbours: the lowest levels of the [summation tree](crate::sums::tree), for two leaves at a time.

#[cfg(target_arch = "x86_64")]
use crate::element::DType;
use crate::isa::simd::{Isa, opaque_index};
use crate::num::real::Num;
use crate::summation::LEAF;
use crate::sums::reducer::Reducer;

/// The number of elements in two leaves.
pub(crate) const PAIR: usize = 2 * LEAF;

/// A computation on a tree, which is a function by itself: once for AVX2 and once without. So it does not depend on its
/// caller's instruction set, nor on what of the caller is inlined, and callers stay short.
pub(crate) trait TreeFold<T: Num, F: Reducer<T>> {
    /// The result.
    type Out;
    /// Computes it by a joiner. Implementations are `#[inline(always)]`.
    fn run<J: Joiner>(self, joiner: J) -> Self::Out;
}

/// Runs `fold` for AVX2 if `shuffles` is true and `T` is a float.
#[inline(always)]
pub(crate) fn run<T: Num, F: Reducer<T>, R: TreeFold<T, F>>(fold: R, shuffles: Shuffles) -> R::Out {
    #[cfg(target_arch = "x86_64")]
    if const { T::DTYPE.is_float() } && shuffles.0 {
        // SAFETY: the CPU has AVX2 and FMA, as `detect` found, and a type of this dtype has 32 bits like f32, as `Element` demands.
        return unsafe {
            if const { matches!(T::DTYPE, DType::F32) } {
                shuffled::run::<T, F, R>(fold)
            } else {
                shuffled::run_plain::<T, F, R>(fold)
            }
        };
    }
    let _ = shuffles.0;
    run_baseline::<T, F, R>(fold)
}

/// Runs `fold` without AVX2: on x86-64 one level at a time, which is little code.
#[inline(never)]
fn run_baseline<T: Num, F: Reducer<T>, R: TreeFold<T, F>>(fold: R) -> R::Out {
    #[cfg(target_arch = "x86_64")]
    return fold.run(ByLevels);
    #[cfg(not(target_arch = "x86_64"))]
    fold.run(Plain)
}

/// True if this thread's instruction set has vectors of eight f32, and instructions that take them apart.
#[derive(Clone, Copy)]
pub(crate) struct Shuffles(bool);

impl Shuffles {
    pub(crate) fn detect() -> Shuffles {
        Shuffles(cfg!(target_arch = "x86_64") && Isa::current() >= Isa::Avx2)
    }
}

/// The loops that join neighbours.
pub(crate) trait Joiner: Copy {
    /// Joins each eight neighbours, three levels of the tree.
    fn eighths<T: Num, F: Reducer<T>>(self, x: &[T; PAIR]) -> [T; 8];

    /// Joins all elements of a leaf.
    fn leaf<T: Num, F: Reducer<T>>(self, x: &[T; LEAF]) -> T;

    /// Joins each eight neighbours in two leaves of the lengths in `lens`, which lie in `row` from `start` on, one after the
    /// other. Padding follows a leaf of fewer than [`LEAF`] elements.
    fn eighths_at<T: Num, F: Reducer<T>>(self, row: &[T], start: usize, lens: [usize; 2]) -> [T; 8];

    /// Joins neighbours, level by level, until one is left. The number of nodes is a power of two; they are overwritten.
    #[inline(always)]
    fn fold<T: Num, F: Reducer<T>>(self, nodes: &mut [T]) -> T {
        let mut len = nodes.len();
        while len >= PAIR {
            for i in 0..len / PAIR {
                // The places written are before all that are still to be read.
                let x: &[T; PAIR] = nodes[i * PAIR..][..PAIR].try_into().expect("a pair's length");
                let joined = self.eighths::<T, F>(x);
                nodes[8 * i..][..8].copy_from_slice(&joined);
            }
            len /= 8;
        }
        while len > 1 {
            len /= 2;
            for i in 0..len {
                nodes[i] = F::join(nodes[2 * i], nodes[2 * i + 1]);
            }
        }
        nodes[0]
    }
}

/// The loops as the compiler makes them.
#[derive(Clone, Copy)]
struct Plain;

impl Joiner for Plain {
    #[inline(always)]
    fn eighths<T: Num, F: Reducer<T>>(self, x: &[T; PAIR]) -> [T; 8] {
        level::<T, F, 16, 8>(&level::<T, F, 32, 16>(&level::<T, F, PAIR, 32>(x)))
    }

    #[inline(always)]
    fn leaf<T: Num, F: Reducer<T>>(self, x: &[T; LEAF]) -> T {
        let eighths = level::<T, F, 8, 4>(&level::<T, F, 16, 8>(&level::<T, F, LEAF, 16>(x)));
        F::join(F::join(eighths[0], eighths[1]), F::join(eighths[2], eighths[3]))
    }

    #[inline(always)]
    fn eighths_at<T: Num, F: Reducer<T>>(self, row: &[T], start: usize, lens: [usize; 2]) -> [T; 8] {
        let leaves = [row[start..].first_chunk::<LEAF>(), row[start + lens[0]..].first_chunk()];
        let [Some(a), Some(b)] = leaves else {
            return self.eighths::<T, F>(&padded::<T, F>(row, start, lens));
        };
        let mut pair = [F::PAD; PAIR];
        for (place, (leaf, len)) in pair.chunks_exact_mut(LEAF).zip([a, b].iter().zip(lens)) {
            for (i, (p, &x)) in place.iter_mut().zip(*leaf).enumerate() {
                *p = if i < len { x } else { F::PAD };
            }
        }
        self.eighths::<T, F>(&pair)
    }
}

/// The loops in little code.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
struct ByLevels;

#[cfg(target_arch = "x86_64")]
impl Joiner for ByLevels {
    #[inline(always)]
    fn eighths<T: Num, F: Reducer<T>>(self, x: &[T; PAIR]) -> [T; 8] {
        let mut nodes = *x;
        join_levels::<T, F>(&mut nodes, 3);
        *nodes.first_chunk().expect("a pair's length")
    }

    #[inline(always)]
    fn leaf<T: Num, F: Reducer<T>>(self, x: &[T; LEAF]) -> T {
        let mut nodes = *x;
        join_levels::<T, F>(&mut nodes, LEAF.ilog2());
        nodes[0]
    }

    #[inline(always)]
    fn eighths_at<T: Num, F: Reducer<T>>(self, row: &[T], start: usize, lens: [usize; 2]) -> [T; 8] {
        self.eighths::<T, F>(&padded::<T, F>(row, start, lens))
    }

    #[inline(always)]
    fn fold<T: Num, F: Reducer<T>>(self, nodes: &mut [T]) -> T {
        let levels = nodes.len().ilog2();
        join_levels::<T, F>(nodes, levels);
        nodes[0]
    }
}

/// Joins neighbours in place, `levels` times.
#[inline(never)]
pub(crate) fn join_levels<T: Num, F: Reducer<T>>(nodes: &mut [T], levels: u32) {
    for level in 1..=levels {
        for i in 0..nodes.len() >> level {
            let i = opaque_index(i);
            nodes[i] = F::join(nodes[2 * i], nodes[2 * i + 1]);
        }
    }
}

/// Returns two leaves of `row`, padded, by copies of any length. It is not inlined, since only the last leaves of a row
/// need it.
#[inline(never)]
fn padded<T: Num, F: Reducer<T>>(row: &[T], start: usize, lens: [usize; 2]) -> [T; PAIR] {
    let mut pair = [F::PAD; PAIR];
    let second = start + lens[0];
    pair[..lens[0]].copy_from_slice(&row[start..second]);
    pair[LEAF..][..lens[1]].copy_from_slice(&row[second..second + lens[1]]);
    pair
}

/// Joins neighbours, one level of the tree.
#[inline(always)]
pub(crate) fn level<T: Num, F: Reducer<T>, const N: usize, const HALF: usize>(x: &[T; N]) -> [T; HALF] {
    let mut joined = [T::ZERO; HALF];
    for (node, pair) in joined.iter_mut().zip(x.as_chunks::<2>().0) {
        *node = F::join(pair[0], pair[1]);
    }
    joined
}

/// The levels for f32 by instructions of AVX2. Compilers do not find these by themselves: they keep the order of
/// elements between levels, which takes twice as many shuffles.
#[cfg(target_arch = "x86_64")]
mod shuffled {
    use std::arch::x86_64::*;

    use super::{Joiner, LEAF, Num, PAIR, Plain, Reducer, TreeFold};
    use crate::isa::simd::opaque;

    /// Runs `fold` with the loops as the compiler makes them.
    ///
    /// # Safety
    /// The CPU has AVX2 and FMA.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) unsafe fn run_plain<T: Num, F: Reducer<T>, R: TreeFold<T, F>>(fold: R) -> R::Out {
        fold.run(Plain)
    }

    /// Runs `fold`. Callers of f32 may inline it: rows of layer norm and softmax are short.
    ///
    /// # Safety
    /// The CPU has AVX2 and FMA, and `T` has the bits of f32.
    #[target_feature(enable = "avx2,fma")]
    pub(crate) unsafe fn run<T: Num, F: Reducer<T>, R: TreeFold<T, F>>(fold: R) -> R::Out {
        fold.run(Shuffled(()))
    }

    /// The loops by shuffles. Only [`run`] makes one, so its conditions hold.
    #[derive(Clone, Copy)]
    struct Shuffled(());

    impl Joiner for Shuffled {
        #[inline(always)]
        fn eighths<T: Num, F: Reducer<T>>(self, x: &[T; PAIR]) -> [T; 8] {
            // SAFETY: [`run`]'s conditions.
            unsafe { eighths::<T, F>(x) }
        }

        #[inline(always)]
        fn leaf<T: Num, F: Reducer<T>>(self, x: &[T; LEAF]) -> T {
            let [a, b, c, d] = x.as_chunks::<8>().0 else { unreachable!("a leaf has four vectors") };
            // SAFETY: as above.
            let [a, b, c, d, e, f, g, h] = unsafe { fours::<T, F>([a, b, c, d]) };
            F::join(F::join(F::join(a, e), F::join(b, f)), F::join(F::join(c, g), F::join(d, h)))
        }

        #[inline(always)]
        fn eighths_at<T: Num, F: Reducer<T>>(self, row: &[T], start: usize, lens: [usize; 2]) -> [T; 8] {
            let (a, b) = row[start..][..lens[0] + lens[1]].split_at(lens[0]);
            // SAFETY: as above.
            unsafe {
                let (a, b) = (padded::<T, F>(a), padded::<T, F>(b));
                halves::<T, F>(&fours::<T, F>(a.each_ref()), &fours::<T, F>(b.each_ref()))
            }
        }
    }

    /// Joins each eight neighbours.
    ///
    /// # Safety
    /// The CPU has AVX2, and `T` has the bits of f32.
    #[inline(always)]
    unsafe fn eighths<T: Num, F: Reducer<T>>(x: &[T; PAIR]) -> [T; 8] {
        let v = x.as_chunks::<8>().0;
        // SAFETY: the caller's promise.
        unsafe {
            let first = fours::<T, F>([&v[0], &v[1], &v[2], &v[3]]);
            let second = fours::<T, F>([&v[4], &v[5], &v[6], &v[7]]);
            halves::<T, F>(&first, &second)
        }
    }

    /// All bits set, then none: a window of it selects the elements of a leaf.
    static KEPT: [u32; PAIR] = {
        let mut kept = [0; PAIR];
        let mut i = 0;
        while i < LEAF {
            kept[i] = u32::MAX;
            i += 1;
        }
        kept
    };

    /// Returns the elements of a leaf and padding.
    ///
    /// # Safety
    /// The conditions of [`eighths`] hold.
    #[inline(always)]
    unsafe fn padded<T: Num, F: Reducer<T>>(leaf: &[T]) -> [[T; 8]; 4] {
        let mut padded = [[F::PAD; 8]; 4];
        let kept = &KEPT[LEAF - leaf.len()..][..LEAF];
        for (i, (padded, kept)) in padded.iter_mut().zip(kept.as_chunks::<8>().0).enumerate() {
            // SAFETY: elements have 32 bits. Only those that are kept are read, which are the leaf's.
            unsafe {
                let kept = load(kept);
                let x = leaf.as_ptr().wrapping_add(8 * i).cast();
                let x = _mm256_maskload_ps(x, _mm256_castps_si256(kept));
                _mm256_storeu_ps(padded.as_mut_ptr().cast(), _mm256_blendv_ps(load(padded), x, kept));
            }
        }
        padded
    }

    /// Joins the low halves of `a` with its high halves, then those of `b`.
    ///
    /// # Safety
    /// The conditions of [`eighths`] hold.
    #[inline(always)]
    unsafe fn halves<T: Num, F: Reducer<T>>(a: &[T; 8], b: &[T; 8]) -> [T; 8] {
        // SAFETY: the caller's promise.
        unsafe {
            let (a, b) = (load(a), load(b));
            let low = _mm256_permute2f128_ps::<0x20>(a, b);
            joined::<T, F>(low, _mm256_permute2f128_ps::<0x31>(a, b))
        }
    }

    /// Joins each four neighbours. The results of the vectors' low halves come first, then those of the high halves.
    ///
    /// # Safety
    /// The conditions of [`eighths`] hold.
    #[inline(always)]
    unsafe fn fours<T: Num, F: Reducer<T>>([a, b, c, d]: [&[T; 8]; 4]) -> [T; 8] {
        // SAFETY: the caller's promise.
        unsafe { twos::<T, F>(&twos::<T, F>(a, b), &twos::<T, F>(c, d)) }
    }

    /// Joins each two neighbours: those of `a`'s and `b`'s low halves, then those of their high halves.
    ///
    /// # Safety
    /// The conditions of [`eighths`] hold.
    #[inline(always)]
    unsafe fn twos<T: Num, F: Reducer<T>>(a: &[T; 8], b: &[T; 8]) -> [T; 8] {
        // SAFETY: the caller's promise.
        unsafe {
            let (a, b) = (load(a), load(b));
            joined::<T, F>(opaque(_mm256_shuffle_ps::<0x88>(a, b)), _mm256_shuffle_ps::<0xDD>(a, b))
        }
    }

    /// # Safety
    /// The conditions of [`eighths`] hold.
    #[inline(always)]
    unsafe fn joined<T: Num, F: Reducer<T>>(a: __m256, b: __m256) -> [T; 8] {
        let (mut left, mut right) = ([T::ZERO; 8], [T::ZERO; 8]);
        // SAFETY: both arrays hold eight f32.
        unsafe {
            _mm256_storeu_ps(left.as_mut_ptr().cast(), a);
            _mm256_storeu_ps(right.as_mut_ptr().cast(), b);
        }
        let mut joined = [T::ZERO; 8];
        for (node, (&a, &b)) in joined.iter_mut().zip(left.iter().zip(&right)) {
            *node = F::join(a, b);
        }
        joined
    }

    /// # Safety
    /// The CPU has AVX2, and `T` has 32 bits.
    #[inline(always)]
    unsafe fn load<T>(x: &[T; 8]) -> __m256 {
        // SAFETY: the array has eight elements of 32 bits.
        unsafe { _mm256_loadu_ps(x.as_ptr().cast()) }
    }
}
