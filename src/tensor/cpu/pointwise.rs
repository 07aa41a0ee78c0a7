//! Functions of one, two or three numbers, applied element by element.
//!
//! A function is written once, for any [`Real`] or [`Num`]. [`Loops`] holds its compiled loops: for f32 and f64 one per
//! instruction set (f16 and bf16 are converted to f32 in chunks that stay in cache), for integers one. All functions
//! share the code around the loops, which handles strides, buffers and in-place results ([`map`]).

use std::marker::PhantomData;

use half::{bf16, f16};
use smallvec::SmallVec;

use super::map::{MAX_OPERANDS, map, map_in_place, select_as};
use super::map_slice::map_slice;
use super::real::{Num, Real, Widen};
use super::simd::{Kernel, dispatch};
use crate::error::{Error, Result};
use crate::tensor::{DType, Tensor, for_dtype};

/// A formula in `N` floating-point variables and a constant `s`. Implement `at` `#[inline(always)]`.
///
/// ```
/// use isoshard::tensor::cpu::{Function, Loops, Real, compute};
/// use isoshard::tensor::Tensor;
///
/// struct Softplus;
/// impl Function<1> for Softplus {
///     #[inline(always)]
///     fn at<A: Real>(s: f64, [x]: [A; 1]) -> A {
///         (A::ONE + (x * A::of(s)).exp()).ln() / A::of(s)
///     }
/// }
/// const SOFTPLUS: Loops = Loops::floats::<Softplus, 1>();
///
/// let x = Tensor::from_vec(vec![0.0f32, 3.0], [2])?;
/// let y = compute("softplus", &SOFTPLUS, 2.0, &mut [x])?.to_vec::<f32>()?;
/// assert_eq!(y[0], 2f32.ln() / 2.0);
/// # Ok::<(), isoshard::Error>(())
/// ```
pub trait Function<const N: usize>: 'static {
    /// Its value.
    fn at<A: Real>(s: f64, x: [A; N]) -> A;
}

/// A formula in `N` variables that is computed in f64 for every floating-point dtype, and rounded once. Its loop is
/// compiled for f64 only. Implement both functions `#[inline(always)]`.
///
/// ```
/// use isoshard::tensor::cpu::{Loops, WideFunction, compute};
/// use isoshard::tensor::{Tensor, math::hyperbolic::asinh_f64};
///
/// struct Asinh;
/// impl WideFunction<1> for Asinh {
///     #[inline(always)]
///     fn at(_: f64, [x]: [f64; 1]) -> f64 {
///         asinh_f64(x)
///     }
/// }
/// const ASINH: Loops = Loops::wide::<Asinh, 1>();
/// let y = compute("asinh", &ASINH, 0.0, &mut [Tensor::from_vec(vec![0.0f32, 1.0], [2])?])?;
/// assert_eq!(y.to_vec::<f32>()?, [0.0, 0.88137364]);
/// # Ok::<(), isoshard::Error>(())
/// ```
pub trait WideFunction<const N: usize>: 'static {
    /// Its value, or NaN where only [`WideFunction::at_rare`] computes it.
    fn at(s: f64, x: [f64; N]) -> f64;

    /// Its value anywhere. The loops made by [`Loops::wide_with_rare`] call it for the elements whose [`at`](Self::at)
    /// is NaN, one by one: it may branch.
    fn at_rare(s: f64, x: [f64; N]) -> f64 {
        Self::at(s, x)
    }
}

/// A formula in `N` variables, floats or integers, and a constant `s`.
///
/// ```
/// use isoshard::tensor::cpu::{Loops, Num, NumFunction, compute};
/// use isoshard::tensor::Tensor;
///
/// struct SquaredDistance;
/// impl NumFunction<2> for SquaredDistance {
///     #[inline(always)]
///     fn at<A: Num>(_: f64, [x, y]: [A; 2]) -> A {
///         x.sub(y).mul(x.sub(y))
///     }
/// }
/// const LOOPS: Loops = Loops::numbers::<SquaredDistance, 2>();
/// let (x, y) = (Tensor::from_vec(vec![5i64, 1], [2])?, Tensor::from_vec(vec![2i64, 2], [2])?);
/// assert_eq!(compute("distance", &LOOPS, 0.0, &mut [x, y])?.to_vec::<i64>()?, [9, 1]);
/// # Ok::<(), isoshard::Error>(())
/// ```
pub trait NumFunction<const N: usize>: 'static {
    /// Its value.
    fn at<A: Num>(s: f64, x: [A; N]) -> A;
}

