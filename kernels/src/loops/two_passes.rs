//! The loops of formulas that are long chains of operations.
//!
//! A CPU overlaps only as many chains as its queues hold. So the loops for f32 go over a chunk twice, which cuts a
//! chain in two. Each element sees the operations of [`Function::at`], so the bits are the same. With AVX-512 the queues hold
//! twice as many elements, and one pass is faster (`benches/results/2026-11-27-xeon.md`). x86-64 CPUs without AVX2 take one pass, too.

use std::marker::PhantomData;

use crate::isa::simd::{Isa, Kernel, dispatch};
use crate::loops::formulas::{Constants, FloatFormula, FloatLoops, Function, Loops, pieces, vector_loop};
use crate::num::real::{Num, Real};

/// A formula in two parts of about the same length. Implement the functions `#[inline(always)]`.
///
/// ```
/// use isoshard_kernels::{Constants, Function, Loops, Num, Real, TwoPasses};
///
/// /// `tanh(e^(x / 2))`
/// struct Gate;
/// impl Function<1> for Gate {
///     #[inline(always)]
///     fn at<A: Real>(_: Constants, x: [A; 1]) -> A {
///         Gate::second(x, Gate::first(x))
///     }
/// }
/// impl TwoPasses<1> for Gate {
///     #[inline(always)]
///     fn first<A: Real>([x]: [A; 1]) -> A {
///         (x * A::of(0.5)).exp()
///     }
///     #[inline(always)]
///     fn second<A: Real>(_: [A; 1], first: A) -> A {
///         first.tanh()
///     }
/// }
/// let run = |loops: Loops| {
///     let mut y = [0.0f32; 3];
///     (loops.floats.unwrap().f32)([0.0; 2], &[&[0.0, 2.0, -9.0]], &mut y);
///     y
/// };
/// assert_eq!(run(Loops::floats_in_two_passes::<Gate, 1>()), run(Loops::floats::<Gate, 1>()));
/// ```
pub trait TwoPasses<const N: usize>: Function<N> {
    /// Returns what the second part needs.
    fn first<A: Real>(x: [A; N]) -> A;

    /// Returns the formula's value.
    fn second<A: Real>(x: [A; N], first: A) -> A;
}

impl Loops {
    /// Compiles a function of floats that is a long chain of operations; other dtypes are refused.
    pub const fn floats_in_two_passes<F: TwoPasses<N>, const N: usize>() -> Loops {
        let Some(FloatLoops { f64, .. }) = Loops::floats::<F, N>().floats else { unreachable!() };
        let f32 = two_passes::<F, N>;
        Loops { floats: Some(FloatLoops { f32, half: f32, f64 }), integers: None, bools: None }
    }
}

/// The number of elements that the passes go over, so that they stay in the nearest cache.
const CHUNK: usize = 512;

fn two_passes<F: TwoPasses<N>, const N: usize>(s: Constants, ins: &[&[f32]], out: &mut [f32]) {
    if cfg!(target_arch = "x86_64") && Isa::current() != Isa::Avx2 {
        return vector_loop::<FloatFormula<F>, f32, f32, N>(s, ins, out);
    }
    dispatch(TwoPassLoop::<F, N> { ins: pieces(ins), out, formula: PhantomData });
}

struct TwoPassLoop<'a, F, const N: usize> {
    ins: &'a [&'a [f32]; N],
    out: &'a mut [f32],
    formula: PhantomData<F>,
}

impl<F: TwoPasses<N>, const N: usize> Kernel for TwoPassLoop<'_, F, N> {
    type Out = ();
    const WIDEST: Isa = Isa::Avx2;
    #[inline(always)]
    fn run(self) {
        let mut firsts = [f32::ZERO; CHUNK];
        for (i, out) in self.out.chunks_mut(CHUNK).enumerate() {
            let (at, firsts) = (i * CHUNK, &mut firsts[..out.len()]);
            match &self.ins[..] {
                [x] => {
                    let x = &x[at..][..out.len()];
                    for (first, &x) in firsts.iter_mut().zip(x) {
                        *first = F::first(exactly::<N>(&[x]));
                    }
                    for (o, (&x, &first)) in out.iter_mut().zip(x.iter().zip(&*firsts)) {
                        *o = F::second(exactly::<N>(&[x]), first);
                    }
                }
                [x, y] => {
                    let (x, y) = (&x[at..][..out.len()], &y[at..][..out.len()]);
                    for (first, (&x, &y)) in firsts.iter_mut().zip(x.iter().zip(y)) {
                        *first = F::first(exactly::<N>(&[x, y]));
                    }
                    for (o, ((&x, &y), &first)) in out.iter_mut().zip(x.iter().zip(y).zip(&*firsts)) {
                        *o = F::second(exactly::<N>(&[x, y]), first);
                    }
                }
                _ => unreachable!("such a formula has one or two variables"),
            }
        }
    }
    #[inline(always)]
    fn run_small(self) {
        unreachable!("the loop of one pass runs without AVX2")
    }
}

#[inline(always)]
fn exactly<const N: usize>(x: &[f32]) -> [f32; N] {
    let mut all = [x[0]; N];
    all.copy_from_slice(x);
    all
}
