//! The loops of formulas that are computed in f64 for every floating-point dtype, and rounded once.

use std::marker::PhantomData;

use crate::element::odd_f32;
use crate::isa::map_slice::map_slice;
use crate::isa::simd::{Isa, dispatch};
use crate::loops::formulas::{Constants, ElementFn, ElementLoop, FloatLoops, LoopFn, Loops, pieces};
use crate::loops::rare_operands;

/// A formula in `N` variables and up to two constants that is computed in f64. Its loop is compiled for f64 only.
/// Implement `at` `#[inline(always)]`.
///
/// ```
/// use isoshard_kernels::{Constants, Loops, WideFunction};
/// use isoshard_kernels::math::hyperbolic::asinh_f64;
///
/// struct Asinh;
/// impl WideFunction<1> for Asinh {
///     #[inline(always)]
///     fn at(_: Constants, [x]: [f64; 1]) -> f64 {
///         asinh_f64(x)
///     }
/// }
/// const ASINH: Loops = Loops::wide::<Asinh, 1>();
/// let mut y = [0.0f32; 2];
/// (ASINH.floats.unwrap().f32)([0.0; 2], &[&[0.0, 1.0]], &mut y);
/// assert_eq!(y, [0.0, 0.8813736]);
/// ```
pub trait WideFunction<const N: usize>: 'static {
    /// Returns the value, or NaN if only [`WideFunction::at_rare`] computes it.
    fn at(s: Constants, x: [f64; N]) -> f64;

    /// Returns the value to more digits than f32 has. Loops of [`Loops::wide_with_short`] call it for f32 and narrower dtypes.
    #[inline(always)]
    fn at_short(s: Constants, x: [f64; N]) -> f64 {
        Self::at(s, x)
    }

    /// Returns the value anywhere. Loops of [`Loops::wide_with_rare`] call it for each element at which [`at`](Self::at) is
    /// NaN. It may branch.
    fn at_rare(s: Constants, x: [f64; N]) -> f64 {
        Self::at(s, x)
    }
}

impl Loops {
    /// Compiles a function that is computed in f64; dtypes that are not floats are refused.
    pub const fn wide<F: WideFunction<N>, const N: usize>() -> Loops {
        wide_loops::<WideFormula<F>, WideFormula<F>, N>()
    }

    /// Compiles a function with a shorter form for f32 and narrower dtypes ([`WideFunction::at_short`]).
    pub const fn wide_with_short<F: WideFunction<N>, const N: usize>() -> Loops {
        wide_loops::<WideFormula<F>, ShortFormula<F>, N>()
    }

    /// Compiles a function with rare arguments ([`WideFunction::at_rare`]).
    pub const fn wide_with_rare<F: WideFunction<N>, const N: usize>() -> Loops {
        wide_loops::<RareFormula<F>, RareFormula<F>, N>()
    }
}

const fn wide_loops<F: WideElementFn<N>, Narrow: WideElementFn<N>, const N: usize>() -> Loops {
    let floats =
        FloatLoops { f32: f32_loop::<Narrow, N>, half: half_loop::<Narrow, N>, f64: wide_loop::<F, N> };
    Loops { floats: Some(floats), integers: None, bools: None }
}

/// The number of elements that are computed at a time, so that operands and results stay in the nearest cache.
const WIDE_CHUNK: usize = 256;

/// A [`WideFunction`] as an element function, with a second pass over results that are NaN.
trait WideElementFn<const N: usize>: ElementFn<f64, f64, N> {
    fn repair(s: Constants, ins: &[&[f64]; N], out: &mut [f64]);
}

/// A [`WideFunction`] without rare arguments.
struct WideFormula<F>(Constants, PhantomData<F>);

/// The shorter form of a [`WideFunction`].
struct ShortFormula<F>(Constants, PhantomData<F>);

/// A [`WideFunction`] with rare arguments.
struct RareFormula<F>(Constants, PhantomData<F>);

macro_rules! element_fn {
    ($Type:ident, $at:ident) => {
        impl<F: WideFunction<N>, const N: usize> ElementFn<f64, f64, N> for $Type<F> {
            /// The loop computes f32 as well.
            const WIDEST: Isa = Isa::Avx512;
            #[inline(always)]
            fn with(s: Constants) -> Self {
                $Type(s, PhantomData)
            }

            #[inline(always)]
            fn at(&self, x: [f64; N]) -> f64 {
                F::$at(self.0, x)
            }
        }
    };
}
element_fn!(WideFormula, at);
element_fn!(ShortFormula, at_short);
element_fn!(RareFormula, at);

impl<F: WideFunction<N>, const N: usize> WideElementFn<N> for WideFormula<F> {
    fn repair(_: Constants, _: &[&[f64]; N], _: &mut [f64]) {}
}

impl<F: WideFunction<N>, const N: usize> WideElementFn<N> for ShortFormula<F> {
    fn repair(_: Constants, _: &[&[f64]; N], _: &mut [f64]) {}
}

impl<F: WideFunction<N>, const N: usize> WideElementFn<N> for RareFormula<F> {
    fn repair(s: Constants, ins: &[&[f64]; N], out: &mut [f64]) {
        rare_operands::repair(ins, out, |x| F::at_rare(s, x));
    }
}

fn wide_loop<F: WideElementFn<N>, const N: usize>(s: Constants, ins: &[&[f64]], out: &mut [f64]) {
    let ins: &[&[f64]; N] = pieces(ins);
    for (i, out) in out.chunks_mut(WIDE_CHUNK).enumerate() {
        let part = ins.map(|x| &x[i * WIDE_CHUNK..][..out.len()]);
        dispatch(ElementLoop(F::with(s), &part, &mut *out));
        F::repair(s, &part, out);
    }
}

fn f32_loop<F: WideElementFn<N>, const N: usize>(s: Constants, ins: &[&[f32]], out: &mut [f32]) {
    through_f64::<N>(s, pieces(ins), out, wide_loop::<F, N>, round);
}

/// Rounds results to odd, so that f16 and bf16 results are rounded once.
fn half_loop<F: WideElementFn<N>, const N: usize>(s: Constants, ins: &[&[f32]], out: &mut [f32]) {
    through_f64::<N>(s, pieces(ins), out, wide_loop::<F, N>, round_to_odd);
}

// Functions, since a closure in a generic function is compiled for each formula.
fn round(results: &[f64], out: &mut [f32]) {
    map_slice(results, out, |x: f64| x as f32);
}

fn round_to_odd(results: &[f64], out: &mut [f32]) {
    map_slice(results, out, odd_f32);
}

/// Runs a loop of f64 on converted chunks, and converts its results.
fn through_f64<const N: usize>(
    s: Constants,
    ins: &[&[f32]; N],
    out: &mut [f32],
    run: LoopFn<f64, f64>,
    round: fn(&[f64], &mut [f32]),
) {
    let mut operands = [[0.0f64; WIDE_CHUNK]; N];
    let mut results = [0.0f64; WIDE_CHUNK];
    for (i, out) in out.chunks_mut(WIDE_CHUNK).enumerate() {
        for (wide, x) in operands.iter_mut().zip(ins) {
            map_slice(&x[i * WIDE_CHUNK..][..out.len()], &mut wide[..out.len()], f64::from);
        }
        let parts: [&[f64]; N] = operands.each_ref().map(|x| &x[..out.len()]);
        run(s, &parts, &mut results[..out.len()]);
        round(&results[..out.len()], out);
    }
}