/// A relation of two numbers.
///
/// ```
/// use isoshard::tensor::cpu::{Relation, RelationLoops, compare};
/// use isoshard::tensor::Tensor;
///
/// struct Above;
/// impl Relation for Above {
///     #[inline(always)]
///     fn at<A: PartialOrd + Copy>(x: A, y: A) -> bool {
///         x > y
///     }
/// }
/// const ABOVE: RelationLoops = RelationLoops::of::<Above>();
/// let (x, y) = (Tensor::from_vec(vec![1.0f32, 5.0], [2])?, Tensor::from_vec(vec![2.0f32, 2.0], [2])?);
/// assert_eq!(compare("above", &ABOVE, &x, &y)?.to_vec::<bool>()?, [false, true]);
/// # Ok::<(), isoshard::Error>(())
/// ```
pub trait Relation: 'static {
    /// Returns true if it holds.
    fn at<A: PartialOrd + Copy>(x: A, y: A) -> bool;
}

/// The compiled loops of a [`Function`], [`WideFunction`] or [`NumFunction`].
#[derive(Clone, Copy)]
pub struct Loops {
    f32: LoopFn<f32, f32>,
    f64: LoopFn<f64, f64>,
    integers: Option<Integers>,
}

/// The compiled loops of a [`Relation`].
#[derive(Clone, Copy)]
pub struct RelationLoops {
    f32: LoopFn<f32, bool>,
    f64: LoopFn<f64, bool>,
    i64: LoopFn<i64, bool>,
    i32: LoopFn<i32, bool>,
    u8: LoopFn<u8, bool>,
    bool: LoopFn<bool, bool>,
}

#[derive(Clone, Copy)]
struct Integers {
    i64: LoopFn<i64, i64>,
    i32: LoopFn<i32, i32>,
    u8: LoopFn<u8, u8>,
}

/// A loop over one chunk: it takes the constant, a chunk of each operand, and the chunk of the result to write.
type LoopFn<A, O> = fn(f64, &[&[A]], &mut [O]);

impl Loops {
    /// Compiles a function of floats; other dtypes are refused.
    pub const fn floats<F: Function<N>, const N: usize>() -> Loops {
        Loops { f32: float_loop::<F, f32, N>, f64: float_loop::<F, f64, N>, integers: None }
    }

    /// Compiles a function that is computed in f64; dtypes that are not floats are refused.
    pub const fn wide<F: WideFunction<N>, const N: usize>() -> Loops {
        Loops { f32: narrow_loop::<WideOnly<F>, N>, f64: wide_loop::<WideOnly<F>, N>, integers: None }
    }

    /// Compiles a function with rare arguments ([`WideFunction::at_rare`]).
    pub const fn wide_with_rare<F: WideFunction<N>, const N: usize>() -> Loops {
        Loops { f32: narrow_loop::<WithRare<F>, N>, f64: wide_loop::<WithRare<F>, N>, integers: None }
    }

    /// Compiles a function of floats and integers; bool is refused.
    pub const fn numbers<F: NumFunction<N>, const N: usize>() -> Loops {
        let integers = Integers {
            i64: integer_loop::<F, i64, N>,
            i32: integer_loop::<F, i32, N>,
            u8: integer_loop::<F, u8, N>,
        };
        Loops { f32: num_loop::<F, f32, N>, f64: num_loop::<F, f64, N>, integers: Some(integers) }
    }
}

