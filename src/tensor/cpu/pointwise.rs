//! Functions of one, two or three numbers, applied element by element.
//!
//! A function is written once, over [`Real`] or [`Num`]; [`Loops`] holds what is compiled of it: for f32 and f64 a loop per
//! instruction set (f16 and bf16 are converted to f32 in blocks that stay in cache), for integers one loop. All that
//! surrounds the loops, strides, buffers, in-place results, is shared by all functions ([`map`]).

use std::marker::PhantomData;

use half::{bf16, f16};
use smallvec::SmallVec;

use super::map::{OPERANDS, choose, map, map_over};
use super::real::{Num, Real, Widen};
use super::simd::{Kernel, dispatch};
use crate::error::{Error, Result};
use crate::tensor::{DType, Tensor, for_dtype};

/// A formula in `N` floating variables and a constant `s`. Implement `at` `#[inline(always)]`.
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

/// A formula in `N` variables, integers included, and a constant `s`.
pub trait NumFunction<const N: usize>: 'static {
    /// Its value.
    fn at<A: Num>(s: f64, x: [A; N]) -> A;
}

/// A relation of two numbers.
pub trait Relation: 'static {
    /// Returns true if it holds.
    fn at<A: PartialOrd + Copy>(x: A, y: A) -> bool;
}

/// A function's compiled loops.
#[derive(Clone, Copy)]
pub struct Loops {
    f32: Loop<f32, f32>,
    f64: Loop<f64, f64>,
    integers: Option<Integers>,
}

/// The loops of a relation.
#[derive(Clone, Copy)]
pub struct RelationLoops {
    f32: Loop<f32, bool>,
    f64: Loop<f64, bool>,
    i64: Loop<i64, bool>,
    i32: Loop<i32, bool>,
    u8: Loop<u8, bool>,
    bool: Loop<bool, bool>,
}

#[derive(Clone, Copy)]
struct Integers {
    i64: Loop<i64, i64>,
    i32: Loop<i32, i32>,
    u8: Loop<u8, u8>,
}

/// The constant, a piece of each operand, and the piece of the result to write.
type Loop<A, O> = fn(f64, &[&[A]], &mut [O]);

impl Loops {
    /// The loops of a function of floating numbers; other dtypes are refused.
    pub const fn floats<F: Function<N>, const N: usize>() -> Loops {
        Loops { f32: float_loop::<F, f32, N>, f64: float_loop::<F, f64, N>, integers: None }
    }

