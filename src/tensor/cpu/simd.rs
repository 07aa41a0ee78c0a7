//! One mechanism for multiversioned loops: plain loops, compiled once for each instruction set.
//!
//! A [`Kernel`]'s body is an ordinary loop in an `#[inline(always)]` function. [`dispatch`] instantiates it under
//! AVX-512, under AVX2 with FMA, and for the baseline, and runs the widest one this CPU has ([`Kernel::PLAIN`] keeps to
//! the baseline). All three do the same
//! IEEE operations on the same elements, so they give the same bits; `f32::mul_add` without the FMA instruction is a
//! slow library call, and just as exact.

use std::cell::Cell;
use std::sync::OnceLock;

/// An instruction set that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// What every CPU of the target has.
    Baseline,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, VL, BW and DQ, with FMA.
    Avx512,
}

impl Isa {
    /// Those that this CPU has, narrowest first.
    pub fn available() -> &'static [Isa] {
        const ALL: [Isa; 3] = [Isa::Baseline, Isa::Avx2, Isa::Avx512];
        &ALL[..=detected() as usize]
    }

    /// The one that kernels of this thread run on.
    #[inline]
    pub fn current() -> Isa {
        CHOSEN.with(Cell::get).unwrap_or_else(detected)
    }
}

/// Runs `f` with this thread's kernels on `isa`, to compare the paths with one another.
///
/// # Panics
/// If this CPU lacks `isa`; see [`Isa::available`].
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

/// A loop to be compiled for every instruction set.
pub trait Kernel {
    /// What it returns.
    type Out;
    /// True if the baseline's copy suffices, which is then the only one compiled: for integers and bools, whose loops
    /// wait for memory.
    const PLAIN: bool = false;
    /// The loop. Implement it `#[inline(always)]`, and everything in its inner loop as well.
    fn run(self) -> Self::Out;
}

/// Runs `kernel` on the current instruction set.
#[inline]
pub fn dispatch<K: Kernel>(kernel: K) -> K::Out {
    if K::PLAIN {
        return run_baseline(kernel);
    }
    #[cfg(target_arch = "x86_64")]
    match Isa::current() {
        // SAFETY: `current` is at most what was detected, so the CPU has these features.
        Isa::Avx512 => return unsafe { run_avx512(kernel) },
        // SAFETY: as above.
        Isa::Avx2 => return unsafe { run_avx2(kernel) },
        Isa::Baseline => {}
    }
    run_baseline(kernel)
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