impl RelationLoops {
    /// Compiles a relation for every dtype.
    pub const fn of<R: Relation>() -> RelationLoops {
        RelationLoops {
            f32: relation_loop::<R, f32>,
            f64: relation_loop::<R, f64>,
            i64: plain_relation_loop::<R, i64>,
            i32: plain_relation_loop::<R, i32>,
            u8: plain_relation_loop::<R, u8>,
            bool: plain_relation_loop::<R, bool>,
        }
    }
}

/// Returns the function, with constant `s`, of operands with one dtype and shape. Integers wrap.
///
/// The result overwrites the first operand whose buffer no other tensor shares, since that buffer is likely to be in
/// the cache. If there is none the result is a new tensor. [`Function`] has an example.
///
/// # Errors
/// Returns an error that names `verb` if the function does not support the dtype, or if the operands' dtypes or shapes
/// differ.
pub fn compute(verb: &str, loops: &Loops, s: f64, ins: &mut [Tensor]) -> Result<Tensor> {
    let (first, others) = ins.split_first().expect("a function has variables");
    expect_matching(verb, first, &others.iter().collect::<SmallVec<[&Tensor; MAX_OPERANDS]>>())?;
    let integers = || loops.integers.as_ref().ok_or_else(|| unsupported_dtype(verb, loops, &ins[0]));
    match ins[0].dtype() {
        DType::F32 => compute_as::<f32>(loops.f32, s, ins),
        DType::F64 => compute_as::<f64>(loops.f64, s, ins),
        DType::F16 => compute_as::<f16>(loops.f32, s, ins),
        DType::BF16 => compute_as::<bf16>(loops.f32, s, ins),
        DType::I64 => compute_as::<i64>(integers()?.i64, s, ins),
        DType::I32 => compute_as::<i32>(integers()?.i32, s, ins),
        DType::U8 => compute_as::<u8>(integers()?.u8, s, ins),
        DType::Bool => Err(unsupported_dtype(verb, loops, &ins[0])),
    }
}

/// Compares `x` with `y`, of one shape and of any one dtype, element by element. The result has dtype bool.
/// [`Relation`] has an example.
///
/// # Errors
/// Returns an error that names `verb` if the operands' dtypes or shapes differ.
pub fn compare(verb: &str, loops: &RelationLoops, x: &Tensor, y: &Tensor) -> Result<Tensor> {
    expect_matching(verb, x, &[y])?;
    match x.dtype() {
        DType::F32 => compare_as::<f32>(loops.f32, x, y),
        DType::F64 => compare_as::<f64>(loops.f64, x, y),
        DType::F16 => compare_as::<f16>(loops.f32, x, y),
        DType::BF16 => compare_as::<bf16>(loops.f32, x, y),
        DType::I64 => compare_as::<i64>(loops.i64, x, y),
        DType::I32 => compare_as::<i32>(loops.i32, x, y),
        DType::U8 => compare_as::<u8>(loops.u8, x, y),
        DType::Bool => compare_as::<bool>(loops.bool, x, y),
    }
}

/// Takes operands `(condition, yes, no)` of one shape and returns, for each element, `yes` if the condition is `on`,
/// else `no`. The result overwrites `yes` or `no` if no other tensor shares its buffer, else it is a new tensor.
///
/// ```
/// use isoshard::tensor::{Tensor, cpu::select};
/// let mut condition = Tensor::from_vec(vec![true, false], [2])?;
/// let (mut yes, mut no) = (Tensor::from_vec(vec![1i32, 2], [2])?, Tensor::from_vec(vec![3i32, 4], [2])?);
/// let picked = select("pick", [&mut condition, &mut yes, &mut no], true)?;
/// assert_eq!(picked.to_vec::<i32>()?, [1, 4]);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Returns an error that names `verb` if the condition is not bool, or if the operands' shapes or the choices' dtypes
/// differ.
pub fn select(verb: &str, mut ins: [&mut Tensor; 3], on: bool) -> Result<Tensor> {
    let [condition, yes, no] = &ins;
    condition.expect_dtype(verb, DType::Bool)?;
    if yes.dtype() != no.dtype() || condition.shape() != yes.shape() || yes.shape() != no.shape() {
        return Err(mismatch(verb, &ins.map(|x| &*x)));
    }
    let own = (1..3).find(|&k| ins[k].is_unique());
    for_dtype!(any ins[1].dtype(), T => select_as::<T>(ins, on, own))
}

