//! The loops of formulas: one function per dtype and instruction set, compiled from a formula that is written once.

use std::marker::PhantomData;

use crate::element::{DType, Element};
use crate::isa::simd::{Isa, Kernel, dispatch, opaque_index};
use crate::num::bit_num::BitNum;
use crate::num::real::{Num, Real};

/// The constants of a formula. A formula that has fewer ignores the rest.
pub type Constants = [f64; 2];

/// A formula in `N` floating-point variables and up to two constants `s`. Implement `at` `#[inline(always)]`.
///
/// ```
/// use isoshard_kernels::{Constants, Function, Loops, Num, Real};
///
/// struct Softplus;
/// impl Function<1> for Softplus {
///     #[inline(always)]
///     fn at<A: Real>([s, _]: Constants, [x]: [A; 1]) -> A {
///         (A::ONE + (x * A::of(s)).exp()).ln() / A::of(s)
///     }
/// }
/// const SOFTPLUS: Loops = Loops::floats::<Softplus, 1>();
///
/// let mut y = [0.0f32; 2];
/// (SOFTPLUS.floats.unwrap().f32)([2.0, 0.0], &[&[0.0, 3.0]], &mut y);
/// assert_eq!(y[0], 2f32.ln() / 2.0);
/// ```
pub trait Function<const N: usize>: 'static {
    /// Returns the value. In loops of [`Loops::floats_with_rare`] it may be NaN if only [`Function::at_rare`] computes it.
    fn at<A: Real>(s: Constants, x: [A; N]) -> A;

    /// Returns the value anywhere. It may branch.
    fn at_rare<A: Real>(s: Constants, x: [A; N]) -> A {
        Self::at(s, x)
    }
}

/// A formula in `N` variables, floats or integers, and up to two constants `s`.
///
/// ```
/// use isoshard_kernels::{Constants, Loops, Num, NumFunction};
///
/// struct SquaredDistance;
/// impl NumFunction<2> for SquaredDistance {
///     #[inline(always)]
///     fn at<A: Num>(_: Constants, [x, y]: [A; 2]) -> A {
///         x.sub(y).mul(x.sub(y))
///     }
/// }
/// const LOOPS: Loops = Loops::numbers::<SquaredDistance, 2>();
/// let mut z = [0i64; 2];
/// (LOOPS.integers.unwrap().i64)([0.0; 2], &[&[5, 1], &[2, 2]], &mut z);
/// assert_eq!(z, [9, 1]);
/// ```
pub trait NumFunction<const N: usize>: 'static {
    /// Returns the value.
    fn at<A: Num>(s: Constants, x: [A; N]) -> A;
}

/// A formula in `N` variables, integers or bools, that works on their bits.
///
/// ```
/// use isoshard_kernels::{BitFunction, BitNum, Loops};
///
/// struct Without;
/// impl BitFunction<2> for Without {
///     #[inline(always)]
///     fn at<A: BitNum>([x, y]: [A; 2]) -> A {
///         x.bit_and(y.bit_not())
///     }
/// }
/// const LOOPS: Loops = Loops::bits::<Without, 2>();
/// let mut z = [0u8; 2];
/// (LOOPS.integers.unwrap().u8)([0.0; 2], &[&[7, 6], &[2, 3]], &mut z);
/// assert_eq!(z, [5, 4]);
/// ```
pub trait BitFunction<const N: usize>: 'static {
    /// Returns the value.
    fn at<A: BitNum>(x: [A; N]) -> A;
}

/// A relation of two numbers.
///
/// ```
/// use isoshard_kernels::{Relation, RelationLoops};
///
/// struct Above;
/// impl Relation for Above {
///     #[inline(always)]
///     fn at<A: PartialOrd + Copy>(x: A, y: A) -> bool {
///         x > y
///     }
/// }
/// const ABOVE: RelationLoops = RelationLoops::of::<Above>();
/// let mut z = [false; 2];
/// (ABOVE.f32)([0.0; 2], &[&[1.0, 5.0], &[2.0, 2.0]], &mut z);
/// assert_eq!(z, [false, true]);
/// ```
pub trait Relation: 'static {
    /// Returns true if it holds.
    fn at<A: PartialOrd + Copy>(x: A, y: A) -> bool;
}