    /// The loops of a function of any numbers; bool is refused.
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
    /// The loops of a relation, for every dtype.
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

/// The function with constant `s` of operands of one dtype and shape: over the first operand that nobody else holds, whose
/// buffer is warm in the cache where a fresh one is not, else into a fresh tensor. Integers wrap.
///
/// # Errors
/// Refuses, in the name of `verb`, dtypes that the function is not for, and operands whose dtypes or shapes differ.
pub fn compute(verb: &str, loops: &Loops, s: f64, ins: &mut [Tensor]) -> Result<Tensor> {
    let (first, others) = ins.split_first().expect("a function has variables");
    expect_alike(verb, first, &others.iter().collect::<SmallVec<[&Tensor; OPERANDS]>>())?;
    let integers = || loops.integers.as_ref().ok_or_else(|| refuse(verb, loops, &ins[0]));
    match ins[0].dtype() {
        DType::F32 => typed::<f32>(loops.f32, s, ins),
        DType::F64 => typed::<f64>(loops.f64, s, ins),
        DType::F16 => typed::<f16>(loops.f32, s, ins),
        DType::BF16 => typed::<bf16>(loops.f32, s, ins),
        DType::I64 => typed::<i64>(integers()?.i64, s, ins),
        DType::I32 => typed::<i32>(integers()?.i32, s, ins),
        DType::U8 => typed::<u8>(integers()?.u8, s, ins),
        DType::Bool => Err(refuse(verb, loops, &ins[0])),
    }
}

/// Compares `x` with `y` element by element and returns bools; equal shapes, any dtype.
///
/// # Errors
/// Refuses operands whose dtypes or shapes differ.
pub fn compare(verb: &str, loops: &RelationLoops, x: &Tensor, y: &Tensor) -> Result<Tensor> {
    expect_alike(verb, x, &[y])?;
    match x.dtype() {
        DType::F32 => related::<f32>(loops.f32, x, y),
        DType::F64 => related::<f64>(loops.f64, x, y),
        DType::F16 => related::<f16>(loops.f32, x, y),
        DType::BF16 => related::<bf16>(loops.f32, x, y),
        DType::I64 => related::<i64>(loops.i64, x, y),
        DType::I32 => related::<i32>(loops.i32, x, y),
        DType::U8 => related::<u8>(loops.u8, x, y),
        DType::Bool => related::<bool>(loops.bool, x, y),
    }
}

/// Takes operands `(condition, yes, no)` of one shape and gives `yes` where the condition is `on`, else `no`: over a choice
/// that nobody else holds, else into a fresh tensor.
///
/// # Errors
/// Refuses a condition that is not bool, and operands whose dtypes or shapes differ.
pub fn select(verb: &str, mut ins: [&mut Tensor; 3], on: bool) -> Result<Tensor> {
    let [condition, yes, no] = &ins;
    condition.expect_dtype(verb, DType::Bool)?;
    if yes.dtype() != no.dtype() || condition.shape() != yes.shape() || yes.shape() != no.shape() {
        return Err(differ(verb, &ins.map(|x| &*x)));
    }
    let own = (1..3).find(|&k| ins[k].is_unique());
    for_dtype!(any ins[1].dtype(), T => choose::<T>(ins, on, own))
}

/// Refuses, in the name of `verb`, operands whose dtype or shape is not `x`'s.
pub fn expect_alike(verb: &str, x: &Tensor, others: &[&Tensor]) -> Result<()> {
    if others.iter().all(|y| y.dtype() == x.dtype() && y.shape() == x.shape()) {
        return Ok(());
    }
    Err(differ(verb, &[&[x], others].concat()))
}

/// Runs `$body` with `$T` standing for the Rust type of a dtype other than bool.
macro_rules! for_num {
    ($verb:expr, $x:expr, $T:ident => $body:expr) => {
        match $x.dtype() {
            DType::I64 => {
                type $T = i64;
                $body
            }
            DType::I32 => {
                type $T = i32;
                $body
            }
            DType::U8 => {
                type $T = u8;
                $body
            }
            DType::Bool => {
                Err(Error::invalid($verb, "bool has no arithmetic", $x.notation(), "cast it first"))
            }
            float => for_dtype!(float $verb, float, $T => $body),
        }
    };
}
pub(crate) use for_num;

fn typed<T: Widen>(run: Loop<T::Wide, T::Wide>, s: f64, ins: &mut [Tensor]) -> Result<Tensor> {
    let Some(own) = (0..ins.len()).find(|&k| ins[k].is_unique()) else {
        let mut operands: [&Tensor; OPERANDS] = [&ins[0]; OPERANDS];
        ins.iter().enumerate().for_each(|(k, x)| operands[k] = x);
        return map::<T, T>(&operands[..ins.len()], &|x, o| run(s, x, o));
    };
    map_over::<T>(ins, own, &|x, o| run(s, x, o))?;
    Ok(ins[own].clone())
}

fn related<T: Widen>(run: Loop<T::Wide, bool>, x: &Tensor, y: &Tensor) -> Result<Tensor> {
    map::<T, bool>(&[x, y], &|x, o| run(0.0, x, o))
}

fn refuse(verb: &str, loops: &Loops, x: &Tensor) -> Error {
    match loops.integers {
        Some(_) => Error::invalid(verb, "bool has no arithmetic", x.notation(), "cast it first"),
        None => x.dtype().expect_float(verb).expect_err("the floating dtypes have loops"),
    }
}

fn differ(verb: &str, operands: &[&Tensor]) -> Error {
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

fn num_loop<F: NumFunction<N>, A: Num, const N: usize>(s: f64, ins: &[&[A]], out: &mut [A]) {
    dispatch(NumLoop::<F, A, N>(s, pieces(ins), out, PhantomData));
}

/// Integers keep the baseline's instructions: one copy suffices for what memory bounds.
fn integer_loop<F: NumFunction<N>, A: Num, const N: usize>(s: f64, ins: &[&[A]], out: &mut [A]) {
    NumLoop::<F, A, N>(s, pieces(ins), out, PhantomData).run();
}

fn relation_loop<R: Relation, A: Widen + PartialOrd>(_: f64, ins: &[&[A]], out: &mut [bool]) {
    dispatch(RelationLoop::<R, A>(pieces(ins), out, PhantomData));
}

fn plain_relation_loop<R: Relation, A: Widen + PartialOrd>(_: f64, ins: &[&[A]], out: &mut [bool]) {
    RelationLoop::<R, A>(pieces(ins), out, PhantomData).run();
}

/// The pieces where they stand: copied, they would be read in wider words than they were just written in, for which the
/// processor waits until all earlier stores, the results among them, have reached the cache.
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
        each_element(ins, out, Formula::<F>(s, PhantomData));
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

/// A formula with its constant.
struct Formula<F>(f64, PhantomData<F>);

impl<F: Function<N>, A: Real, const N: usize> Each<A, A, N> for Formula<F> {
    #[inline(always)]
    fn at(&self, x: [A; N]) -> A {
        F::at(self.0, x)
    }
}

/// A formula of any numbers with its constant.
struct NumFormula<F>(f64, PhantomData<F>);

impl<F: NumFunction<N>, A: Num, const N: usize> Each<A, A, N> for NumFormula<F> {
    #[inline(always)]
    fn at(&self, x: [A; N]) -> A {
        F::at(self.0, x)
    }
}

/// A relation.
struct Related<R>(PhantomData<R>);

impl<R: Relation, A: PartialOrd + Copy> Each<A, bool, 2> for Related<R> {
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
        each_element(ins, out, Related::<R>(PhantomData));
    }
}

/// A function of one element of each piece, which is compiled into every loop over it.
trait Each<A, O, const N: usize> {
    fn at(&self, x: [A; N]) -> O;
}

/// `out[i] = f(ins[..][i])`, as iterators that check no index. A closure in place of `f` would be compiled by itself, without
/// the instructions that the loop around it may use.
#[inline(always)]
fn each_element<A: Copy, O, const N: usize>(ins: &[&[A]; N], out: &mut [O], f: impl Each<A, O, N>) {
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

    /// Into a fresh tensor.
    fn fresh<const N: usize>(verb: &str, loops: &Loops, ins: [&Tensor; N]) -> Result<Tensor> {
        // The operands' other owners.
        let others = ins.map(Tensor::clone);
        compute(verb, loops, 0.0, &mut others.clone())
    }

    fn noise(shape: impl Into<Shape>, seed: usize) -> Tensor {
        let shape = shape.into();
        let value = |i: usize| ((i * 7919 + seed * 131) % 1009) as f32 * 0.006 - 3.01;
        Tensor::from_vec((0..shape.numel()).map(value).collect(), shape).unwrap()
    }

    /// Views of shape `[3, 5, 70]` with all kinds of strides.
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
    fn a_choice_lies_over_an_operand_that_nobody_else_holds() {
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