/// Checks that operands have the dtype and shape of `x`.
///
/// ```
/// use isoshard::tensor::{DType, Tensor, cpu::expect_matching};
/// let (x, y) = (Tensor::zeros(DType::F32, [2]), Tensor::zeros(DType::F32, [3]));
/// let e = expect_matching("add", &x, &[&y]).unwrap_err();
/// assert!(e.to_string().starts_with("add: the operands' dtypes or shapes differ"));
/// ```
///
/// # Errors
/// Returns an error that names `verb` if a dtype or shape differs.
pub fn expect_matching(verb: &str, x: &Tensor, others: &[&Tensor]) -> Result<()> {
    if others.iter().all(|y| y.dtype() == x.dtype() && y.shape() == x.shape()) {
        return Ok(());
    }
    Err(mismatch(verb, &[&[x], others].concat()))
}

/// [`compute`] for operands of element type `T`.
fn compute_as<T: Widen>(run: LoopFn<T::Wide, T::Wide>, s: f64, ins: &mut [Tensor]) -> Result<Tensor> {
    let Some(own) = (0..ins.len()).find(|&k| ins[k].is_unique()) else {
        let mut operands: [&Tensor; MAX_OPERANDS] = [&ins[0]; MAX_OPERANDS];
        ins.iter().enumerate().for_each(|(k, x)| operands[k] = x);
        return map::<T, T>(&operands[..ins.len()], &|x, o| run(s, x, o));
    };
    map_in_place::<T>(ins, own, &|x, o| run(s, x, o))?;
    Ok(ins[own].clone())
}

/// [`compare`] for operands of element type `T`.
fn compare_as<T: Widen>(run: LoopFn<T::Wide, bool>, x: &Tensor, y: &Tensor) -> Result<Tensor> {
    map::<T, bool>(&[x, y], &|x, o| run(0.0, x, o))
}

/// Returns the error for a dtype that the function does not support.
fn unsupported_dtype(verb: &str, loops: &Loops, x: &Tensor) -> Error {
    match loops.integers {
        Some(_) => Error::invalid(verb, "bool has no arithmetic", x.notation(), "cast it first"),
        None => x.dtype().expect_float(verb).expect_err("the floating dtypes have loops"),
    }
}

/// Returns the error for operands whose dtypes or shapes differ.
fn mismatch(verb: &str, operands: &[&Tensor]) -> Error {
    let given: Vec<String> = operands.iter().map(|t| t.notation()).collect();
    Error::invalid(
        verb,
        "the operands' dtypes or shapes differ",
        given.join(", "),
        "cast or expand them first",
    )
}

fn float_loop<F: Function<N>, A: Real, const N: usize>(s: f64, ins: &[&[A]], out: &mut [A]) {
    dispatch(FloatLoop::<F, A, N>(s, pieces(ins), out, PhantomData));
}

/// A [`WideFunction`], and how its loop treats results that are NaN.
trait WideLoop<const N: usize>: 'static {
    type Formula: WideFunction<N>;
    /// Replaces results that are NaN.
    fn repair(s: f64, ins: &[&[f64]; N], out: &mut [f64]);
}

struct WideOnly<F>(PhantomData<F>);
struct WithRare<F>(PhantomData<F>);

impl<F: WideFunction<N>, const N: usize> WideLoop<N> for WideOnly<F> {
    type Formula = F;
    fn repair(_: f64, _: &[&[f64]; N], _: &mut [f64]) {}
}

impl<F: WideFunction<N>, const N: usize> WideLoop<N> for WithRare<F> {
    type Formula = F;
    fn repair(s: f64, ins: &[&[f64]; N], out: &mut [f64]) {
        if dispatch(HasNan(out)) {
            for (i, y) in out.iter_mut().enumerate().filter(|(_, y)| y.is_nan()) {
                *y = F::at_rare(s, ins.map(|x| x[i]));
            }
        }
    }
}