/// A property of floating-point numbers.
///
/// ```
/// use isoshard_kernels::{FloatPredicate, FloatPredicateLoops, Num, Real};
///
/// struct IsWhole;
/// impl FloatPredicate for IsWhole {
///     #[inline(always)]
///     fn at<A: Real>(x: A) -> bool {
///         x.floor() == x
///     }
/// }
/// const IS_WHOLE: FloatPredicateLoops = FloatPredicateLoops::of::<IsWhole>();
/// let mut z = [false; 2];
/// (IS_WHOLE.f32)([0.0; 2], &[&[2.0, 2.5]], &mut z);
/// assert_eq!(z, [true, false]);
/// ```
pub trait FloatPredicate: 'static {
    /// Returns true if `x` has the property.
    fn at<A: Real>(x: A) -> bool;
}

/// The compiled loops of a [`Function`], [`NumFunction`] or [`BitFunction`].
#[derive(Clone, Copy)]
pub struct Loops {
    /// The loops of the floating-point dtypes, if they have any.
    pub floats: Option<FloatLoops>,
    /// The loops of integers.
    pub integers: Option<IntegerLoops>,
    /// The loop of bools.
    pub bools: Option<LoopFn<bool, bool>>,
}

/// The compiled loops of a [`Relation`].
#[derive(Clone, Copy)]
pub struct RelationLoops {
    /// The loop of f32.
    pub f32: LoopFn<f32, bool>,
    /// The loop of f64.
    pub f64: LoopFn<f64, bool>,
    /// The loop of i64.
    pub i64: LoopFn<i64, bool>,
    /// The loop of i32.
    pub i32: LoopFn<i32, bool>,
    /// The loop of u8.
    pub u8: LoopFn<u8, bool>,
    /// The loop of bool.
    pub bool: LoopFn<bool, bool>,
}

/// The compiled loops of a [`FloatPredicate`].
#[derive(Clone, Copy)]
pub struct FloatPredicateLoops {
    /// The loop of f32.
    pub f32: LoopFn<f32, bool>,
    /// The loop of f64.
    pub f64: LoopFn<f64, bool>,
}

/// The loops of the floating-point dtypes.
#[derive(Clone, Copy)]
pub struct FloatLoops {
    /// The loop of f32.
    pub f32: LoopFn<f32, f32>,
    /// The loop for f16 and bf16, whose results are rounded to the dtype afterwards.
    pub half: LoopFn<f32, f32>,
    /// The loop of f64.
    pub f64: LoopFn<f64, f64>,
}

/// The loops of integers.
#[derive(Clone, Copy)]
pub struct IntegerLoops {
    /// The loop of i64.
    pub i64: LoopFn<i64, i64>,
    /// The loop of i32.
    pub i32: LoopFn<i32, i32>,
    /// The loop of u8.
    pub u8: LoopFn<u8, u8>,
}

/// A loop over one chunk: it takes the constants, a chunk of each operand, and the chunk of the result to write.
pub type LoopFn<A, O> = fn(Constants, &[&[A]], &mut [O]);

impl Loops {
    /// Compiles a function of floats; other dtypes are refused.
    pub const fn floats<F: Function<N>, const N: usize>() -> Loops {
        let (f32, f64) =
            (vector_loop::<FloatFormula<F>, f32, f32, N>, vector_loop::<FloatFormula<F>, f64, f64, N>);
        Loops { floats: Some(FloatLoops { f32, half: f32, f64 }), integers: None, bools: None }
    }

    /// Compiles a function of floats and integers; bool is refused.
    pub const fn numbers<F: NumFunction<N>, const N: usize>() -> Loops {
        let (f32, f64) =
            (vector_loop::<NumFormula<F>, f32, f32, N>, vector_loop::<NumFormula<F>, f64, f64, N>);
        let integers = integer_loops::<NumFormula<F>, N>();
        Loops { floats: Some(FloatLoops { f32, half: f32, f64 }), integers: Some(integers), bools: None }
    }

    /// Compiles a function of integers; other dtypes are refused.
    pub const fn integers<F: BitFunction<N>, const N: usize>() -> Loops {
        Loops { floats: None, integers: Some(integer_loops::<BitFormula<F>, N>()), bools: None }
    }

