//! The loops of formulas that need branches for rare operands.
//!
//! The loop without branches gives NaN there; a second pass looks for NaN, and computes these elements one by one.

use crate::isa::simd::{Isa, Kernel, dispatch};
use crate::loops::formulas::{
    Constants, ElementFn, ElementLoop, FloatFormula, FloatLoops, Function, Loops, NumFunction, pieces,
};
use crate::num::real::{Real, is_nan};

/// The number of elements between two searches for NaN, so that they stay in the nearest cache.
const RARE_CHUNK: usize = 512;

impl Loops {
    /// Compiles a function of floats with rare operands ([`Function::at_rare`]); other dtypes are refused.
    pub const fn floats_with_rare<F: Function<N>, const N: usize>() -> Loops {
        let (f32, f64) = (rare_loop::<F, f32, N>, rare_loop::<F, f64, N>);
        Loops { floats: Some(FloatLoops { f32, half: f32, f64 }), integers: None, bools: None }
    }

    /// Compiles a function of floats and integers, with rare operands of floats ([`Function::at_rare`]); bool is refused.
    pub const fn numbers_with_rare<F: Function<N> + NumFunction<N>, const N: usize>() -> Loops {
        Loops { floats: Loops::floats_with_rare::<F, N>().floats, ..Loops::numbers::<F, N>() }
    }
}

fn rare_loop<F: Function<N>, A: Real, const N: usize>(s: Constants, ins: &[&[A]], out: &mut [A]) {
    let ins: &[&[A]; N] = pieces(ins);
    for (i, out) in out.chunks_mut(RARE_CHUNK).enumerate() {
        let part = ins.map(|x| &x[i * RARE_CHUNK..][..out.len()]);
        dispatch(ElementLoop(<FloatFormula<F> as ElementFn<A, A, N>>::with(s), &part, &mut *out));
        repair(&part, out, |x| F::at_rare(s, x));
    }
}

/// Replaces results that are NaN by `f` of their operands.
pub(crate) fn repair<A: Real, const N: usize>(ins: &[&[A]; N], out: &mut [A], f: impl Fn([A; N]) -> A) {
    if dispatch(HasNan(out)) {
        for (i, y) in out.iter_mut().enumerate().filter(|(_, y)| is_nan(**y)) {
            *y = f(ins.map(|x| x[i]));
        }
    }
}

/// Looks for a NaN.
struct HasNan<'a, A>(&'a [A]);

impl<A: Real> Kernel for HasNan<'_, A> {
    type Out = bool;
    const WIDEST: Isa = Isa::Avx2;
    #[inline(always)]
    fn run(self) -> bool {
        self.0.iter().fold(false, |found, &y| found | is_nan(y))
    }
    #[inline(always)]
    fn run_small(self) -> bool {
        self.0.iter().any(|&y| is_nan(y))
    }
}