/// Elements that are computed at a time, so that operands and results stay in the nearest cache.
const WIDE_CHUNK: usize = 256;

fn wide_loop<L: WideLoop<N>, const N: usize>(s: f64, ins: &[&[f64]], out: &mut [f64]) {
    let ins: &[&[f64]; N] = pieces(ins);
    for (i, out) in out.chunks_mut(WIDE_CHUNK).enumerate() {
        let part = ins.map(|x| &x[i * WIDE_CHUNK..][..out.len()]);
        dispatch(WideKernel::<L::Formula, N>(s, &part, out, PhantomData));
        L::repair(s, &part, out);
    }
}

/// Converts chunks to f64 and the results back.
fn narrow_loop<L: WideLoop<N>, const N: usize>(s: f64, ins: &[&[f32]], out: &mut [f32]) {
    through_f64::<N>(s, pieces(ins), out, wide_loop::<L, N>);
}

fn through_f64<const N: usize>(s: f64, ins: &[&[f32]; N], out: &mut [f32], run: LoopFn<f64, f64>) {
    let mut wide = [[0.0f64; WIDE_CHUNK]; N];
    let mut results = [0.0f64; WIDE_CHUNK];
    for (i, out) in out.chunks_mut(WIDE_CHUNK).enumerate() {
        for (wide, x) in wide.iter_mut().zip(ins) {
            map_slice(&x[i * WIDE_CHUNK..][..out.len()], &mut wide[..out.len()], f64::from);
        }
        let parts: [&[f64]; N] = wide.each_ref().map(|x| &x[..out.len()]);
        run(s, &parts, &mut results[..out.len()]);
        map_slice(&results[..out.len()], out, |x: f64| x as f32);
    }
}

/// True if any element is NaN.
struct HasNan<'a>(&'a [f64]);

impl Kernel for HasNan<'_> {
    type Out = bool;
    #[inline(always)]
    fn run(self) -> bool {
        self.0.iter().fold(false, |found, y| found | y.is_nan())
    }
}

struct WideKernel<'a, F, const N: usize>(f64, &'a [&'a [f64]; N], &'a mut [f64], PhantomData<F>);

impl<F: WideFunction<N>, const N: usize> Kernel for WideKernel<'_, F, N> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let WideKernel(s, ins, out, _) = self;
        each_element(ins, out, WideFormula::<F>(s, PhantomData));
    }
}

/// A [`WideFunction`] with its constant.
struct WideFormula<F>(f64, PhantomData<F>);

impl<F: WideFunction<N>, const N: usize> ElementFn<f64, f64, N> for WideFormula<F> {
    #[inline(always)]
    fn at(&self, x: [f64; N]) -> f64 {
        F::at(self.0, x)
    }
}

fn num_loop<F: NumFunction<N>, A: Num, const N: usize>(s: f64, ins: &[&[A]], out: &mut [A]) {
    dispatch(NumLoop::<F, A, N>(s, pieces(ins), out, PhantomData));
}

/// Integer loops are compiled for the baseline only, since they are bound by memory.
fn integer_loop<F: NumFunction<N>, A: Num, const N: usize>(s: f64, ins: &[&[A]], out: &mut [A]) {
    NumLoop::<F, A, N>(s, pieces(ins), out, PhantomData).run();
}

fn relation_loop<R: Relation, A: Widen + PartialOrd>(_: f64, ins: &[&[A]], out: &mut [bool]) {
    dispatch(RelationLoop::<R, A>(pieces(ins), out, PhantomData));
}

fn plain_relation_loop<R: Relation, A: Widen + PartialOrd>(_: f64, ins: &[&[A]], out: &mut [bool]) {
    RelationLoop::<R, A>(pieces(ins), out, PhantomData).run();
}