    /// Compiles a function of integers and bools; floats are refused.
    pub const fn bits<F: BitFunction<N>, const N: usize>() -> Loops {
        let bools = Some(plain_loop::<BitFormula<F>, bool, bool, N> as LoopFn<bool, bool>);
        Loops { bools, ..Loops::integers::<F, N>() }
    }
}

impl RelationLoops {
    /// Compiles a relation for every dtype.
    pub const fn of<R: Relation>() -> RelationLoops {
        RelationLoops {
            f32: vector_loop::<RelationFormula<R>, f32, bool, 2>,
            f64: vector_loop::<RelationFormula<R>, f64, bool, 2>,
            i64: plain_loop::<RelationFormula<R>, i64, bool, 2>,
            i32: plain_loop::<RelationFormula<R>, i32, bool, 2>,
            u8: plain_loop::<RelationFormula<R>, u8, bool, 2>,
            bool: plain_loop::<RelationFormula<R>, bool, bool, 2>,
        }
    }
}

impl FloatPredicateLoops {
    /// Compiles a test for the floating-point dtypes.
    pub const fn of<T: FloatPredicate>() -> FloatPredicateLoops {
        FloatPredicateLoops {
            f32: vector_loop::<FloatPredicateFormula<T>, f32, bool, 1>,
            f64: vector_loop::<FloatPredicateFormula<T>, f64, bool, 1>,
        }
    }
}

const fn integer_loops<F, const N: usize>() -> IntegerLoops
where
    F: ElementFn<i64, i64, N> + ElementFn<i32, i32, N> + ElementFn<u8, u8, N>,
{
    IntegerLoops {
        i64: plain_loop::<F, i64, i64, N>,
        i32: plain_loop::<F, i32, i32, N>,
        u8: plain_loop::<F, u8, u8, N>,
    }
}

/// Runs the loop with the widest vectors that the CPU has.
pub(crate) fn vector_loop<F: ElementFn<A, O, N>, A: Copy, O, const N: usize>(
    s: Constants,
    ins: &[&[A]],
    out: &mut [O],
) {
    dispatch(ElementLoop(F::with(s), pieces(ins), out));
}

/// Runs a loop over integers or bools. It is compiled for the baseline only, since it is bound by memory. (With wider vectors
/// `bitwise_not` of bools is not faster: a new buffer of bools is zeroed before the loop writes it.)
fn plain_loop<F: ElementFn<A, O, N>, A: Copy, O, const N: usize>(s: Constants, ins: &[&[A]], out: &mut [O]) {
    ElementLoop(F::with(s), pieces(ins), out).run();
}

