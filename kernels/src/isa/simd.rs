//! Loops that are compiled once per instruction set; the widest one that the CPU has is chosen at run time.
//!
//! ```
//! use isoshard_kernels::{Kernel, dispatch};
//!
//! struct AddTo<'a>(&'a mut [f32], &'a [f32]);
//! impl Kernel for AddTo<'_> {
//!     type Out = ();
//!     #[inline(always)]
//!     fn run(self) {
//!         self.0.iter_mut().zip(self.1).for_each(|(x, &y)| *x += y);
//!     }
//! }
//!
//! let mut x = [1.0, 2.0];
//! dispatch(AddTo(&mut x, &[0.5, 0.5]));
//! assert_eq!(x, [1.5, 2.5]);
//! ```
//!
//! The body of a [`Kernel`] is an ordinary loop in an `#[inline(always)]` function. [`dispatch`] compiles it for the
//! instruction sets up to [`Kernel::WIDEST`]: for AVX-512, for AVX2 with FMA, and for the baseline. All three do the same
//! IEEE operations on the same elements, so they return the same bits; without the FMA instruction `f32::mul_add` is a slow
//! library call with the same result. x86-64 CPUs without AVX2 were sold until 2013, so a kernel can have a small loop for
//! them ([`Kernel::run_small`]), which takes the compiler less time.

use std::cell::Cell;
use std::ops::Range;
use std::sync::OnceLock;

use crate::isa::caches::CACHE_LINE_BYTES;

/// An instruction set that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// The instructions that every CPU of the compilation target has.
    Baseline,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, VL, BW and DQ, with FMA.
    Avx512,
}

impl Isa {
    /// Returns the instruction sets that this CPU has, narrowest first.
    ///
    /// ```
    /// use isoshard_kernels::Isa;
    /// assert_eq!(Isa::available()[0], Isa::Baseline);
    /// ```
    pub fn available() -> &'static [Isa] {
        const ALL: [Isa; 3] = [Isa::Baseline, Isa::Avx2, Isa::Avx512];
        &ALL[..=detected() as usize]
    }

    /// Returns the instruction set that kernels of this thread use: the widest one, unless [`with_isa`] has set
    /// another.
    ///
    /// ```
    /// use isoshard_kernels::Isa;
    /// assert_eq!(Some(&Isa::current()), Isa::available().last());
    /// ```
    #[inline]
    pub fn current() -> Isa {
        CHOSEN.with(Cell::get).unwrap_or_else(detected)
    }
}

/// Runs `f`, in which kernels of this thread use `isa`, to compare instruction sets with each other.
///
/// ```
/// use isoshard_kernels::{Isa, map_slice, math::exp::exp_f32, with_isa};
/// let exp = || {
///     let mut y = [0.0f32; 100];
///     map_slice(&[0.1; 100], &mut y, exp_f32);
///     y
/// };
/// assert_eq!(with_isa(Isa::Baseline, exp), exp());
/// ```
///
/// # Panics
/// Panics if this CPU does not have `isa` (see [`Isa::available`]).
pub fn with_isa<R>(isa: Isa, f: impl FnOnce() -> R) -> R {
    struct RestoreIsa(Option<Isa>);
    impl Drop for RestoreIsa {
        fn drop(&mut self) {
            CHOSEN.with(|c| c.set(self.0));
        }
    }
    assert!(isa <= detected(), "with_isa: this CPU has no {isa:?}");
    let _restore = RestoreIsa(CHOSEN.with(|c| c.replace(Some(isa))));
    f()
}

/// A loop that is compiled for every instruction set. The [module](self) has an example.
pub trait Kernel {
    /// The result of the loop.
    type Out;
    /// The widest instruction set that the loop is compiled for. The baseline suffices for integers and bools, whose loops
    /// are bound by memory, AVX2 for loops of few operations per byte, and for formulas of f64.
    const WIDEST: Isa = Isa::Avx512;
    /// Runs the loop. Implementations, and all functions that the loop calls, are `#[inline(always)]`.
    fn run(self) -> Self::Out;
    /// Does the same on an x86-64 CPU without AVX2, if `WIDEST` is not the baseline: with the same bits, in little code.
    /// Implementations are `#[inline(always)]`.
    #[inline(always)]
    fn run_small(self) -> Self::Out
    where
        Self: Sized,
    {
        self.run()
    }
}