/// Returns the slice of chunks as an array, by reference. A copied array would be read in wider words than it was
/// written in, for which the CPU waits until all earlier stores, those of results included, have reached the cache.
#[inline(always)]
fn pieces<'a, A, const N: usize>(ins: &'a [&'a [A]]) -> &'a [&'a [A]; N] {
    ins.try_into().expect("a function has as many operands as variables")
}

struct FloatLoop<'a, F, A, const N: usize>(f64, &'a [&'a [A]; N], &'a mut [A], PhantomData<F>);

impl<F: Function<N>, A: Real, const N: usize> Kernel for FloatLoop<'_, F, A, N> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let FloatLoop(s, ins, out, _) = self;
        each_element(ins, out, FloatFormula::<F>(s, PhantomData));
    }
}

struct NumLoop<'a, F, A, const N: usize>(f64, &'a [&'a [A]; N], &'a mut [A], PhantomData<F>);

impl<F: NumFunction<N>, A: Num, const N: usize> Kernel for NumLoop<'_, F, A, N> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let NumLoop(s, ins, out, _) = self;
        each_element(ins, out, NumFormula::<F>(s, PhantomData));
    }
}

/// A [`Function`] with its constant.
struct FloatFormula<F>(f64, PhantomData<F>);

impl<F: Function<N>, A: Real, const N: usize> ElementFn<A, A, N> for FloatFormula<F> {
    #[inline(always)]
    fn at(&self, x: [A; N]) -> A {
        F::at(self.0, x)
    }
}

/// A [`NumFunction`] with its constant.
struct NumFormula<F>(f64, PhantomData<F>);

impl<F: NumFunction<N>, A: Num, const N: usize> ElementFn<A, A, N> for NumFormula<F> {
    #[inline(always)]
    fn at(&self, x: [A; N]) -> A {
        F::at(self.0, x)
    }
}

/// A [`Relation`] as an element function.
struct RelationFormula<R>(PhantomData<R>);

impl<R: Relation, A: PartialOrd + Copy> ElementFn<A, bool, 2> for RelationFormula<R> {
    #[inline(always)]
    fn at(&self, [x, y]: [A; 2]) -> bool {
        R::at(x, y)
    }
}

struct RelationLoop<'a, R, A>(&'a [&'a [A]; 2], &'a mut [bool], PhantomData<R>);

impl<R: Relation, A: PartialOrd + Copy> Kernel for RelationLoop<'_, R, A> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let RelationLoop(ins, out, _) = self;
        each_element(ins, out, RelationFormula::<R>(PhantomData));
    }
}

/// A function of one element per operand, which is inlined into its loop.
trait ElementFn<A, O, const N: usize> {
    fn at(&self, x: [A; N]) -> O;
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

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::tensor::Shape;
    use crate::tensor::cpu::{Isa, cast, with_isa};

    struct Scale;
    impl Function<1> for Scale {
        #[inline(always)]
        fn at<A: Real>(_: f64, [x]: [A; 1]) -> A {
            x.mul_add(x.tanh(), x.exp() - x.erf())
        }
    }
    const SCALE: Loops = Loops::floats::<Scale, 1>();

    struct Less;
    impl NumFunction<2> for Less {
        #[inline(always)]
        fn at<A: Num>(_: f64, [x, y]: [A; 2]) -> A {
            x.sub(y)
        }
    }
    const SUB: Loops = Loops::numbers::<Less, 2>();

    struct Fused;
    impl Function<3> for Fused {
        #[inline(always)]
        fn at<A: Real>(_: f64, [x, y, z]: [A; 3]) -> A {
            x.mul_add(y, z)
        }
    }
    impl Function<2> for Fused {
        #[inline(always)]
        fn at<A: Real>(_: f64, [x, y]: [A; 2]) -> A {
            x / y
        }
    }
    impl Relation for Less {
        #[inline(always)]
        fn at<A: PartialOrd + Copy>(x: A, y: A) -> bool {
            x < y
        }
    }
    const FMA: Loops = Loops::floats::<Fused, 3>();
    const DIV: Loops = Loops::floats::<Fused, 2>();
    const LESS: RelationLoops = RelationLoops::of::<Less>();

