//! The loops of formulas that call the normal distribution function.
//!
//! The error function is a long chain of operations, and a CPU overlaps only as many chains as its queues hold. So the
//! loops for f32 go over a chunk several times, which cuts the chain into short ones. Each element sees the operations
//! of [`Function::at`], so the bits are the same.

use std::marker::PhantomData;

use super::loops::{Constants, FloatLoops, Function, Loops, pieces};
use super::simd::{Kernel, dispatch};
use super::{Num, Real};
use crate::tensor::math::erf::{erf_from_tail_f32, erfc_exponent_f32, erfc_tail_f32};

/// A formula that calls the normal distribution function once. Implement the functions `#[inline(always)]`.
///
/// ```
/// use isoshard::tensor::Tensor;
/// use isoshard::tensor::cpu::{Constants, Function, Loops, NormalFunction, Num, Real, compute};
///
/// /// `x · Φ(x / 2)`
/// struct Gate;
/// impl Function<1> for Gate {
///     #[inline(always)]
///     fn at<A: Real>(_: Constants, x: [A; 1]) -> A {
///         let scaled = <Gate as NormalFunction<1>>::operand(x) * A::of(std::f64::consts::FRAC_1_SQRT_2);
///         Gate::with_phi(x, A::of(0.5).mul_add(scaled.erf(), A::of(0.5)))
///     }
/// }
/// impl NormalFunction<1> for Gate {
///     #[inline(always)]
///     fn operand<A: Real>([x]: [A; 1]) -> A {
///         x * A::of(0.5)
///     }
///     #[inline(always)]
///     fn with_phi<A: Real>([x]: [A; 1], phi: A) -> A {
///         x * phi
///     }
/// }
/// let x = Tensor::from_vec(vec![0.0f32, 2.0, -9.0], [3])?;
/// let passes = compute("gate", &Loops::floats_with_phi::<Gate, 1>(), [0.0; 2], &mut [x.clone()])?;
/// let at_once = compute("gate", &Loops::floats::<Gate, 1>(), [0.0; 2], &mut [x])?;
/// assert_eq!(passes.as_bytes()?, at_once.as_bytes()?);
/// # Ok::<(), isoshard::Error>(())
/// ```
pub trait NormalFunction<const N: usize>: Function<N> {
    /// Returns the operand of the distribution function.
    fn operand<A: Real>(x: [A; N]) -> A;

    /// Returns the formula's value, given the distribution function's.
    fn with_phi<A: Real>(x: [A; N], phi: A) -> A;
}

impl Loops {
    /// Compiles a function of floats that calls the normal distribution function; other dtypes are refused.
    pub const fn floats_with_phi<F: NormalFunction<N>, const N: usize>() -> Loops {
        let Some(FloatLoops { f64, .. }) = Loops::floats::<F, N>().floats else { unreachable!() };
        let f32 = phi_loop::<F, N>;
        Loops { floats: Some(FloatLoops { f32, half: f32, f64 }), integers: None, bools: None }
    }
}

/// The number of elements that the passes go over, so that they stay in the nearest cache.
const PHI_CHUNK: usize = 512;

fn phi_loop<F: NormalFunction<N>, const N: usize>(_: Constants, ins: &[&[f32]], out: &mut [f32]) {
    dispatch(PhiLoop::<F, N> { ins: pieces(ins), out, formula: PhantomData });
}

struct PhiLoop<'a, F, const N: usize> {
    ins: &'a [&'a [f32]; N],
    out: &'a mut [f32],
    formula: PhantomData<F>,
}

impl<F: NormalFunction<N>, const N: usize> Kernel for PhiLoop<'_, F, N> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let mut tails = [f32::ZERO; PHI_CHUNK];
        for (i, out) in self.out.chunks_mut(PHI_CHUNK).enumerate() {
            let (at, tails) = (i * PHI_CHUNK, &mut tails[..out.len()]);
            match &self.ins[..] {
                [x] => {
                    let x = &x[at..][..out.len()];
                    for (tail, &x) in tails.iter_mut().zip(x) {
                        *tail = erfc_exponent_f32(erf_operand::<F, N>(&[x]));
                    }
                    tails.iter_mut().for_each(|tail| *tail = erfc_tail_f32(*tail));
                    for (o, (&x, &tail)) in out.iter_mut().zip(x.iter().zip(&*tails)) {
                        *o = value::<F, N>(&[x], tail);
                    }
                }
                [x, y] => {
                    let (x, y) = (&x[at..][..out.len()], &y[at..][..out.len()]);
                    for (tail, (&x, &y)) in tails.iter_mut().zip(x.iter().zip(y)) {
                        *tail = erfc_exponent_f32(erf_operand::<F, N>(&[x, y]));
                    }
                    tails.iter_mut().for_each(|tail| *tail = erfc_tail_f32(*tail));
                    for (o, ((&x, &y), &tail)) in out.iter_mut().zip(x.iter().zip(y).zip(&*tails)) {
                        *o = value::<F, N>(&[x, y], tail);
                    }
                }
                _ => unreachable!("such a formula has one or two variables"),
            }
        }
    }
}

/// Returns the operand of the error function.
#[inline(always)]
fn erf_operand<F: NormalFunction<N>, const N: usize>(x: &[f32]) -> f32 {
    F::operand(exactly::<N>(x)) * f32::of(std::f64::consts::FRAC_1_SQRT_2)
}

/// Returns the formula's value from the error function's tail.
#[inline(always)]
fn value<F: NormalFunction<N>, const N: usize>(x: &[f32], tail: f32) -> f32 {
    let erf = erf_from_tail_f32(erf_operand::<F, N>(x), tail);
    F::with_phi(exactly::<N>(x), Real::mul_add(0.5, erf, 0.5))
}

#[inline(always)]
fn exactly<const N: usize>(x: &[f32]) -> [f32; N] {
    let mut all = [x[0]; N];
    all.copy_from_slice(x);
    all
}
