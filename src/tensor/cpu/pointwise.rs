//! Functions of one, two or three numbers, applied element by element.
//!
//! A function is written once, for any [`Real`](super::Real), [`Num`](super::Num) or [`BitNum`](super::BitNum).
//! [`Loops`] holds its compiled loops: for f32 and f64 one per instruction set (f16 and bf16 are converted to f32 in
//! chunks that stay in cache), for integers one. All functions share the code around the loops, which handles strides,
//! buffers and in-place results ([`map`]).

use half::{bf16, f16};

use isoshard_kernels::loops::LoopFn;

use super::map::{MAX_OPERANDS, map, map_cheap, map_in_place, select_as};
use super::{Constants, FloatPredicateLoops, Loops, RelationLoops, Widen};
use crate::error::{Error, Result};
use crate::tensor::{DType, Tensor, for_dtype};

/// Returns the function, with constants `s`, of operands with one dtype and shape. Integers wrap.
///
/// The result overwrites the first operand whose buffer no other tensor shares, since that buffer is likely to be in
/// the cache. If there is none the result is a new tensor. [`Function`](super::Function) has an example.
///
/// # Errors
/// Returns an error that names `verb` if the function does not support the dtype, or if the operands' dtypes or shapes
/// differ.
pub fn compute(verb: &str, loops: &Loops, s: Constants, ins: &mut [Tensor]) -> Result<Tensor> {
    let (first, others) = ins.split_first().expect("a function has variables");
    if !others.iter().all(|y| is_like(first, y)) {
        return Err(mismatch(verb, &ins.iter().collect::<Vec<_>>()));
    }
    let refused = || unsupported_dtype(verb, loops, &ins[0]);
    let (floats, integers) = (|| loops.floats.ok_or_else(refused), || loops.integers.ok_or_else(refused));
    // A function of integers, too, is arithmetic of few operations.
    let cheap = loops.integers.is_some();
    match ins[0].dtype() {
        DType::F32 => compute_as::<f32>(floats()?.f32, s, ins, cheap),
        DType::F64 => compute_as::<f64>(floats()?.f64, s, ins, cheap),
        DType::F16 => compute_as::<f16>(floats()?.half, s, ins, cheap),
        DType::BF16 => compute_as::<bf16>(floats()?.half, s, ins, cheap),
        DType::I64 => compute_as::<i64>(integers()?.i64, s, ins, cheap),
        DType::I32 => compute_as::<i32>(integers()?.i32, s, ins, cheap),
        DType::U8 => compute_as::<u8>(integers()?.u8, s, ins, cheap),
        DType::Bool => compute_as::<bool>(loops.bools.ok_or_else(refused)?, s, ins, cheap),
    }
}