    /// Computes into a new tensor.
    fn fresh<const N: usize>(verb: &str, loops: &Loops, ins: [&Tensor; N]) -> Result<Tensor> {
        // Further owners keep the operands from being overwritten.
        let others = ins.map(Tensor::clone);
        compute(verb, loops, 0.0, &mut others.clone())
    }

    fn noise(shape: impl Into<Shape>, seed: usize) -> Tensor {
        let shape = shape.into();
        let value = |i: usize| ((i * 7919 + seed * 131) % 1009) as f32 * 0.006 - 3.01;
        Tensor::from_vec((0..shape.numel()).map(value).collect(), shape).unwrap()
    }

    /// Returns views of shape `[3, 5, 70]` with different kinds of strides.
    fn views() -> Vec<Tensor> {
        let shape = [3, 5, 70];
        vec![
            noise(shape, 1),
            noise([70], 2).expand(shape).unwrap(),
            noise([3, 1, 1], 3).expand(shape).unwrap(),
            noise([], 4).expand(shape).unwrap(),
            noise([70, 5, 3], 5).permute(&[2, 1, 0]).unwrap(),
            noise([3, 9, 75], 6).narrow(1, 2, 5).unwrap().narrow(2, 3, 70).unwrap(),
            noise([5, 1], 7).expand(shape).unwrap(),
        ]
    }

    #[test]
    fn strides_and_broadcasts_change_nothing() {
        for a in views() {
            let flat = a.to_owned_copy().unwrap();
            let once = fresh("scale", &SCALE, [&a]).unwrap();
            assert!(once.is_contiguous());
            assert_eq!(once.to_f64_vec(), fresh("scale", &SCALE, [&flat]).unwrap().to_f64_vec());
            for b in views() {
                let got = fresh("sub", &SUB, [&a, &b]).unwrap().to_vec::<f32>().unwrap();
                let pairs = flat.to_vec::<f32>().unwrap().into_iter().zip(b.to_vec::<f32>().unwrap());
                assert_eq!(got, pairs.clone().map(|(a, b)| a - b).collect::<Vec<_>>());
                for c in views() {
                    let got = fresh("fma", &FMA, [&a, &b, &c]).unwrap().to_vec::<f32>().unwrap();
                    let c = c.to_vec::<f32>().unwrap();
                    assert_eq!(
                        got,
                        pairs.clone().zip(c).map(|((a, b), c)| a.mul_add(b, c)).collect::<Vec<_>>()
                    );
                }
            }
        }
    }

    #[test]
    fn in_place_equals_fresh_and_never_shows_in_a_clone() {
        let noises = [9, 10, 11].map(|seed| noise([3, 5, 70], seed));
        for b in views() {
            for own in 0..3 {
                let mut ins = [noises[0].clone(), noises[1].clone(), noises[2].clone()];
                ins[(own + 1) % 3] = b.clone();
                let want = fresh("fma", &FMA, [&ins[0], &ins[1], &ins[2]]).unwrap().to_f64_vec();
                ins[own] = noises[own].to_owned_copy().unwrap();
                let at = ins[own].data::<f32>().unwrap().as_ptr();
                let got = compute("fma", &FMA, 0.0, &mut ins).unwrap();
                assert_eq!((got.to_f64_vec(), got.data::<f32>().unwrap().as_ptr()), (want, at), "{own}");
            }
        }
        let before = noises.each_ref().map(Tensor::to_f64_vec);
        fresh("fma", &FMA, [&noises[0], &noises[1], &noises[2]]).unwrap();
        assert_eq!(noises.each_ref().map(Tensor::to_f64_vec), before);
        let half = cast(&noise([1000], 1), DType::BF16).unwrap();
        let want = fresh("scale", &SCALE, [&half]).unwrap().to_f64_vec();
        assert_eq!(compute("scale", &SCALE, 0.0, &mut [half]).unwrap().to_f64_vec(), want);
        let x = noise([7], 1);
        assert_eq!(compute("div", &DIV, 0.0, &mut [x.clone(), x]).unwrap().to_f64_vec(), [1.0; 7]);
    }