/// Runs `kernel` with [`Isa::current`]. The [module](self) has an example.
#[inline]
pub fn dispatch<K: Kernel>(kernel: K) -> K::Out {
    #[cfg(target_arch = "x86_64")]
    if const { K::WIDEST as usize >= Isa::Avx2 as usize } {
        let isa = Isa::current();
        if const { K::WIDEST as usize >= Isa::Avx512 as usize } && isa == Isa::Avx512 {
            // SAFETY: `current` is at most the detected instruction set, so the CPU has these features.
            return unsafe { run_avx512(kernel) };
        }
        if isa >= Isa::Avx2 {
            // SAFETY: as above; a CPU with AVX-512 has these features, too.
            return unsafe { run_avx2(kernel) };
        }
        return run_small(kernel);
    }
    run_baseline(kernel)
}

/// Returns `i`, by a path that the compiler does not see through: it neither unrolls nor vectorises a loop that takes its
/// index from here.
#[inline(always)]
pub fn opaque_index(i: usize) -> usize {
    std::hint::black_box(i)
}

/// Asks the CPU to load data into its caches while other work goes on. It has no other effect.
///
/// ```
/// let row = [1.0f32; 768];
/// isoshard_kernels::prefetch(&row);
/// ```
#[inline(always)]
pub fn prefetch<T>(data: &[T]) {
    let len = CACHE_LINE_BYTES / size_of::<T>().clamp(1, CACHE_LINE_BYTES);
    data.chunks(len).for_each(|line| prefetch_line(line.as_ptr()));
}

/// Prefetches a cache line that will be read soon. Any address is allowed.
#[inline(always)]
pub fn prefetch_line<T>(p: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which affects the caches only.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(p.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// Prefetches a cache line that will be written soon. Any address is allowed.
#[inline(always)]
pub(crate) fn prefetch_line_to_write<T>(p: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as above.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_ET0>(p.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// Returns the vector. The compiler does not see how it was made: it would replace two shuffles and their sum by one
/// `vhaddps`, which takes longer than the three (`benches/results/2026-11-26-functions.md`).
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx")]
pub(crate) fn opaque(mut x: std::arch::x86_64::__m256) -> std::arch::x86_64::__m256 {
    // SAFETY: a comment; the register keeps its contents.
    unsafe {
        std::arch::asm!("/* {0} */", inout(ymm_reg) x, options(pure, nomem, nostack, preserves_flags));
    }
    x
}

/// Asks the CPU for the elements of `data` that a loop reaches some time after those in `now`, unless `data` is so short
/// that these come fast enough by themselves.
#[inline]
pub fn prefetch_ahead<T>(data: &[T], now: &Range<usize>) {
    const AHEAD_LEN: usize = 512;
    const FAR_BYTES: usize = 256 << 10;
    if size_of_val(data) >= FAR_BYTES {
        let place = |at: usize| at.saturating_add(AHEAD_LEN).min(data.len());
        prefetch(&data[place(now.start)..place(now.end)]);
    }
}

thread_local! {
    static CHOSEN: Cell<Option<Isa>> = const { Cell::new(None) };
}

#[inline]
fn detected() -> Isa {
    static DETECTED: OnceLock<Isa> = OnceLock::new();
    *DETECTED.get_or_init(detect)
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Isa {
    let avx2 = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq");
    match (avx2, avx512) {
        (true, true) => Isa::Avx512,
        (true, false) => Isa::Avx2,
        _ => Isa::Baseline,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Isa {
    Isa::Baseline
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")]
fn run_avx512<K: Kernel>(kernel: K) -> K::Out {
    kernel.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn run_avx2<K: Kernel>(kernel: K) -> K::Out {
    kernel.run()
}

#[cfg(target_arch = "x86_64")]
#[inline(never)]
fn run_small<K: Kernel>(kernel: K) -> K::Out {
    kernel.run_small()
}

#[inline(never)]
fn run_baseline<K: Kernel>(kernel: K) -> K::Out {
    kernel.run()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Dot<'a>(&'a [f32], &'a [f32]);
    impl Kernel for Dot<'_> {
        type Out = f32;
        #[inline(always)]
        fn run(self) -> f32 {
            self.0.iter().zip(self.1).fold(0.1, |acc, (&x, &y)| x.mul_add(y, acc))
        }
    }

    #[test]
    fn the_choice_is_the_threads_and_ends_with_the_call() {
        let widest = Isa::current();
        assert_eq!(Isa::available().last(), Some(&widest));
        with_isa(Isa::Baseline, || {
            assert_eq!(Isa::current(), Isa::Baseline);
            assert_eq!(std::thread::spawn(Isa::current).join().unwrap(), widest);
        });
        assert_eq!(Isa::current(), widest);
        let x: Vec<f32> = (0..99).map(|i| (i as f32).sqrt() - 3.3).collect();
        let bits: Vec<u32> =
            Isa::available().iter().map(|&i| with_isa(i, || dispatch(Dot(&x, &x)).to_bits())).collect();
        assert!(bits.iter().all(|&b| b == bits[0]), "{bits:x?}");
    }
}