/// Compares `x` with `y`, of one shape and of any one dtype, element by element. The result has dtype bool.
/// [`Relation`](super::Relation) has an example.
///
/// # Errors
/// Returns an error that names `verb` if the operands' dtypes or shapes differ.
pub(crate) fn compare(verb: &str, loops: &RelationLoops, x: &Tensor, y: &Tensor) -> Result<Tensor> {
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

/// Tests each element of `x`, of a floating-point dtype. The result has dtype bool.
/// [`FloatPredicate`](super::FloatPredicate) has an example.
///
/// # Errors
/// Returns an error that names `verb` if the dtype is not floating-point.
pub(crate) fn test(verb: &str, loops: &FloatPredicateLoops, x: &Tensor) -> Result<Tensor> {
    let of = |run: LoopFn<f32, bool>| move |x: &[&[f32]], o: &mut [bool]| run([0.0; 2], x, o);
    match x.dtype() {
        DType::F32 => map::<f32, bool>(&[x], &of(loops.f32)),
        DType::F64 => map::<f64, bool>(&[x], &|x, o| (loops.f64)([0.0; 2], x, o)),
        DType::F16 => map::<f16, bool>(&[x], &of(loops.f32)),
        DType::BF16 => map::<bf16, bool>(&[x], &of(loops.f32)),
        DType::I64 | DType::I32 | DType::U8 | DType::Bool => {
            Err(x.dtype().expect_float(verb).expect_err("a dtype that is not floating-point").into())
        }
    }
}

/// Takes operands `(condition, yes, no)` of one shape and returns, for each element, `yes` if the condition is `on`,
/// else `no`. The result overwrites `yes` or `no` if no other tensor shares its buffer, else it is a new tensor.
///
/// # Errors
/// Returns an error that names `verb` if the condition is not bool, or if the operands' shapes or the choices' dtypes
/// differ.
pub(crate) fn select(verb: &str, mut ins: [&mut Tensor; 3], on: bool) -> Result<Tensor> {
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
/// # Errors
/// Returns an error that names `verb` if a dtype or shape differs.
pub(crate) fn expect_matching(verb: &str, x: &Tensor, others: &[&Tensor]) -> Result<()> {
    if others.iter().all(|y| is_like(x, y)) {
        return Ok(());
    }
    Err(mismatch(verb, &[&[x], others].concat()))
}

/// Returns true if the tensors have one dtype and shape.
#[inline]
fn is_like(x: &Tensor, y: &Tensor) -> bool {
    y.dtype() == x.dtype() && y.shape() == x.shape()
}

/// [`compute`] for operands of element type `T`.
fn compute_as<T: Widen>(
    run: LoopFn<T::Wide, T::Wide>,
    s: Constants,
    ins: &mut [Tensor],
    cheap: bool,
) -> Result<Tensor> {
    let Some(own) = (0..ins.len()).find(|&k| ins[k].is_unique()) else {
        let mut operands: [&Tensor; MAX_OPERANDS] = [&ins[0]; MAX_OPERANDS];
        ins.iter().enumerate().for_each(|(k, x)| operands[k] = x);
        let map = if cheap { map_cheap::<T, T> } else { map::<T, T> };
        return map(&operands[..ins.len()], &|x, o| run(s, x, o));
    };
    map_in_place::<T>(ins, own, &|x, o| run(s, x, o))?;
    Ok(ins[own].clone())
}

/// [`compare`] for operands of element type `T`.
fn compare_as<T: Widen>(run: LoopFn<T::Wide, bool>, x: &Tensor, y: &Tensor) -> Result<Tensor> {
    map::<T, bool>(&[x, y], &|x, o| run([0.0; 2], x, o))
}

/// Returns the error for a dtype that the function does not support.
fn unsupported_dtype(verb: &str, loops: &Loops, x: &Tensor) -> Error {
    let (rule, remedy) = match (loops.floats, loops.integers) {
        (Some(_), None) => {
            return x.dtype().expect_float(verb).expect_err("the floating dtypes have loops").into();
        }
        (None, _) if x.dtype().is_float() => ("floats have no bits to work on", "cast it first"),
        _ => ("bool has no arithmetic", "cast it first"),
    };
    Error::invalid(verb, rule, x.notation(), remedy)
}

/// Returns the error for operands whose dtypes or shapes differ.
#[cold]
fn mismatch(verb: &str, operands: &[&Tensor]) -> Error {
    let given: Vec<String> = operands.iter().map(|t| t.notation()).collect();
    Error::invalid(
        verb,
        "the operands' dtypes or shapes differ",
        given.join(", "),
        "cast or expand them first",
    )
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::tensor::Shape;
    use crate::tensor::cpu::{Function, Isa, Num, NumFunction, Real, Relation, cast, with_isa};

    struct Scale;
    impl Function<1> for Scale {
        #[inline(always)]
        fn at<A: Real>(_: Constants, [x]: [A; 1]) -> A {
            x.mul_add(x.tanh(), x.exp() - x.erf())
        }
    }
    const SCALE: Loops = Loops::floats::<Scale, 1>();

    struct Less;
    impl NumFunction<2> for Less {
        #[inline(always)]
        fn at<A: Num>(_: Constants, [x, y]: [A; 2]) -> A {
            x.sub(y)
        }
    }
    const SUB: Loops = Loops::numbers::<Less, 2>();

    struct Fused;
    impl Function<3> for Fused {
        #[inline(always)]
        fn at<A: Real>(_: Constants, [x, y, z]: [A; 3]) -> A {
            x.mul_add(y, z)
        }
    }
    impl Function<2> for Fused {
        #[inline(always)]
        fn at<A: Real>(_: Constants, [x, y]: [A; 2]) -> A {
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
        compute(verb, loops, [0.0; 2], &mut others.clone())
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
                let got = compute("fma", &FMA, [0.0; 2], &mut ins).unwrap();
                assert_eq!((got.to_f64_vec(), got.data::<f32>().unwrap().as_ptr()), (want, at), "{own}");
            }
        }
        let before = noises.each_ref().map(Tensor::to_f64_vec);
        fresh("fma", &FMA, [&noises[0], &noises[1], &noises[2]]).unwrap();
        assert_eq!(noises.each_ref().map(Tensor::to_f64_vec), before);
        let half = cast(&noise([1000], 1), DType::BF16).unwrap();
        let want = fresh("scale", &SCALE, [&half]).unwrap().to_f64_vec();
        assert_eq!(compute("scale", &SCALE, [0.0; 2], &mut [half]).unwrap().to_f64_vec(), want);
        let x = noise([7], 1);
        assert_eq!(compute("div", &DIV, [0.0; 2], &mut [x.clone(), x]).unwrap().to_f64_vec(), [1.0; 7]);
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
            .map(|x| bf16::from_f32(Scale::at([0.0; 2], [x.to_f32()])))
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