    #[test]
    fn a_selection_overwrites_an_unshared_operand() {
        let condition = compare("lt", &LESS, &noise([3, 5, 70], 1), &noise([3, 5, 70], 2)).unwrap();
        let bools = condition.to_vec::<bool>().unwrap();
        for (x, y) in views().into_iter().zip(views().into_iter().rev()) {
            let pairs = x.to_f64_vec().into_iter().zip(y.to_f64_vec());
            let want: Vec<f64> = pairs.zip(&bools).map(|((x, y), &c)| if c { x } else { y }).collect();
            for owned in [[false, false], [true, false], [false, true]] {
                let of = |t: &Tensor, owned| if owned { t.to_owned_copy().unwrap() } else { t.clone() };
                let (mut x, mut y) = (of(&x, owned[0]), of(&y, owned[1]));
                let (yes, no) = (select("where", [&mut condition.clone(), &mut x, &mut y], true), &want);
                assert_eq!(&yes.unwrap().to_f64_vec(), no, "{owned:?}");
            }
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let x = noise([1013], 1);
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let x = cast(&x, dtype).unwrap();
            let bits = |isa| {
                with_isa(isa, || {
                    let y = fresh("scale", &SCALE, [&x]).unwrap();
                    let z = fresh("div", &DIV, [&x, &y]).unwrap();
                    [y, z].map(|t| t.as_bytes().unwrap().to_vec())
                })
            };
            assert!(Isa::available().iter().all(|&isa| bits(isa) == bits(Isa::Baseline)), "{dtype}");
        }
    }

    #[test]
    fn halves_round_once_integers_wrap_bools_compare() {
        let x = cast(&noise([600], 1), DType::BF16).unwrap();
        let want: Vec<bf16> = x
            .to_vec::<bf16>()
            .unwrap()
            .iter()
            .map(|x| bf16::from_f32(Scale::at(0.0, [x.to_f32()])))
            .collect();
        assert_eq!(fresh("scale", &SCALE, [&x]).unwrap().to_vec::<bf16>().unwrap(), want);
        let ints = |v: [i32; 2]| Tensor::from_vec(v.to_vec(), [2]).unwrap();
        let difference = fresh("sub", &SUB, [&ints([i32::MIN, 5]), &ints([1, 7])]).unwrap();
        assert_eq!(difference.to_vec::<i32>().unwrap(), [i32::MAX, -2]);
        let less = compare("lt", &LESS, &ints([1, 7]), &ints([2, 7])).unwrap();
        assert_eq!(less.to_vec::<bool>().unwrap(), [true, false]);
        let picked =
            select("where", [&mut less.clone(), &mut ints([1, 2]), &mut ints([3, 4])], true).unwrap();
        assert_eq!(picked.to_vec::<i32>().unwrap(), [1, 4]);
        assert_eq!(compare("lt", &LESS, &less, &less).unwrap().to_vec::<bool>().unwrap(), [false; 2]);
    }

    #[test]
    fn refusals_and_empty() {
        let (f, b) = (noise([2], 1), Tensor::zeros(DType::Bool, [2]));
        let refused = fresh("sub", &SUB, [&f, &noise([3], 1)]).unwrap_err().to_string();
        assert_eq!(
            refused,
            "sub: the operands' dtypes or shapes differ; got f32[2], f32[3]; cast or expand them first"
        );
        assert_eq!(
            fresh("sub", &SUB, [&b, &b]).unwrap_err().to_string(),
            "sub: bool has no arithmetic; got bool[2]; cast it first"
        );
        assert!(fresh("scale", &SCALE, [&Tensor::zeros(DType::I64, [2])]).is_err());
        assert!(select("where", [&mut f.clone(), &mut f.clone(), &mut f.clone()], true).is_err());
        assert_eq!(fresh("scale", &SCALE, [&noise([0, 3], 1)]).unwrap().shape()[..], [0, 3]);
        assert_eq!(fresh("sub", &SUB, [&noise([], 1), &noise([], 1)]).unwrap().item().unwrap(), 0.0);
    }
}