/// Returns the slice of chunks as an array, by reference. A copied array would be read in wider words than it was
/// written in, for which the CPU waits until all earlier stores, those of results included, have reached the cache.
#[inline(always)]
pub(crate) fn pieces<'a, A, const N: usize>(ins: &'a [&'a [A]]) -> &'a [&'a [A]; N] {
    ins.try_into().expect("a function has as many operands as variables")
}

/// A function of one element per operand, which is inlined into its loop.
pub(crate) trait ElementFn<A, O, const N: usize> {
    /// [`Kernel::WIDEST`] of the loop.
    const WIDEST: Isa = Isa::Avx2;
    fn with(s: Constants) -> Self;
    fn at(&self, x: [A; N]) -> O;
}

/// A [`Function`] with its constants.
pub(crate) struct FloatFormula<F>(Constants, PhantomData<F>);

impl<F: Function<N>, A: Real, const N: usize> ElementFn<A, A, N> for FloatFormula<F> {
    const WIDEST: Isa = widest_of::<A>();
    #[inline(always)]
    fn with(s: Constants) -> Self {
        FloatFormula(s, PhantomData)
    }

    #[inline(always)]
    fn at(&self, x: [A; N]) -> A {
        F::at(self.0, x)
    }
}

/// Returns [`Kernel::WIDEST`] of formulas in `A`: AVX-512 for f32. Nothing that trains computes in f64, so its loops are
/// compiled for AVX2 alone.
pub const fn widest_of<A: Element>() -> Isa {
    if matches!(A::DTYPE, DType::F32) { Isa::Avx512 } else { Isa::Avx2 }
}

/// A [`NumFunction`] with its constants.
struct NumFormula<F>(Constants, PhantomData<F>);

impl<F: NumFunction<N>, A: Num, const N: usize> ElementFn<A, A, N> for NumFormula<F> {
    #[inline(always)]
    fn with(s: Constants) -> Self {
        NumFormula(s, PhantomData)
    }

    #[inline(always)]
    fn at(&self, x: [A; N]) -> A {
        F::at(self.0, x)
    }
}

/// A [`BitFunction`] as an element function.
struct BitFormula<F>(PhantomData<F>);

impl<F: BitFunction<N>, A: BitNum, const N: usize> ElementFn<A, A, N> for BitFormula<F> {
    #[inline(always)]
    fn with(_: Constants) -> Self {
        BitFormula(PhantomData)
    }

    #[inline(always)]
    fn at(&self, x: [A; N]) -> A {
        F::at(x)
    }
}

/// A [`Relation`] as an element function.
struct RelationFormula<F>(PhantomData<F>);

impl<F: Relation, A: PartialOrd + Copy> ElementFn<A, bool, 2> for RelationFormula<F> {
    #[inline(always)]
    fn with(_: Constants) -> Self {
        RelationFormula(PhantomData)
    }

    #[inline(always)]
    fn at(&self, x: [A; 2]) -> bool {
        F::at(x[0], x[1])
    }
}

/// A [`FloatPredicate`] as an element function.
struct FloatPredicateFormula<F>(PhantomData<F>);

impl<F: FloatPredicate, A: Real> ElementFn<A, bool, 1> for FloatPredicateFormula<F> {
    #[inline(always)]
    fn with(_: Constants) -> Self {
        FloatPredicateFormula(PhantomData)
    }

    #[inline(always)]
    fn at(&self, x: [A; 1]) -> bool {
        F::at(x[0])
    }
}

/// The loop of an element function over one chunk.
pub(crate) struct ElementLoop<'a, F, A, O, const N: usize>(
    pub(crate) F,
    pub(crate) &'a [&'a [A]; N],
    pub(crate) &'a mut [O],
);

impl<F: ElementFn<A, O, N>, A: Copy, O, const N: usize> Kernel for ElementLoop<'_, F, A, O, N> {
    type Out = ();
    const WIDEST: Isa = F::WIDEST;
    #[inline(always)]
    fn run(self) {
        let ElementLoop(f, ins, out) = self;
        each_element(ins, out, f);
    }
    #[inline(always)]
    fn run_small(self) {
        let ElementLoop(f, ins, out) = self;
        let len = ins.iter().fold(out.len(), |len, x| len.min(x.len()));
        for i in 0..len {
            let i = opaque_index(i);
            let mut x = [ins[0][i]; N];
            for (x, operand) in x.iter_mut().zip(ins).skip(1) {
                *x = operand[i];
            }
            out[i] = f.at(x);
        }
    }
}

/// Sets `out[i] = f(ins[0][i], ins[1][i], ...)`, by iterators that check no index. `f` is not a closure, because a
/// closure would be compiled without the loop's instruction set.
#[inline(always)]
fn each_element<A: Copy, O, const N: usize>(ins: &[&[A]; N], out: &mut [O], f: impl ElementFn<A, O, N>) {
    #[inline(always)]
    fn exactly<A: Copy, const N: usize>(x: &[A]) -> [A; N] {
        let mut all = [x[0]; N];
        all.copy_from_slice(x);
        all
    }
    match &ins[..] {
        [x] => {
            for (o, &x) in out.iter_mut().zip(*x) {
                *o = f.at(exactly(&[x]));
            }
        }
        [x, y] => {
            for (o, (&x, &y)) in out.iter_mut().zip(x.iter().zip(*y)) {
                *o = f.at(exactly(&[x, y]));
            }
        }
        [x, y, z] => {
            for (o, ((&x, &y), &z)) in out.iter_mut().zip(x.iter().zip(*y).zip(*z)) {
                *o = f.at(exactly(&[x, y, z]));
            }
        }
        _ => unreachable!("a function has one to three variables"),
    }
}
