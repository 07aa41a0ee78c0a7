//! Elementwise arithmetic by dtype: an operator gives its formula once, over [`Real`] or [`Num`].

use super::map::{self, Map1, Map2, Map3};
use super::real::{Num, Real, select as pick};
use crate::error::{Error, Result};
use crate::tensor::{DType, Tensor, for_dtype};

/// A formula in one floating variable. Implement `apply` `#[inline(always)]`.
pub trait UnaryF: Copy {
    /// Its value.
    fn apply<A: Real>(self, x: A) -> A;
}

/// A formula in two floating variables.
pub trait BinaryF: Copy {
    /// Its value.
    fn apply<A: Real>(self, x: A, y: A) -> A;
}

/// A formula in three floating variables.
pub trait TernaryF: Copy {
    /// Its value.
    fn apply<A: Real>(self, x: A, y: A, z: A) -> A;
}

/// A formula in one variable, integers included.
pub trait UnaryN: Copy {
    /// Its value.
    fn apply<A: Num>(self, x: A) -> A;
}

/// A formula in two variables, integers included.
pub trait BinaryN: Copy {
    /// Its value.
    fn apply<A: Num>(self, x: A, y: A) -> A;
}

/// A comparison.
pub trait Compare: Copy {
    /// Its value.
    fn apply<A: PartialOrd + Copy>(self, x: A, y: A) -> bool;
}

/// `op(x)` for the floating dtypes; f16 and bf16 compute in f32 and round once.
///
/// # Errors
/// Refuses other dtypes, in the name of `verb`.
pub fn float_unary<U: UnaryF>(verb: &str, x: &Tensor, op: U) -> Result<Tensor> {
    for_dtype!(float verb, x.dtype(), T => map::map1_with::<T, T, _>(x, F(op)))
}

/// `op(x, y)` for equal shapes and floating dtypes, as [`float_unary`].
///
/// # Errors
/// Refuses other dtypes, and operands whose dtypes or shapes differ.
pub fn float_binary<U: BinaryF>(verb: &str, x: &Tensor, y: &Tensor, op: U) -> Result<Tensor> {
    expect_alike(verb, x, &[y])?;
    for_dtype!(float verb, x.dtype(), T => map::map2_with::<T, T, T, _>(x, y, F(op)))
}

/// `op(x, y, z)`, as [`float_binary`].
///
/// # Errors
/// As [`float_binary`].
pub fn float_ternary<U: TernaryF>(verb: &str, x: &Tensor, y: &Tensor, z: &Tensor, op: U) -> Result<Tensor> {
    expect_alike(verb, x, &[y, z])?;
    for_dtype!(float verb, x.dtype(), T => map::map3_with::<T, T, T, T, _>(x, y, z, F(op)))
}

/// `x = op(x)`, in place where nobody shares the buffer.
///
/// # Errors
/// As [`float_unary`].
pub fn float_unary_mut<U: UnaryF>(verb: &str, x: &mut Tensor, op: U) -> Result<()> {
    for_dtype!(float verb, x.dtype(), T => map::map1_mut_with::<T, _>(x, F(op)))
}

/// `x = op(x, y)`, in place where nobody shares the buffer.
///
/// # Errors
/// As [`float_binary`].
pub fn float_binary_mut<U: BinaryF>(verb: &str, x: &mut Tensor, y: &Tensor, op: U) -> Result<()> {
    expect_alike(verb, x, &[y])?;
    for_dtype!(float verb, x.dtype(), T => map::map2_mut_with::<T, T, _>(x, y, F(op)))
}

/// `x = op(x, y, z)`, in place where nobody shares the buffer.
///
/// # Errors
/// As [`float_binary`].
pub fn float_ternary_mut<U: TernaryF>(
    verb: &str,
    x: &mut Tensor,
    y: &Tensor,
    z: &Tensor,
    op: U,
) -> Result<()> {
    expect_alike(verb, x, &[y, z])?;
    for_dtype!(float verb, x.dtype(), T => map::map3_mut_with::<T, T, T, _>(x, y, z, F(op)))
}

/// `op(x)` for every dtype but bool; integers wrap.
///
/// # Errors
/// Refuses bool, in the name of `verb`.
pub fn num_unary<U: UnaryN>(verb: &str, x: &Tensor, op: U) -> Result<Tensor> {
    for_num!(verb, x, T => map::map1_with::<T, T, _>(x, N(op)))
}

/// `op(x, y)` for equal shapes and every dtype but bool; integers wrap.
///
/// # Errors
/// Refuses bool, and operands whose dtypes or shapes differ.
pub fn num_binary<U: BinaryN>(verb: &str, x: &Tensor, y: &Tensor, op: U) -> Result<Tensor> {
    expect_alike(verb, x, &[y])?;
    for_num!(verb, x, T => map::map2_with::<T, T, T, _>(x, y, N(op)))
}

/// `x = op(x, y)`, in place where nobody shares the buffer.
///
/// # Errors
/// As [`num_binary`].
pub fn num_binary_mut<U: BinaryN>(verb: &str, x: &mut Tensor, y: &Tensor, op: U) -> Result<()> {
    expect_alike(verb, x, &[y])?;
    for_num!(verb, x, T => map::map2_mut_with::<T, T, _>(x, y, N(op)))
}

/// `op(x, y)` as bool, for equal shapes and any dtype.
///
/// # Errors
/// Refuses operands whose dtypes or shapes differ.
pub fn compare<U: Compare>(verb: &str, x: &Tensor, y: &Tensor, op: U) -> Result<Tensor> {
    expect_alike(verb, x, &[y])?;
    for_dtype!(any x.dtype(), T => map::map2::<T, T, bool, _>(x, y, move |x, y| op.apply(x, y)))
}

/// `yes` where `condition` holds, else `no`: equal shapes, any dtype.
///
/// # Errors
/// Refuses a condition that is not bool, and operands whose dtypes or shapes differ.
pub fn select(verb: &str, condition: &Tensor, yes: &Tensor, no: &Tensor) -> Result<Tensor> {
    condition.expect_dtype(verb, DType::Bool)?;
    expect_alike(verb, yes, &[no])?;
    if condition.shape() != yes.shape() {
        return Err(differ(verb, &[condition, yes, no]));
    }
    for_dtype!(any yes.dtype(), T => map::map3::<bool, T, T, T, _>(condition, yes, no, pick))
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
                Err(Error::invalid($verb, "bool has no arithmetic", $x.to_string(), "cast it first"))
            }
            float => for_dtype!(float $verb, float, $T => $body),
        }
    };
}
pub(crate) use for_num;

fn differ(verb: &str, operands: &[&Tensor]) -> Error {
    let given: Vec<String> = operands.iter().map(|t| t.to_string()).collect();
    Error::invalid(
        verb,
        "the operands' dtypes or shapes differ",
        given.join(", "),
        "cast or expand them first",
    )
}

/// A floating formula as a map.
#[derive(Clone, Copy)]
struct F<U>(U);

impl<A: Real, U: UnaryF> Map1<A, A> for F<U> {
    #[inline(always)]
    fn at(self, a: A) -> A {
        self.0.apply(a)
    }
}

impl<A: Real, U: BinaryF> Map2<A, A, A> for F<U> {
    #[inline(always)]
    fn at(self, a: A, b: A) -> A {
        self.0.apply(a, b)
    }
}

impl<A: Real, U: TernaryF> Map3<A, A, A, A> for F<U> {
    #[inline(always)]
    fn at(self, a: A, b: A, c: A) -> A {
        self.0.apply(a, b, c)
    }
}

/// A formula over any numbers as a map.
#[derive(Clone, Copy)]
struct N<U>(U);

impl<A: Num, U: UnaryN> Map1<A, A> for N<U> {
    #[inline(always)]
    fn at(self, a: A) -> A {
        self.0.apply(a)
    }
}

impl<A: Num, U: BinaryN> Map2<A, A, A> for N<U> {
    #[inline(always)]
    fn at(self, a: A, b: A) -> A {
        self.0.apply(a, b)
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::tensor::Shape;
    use crate::tensor::cpu::{Isa, cast, with_isa};

    #[derive(Clone, Copy)]
    struct Scale;
    impl UnaryF for Scale {
        #[inline(always)]
        fn apply<A: Real>(self, x: A) -> A {
            x.mul_add(x.tanh(), x.exp() - x.erf())
        }
    }

    #[derive(Clone, Copy)]
    struct Less;
    impl BinaryN for Less {
        #[inline(always)]
        fn apply<A: Num>(self, x: A, y: A) -> A {
            x.sub(y)
        }
    }

    #[derive(Clone, Copy)]
    struct Fused;
    impl TernaryF for Fused {
        #[inline(always)]
        fn apply<A: Real>(self, x: A, y: A, z: A) -> A {
            x.mul_add(y, z)
        }
    }
    impl BinaryF for Fused {
        #[inline(always)]
        fn apply<A: Real>(self, x: A, y: A) -> A {
            x / y
        }
    }
    impl Compare for Less {
        #[inline(always)]
        fn apply<A: PartialOrd + Copy>(self, x: A, y: A) -> bool {
            x < y
        }
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
            let once = float_unary("scale", &a, Scale).unwrap();
            assert!(once.is_contiguous());
            assert_eq!(once.to_f64_vec(), float_unary("scale", &flat, Scale).unwrap().to_f64_vec());
            for b in views() {
                let got = num_binary("sub", &a, &b, Less).unwrap().to_vec::<f32>().unwrap();
                let pairs = flat.to_vec::<f32>().unwrap().into_iter().zip(b.to_vec::<f32>().unwrap());
                assert_eq!(got, pairs.clone().map(|(a, b)| a - b).collect::<Vec<_>>());
                for c in views() {
                    let got = float_ternary("fma", &a, &b, &c, Fused).unwrap().to_vec::<f32>().unwrap();
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
        for b in views() {
            let fresh = noise([3, 5, 70], 9);
            let want = num_binary("sub", &fresh, &b, Less).unwrap().to_f64_vec();
            let mut unique = fresh.to_owned_copy().unwrap();
            let at = unique.data::<f32>().unwrap().as_ptr();
            num_binary_mut("sub", &mut unique, &b, Less).unwrap();
            assert_eq!((unique.to_f64_vec(), unique.data::<f32>().unwrap().as_ptr()), (want.clone(), at));
            let mut shared = fresh.clone();
            num_binary_mut("sub", &mut shared, &b, Less).unwrap();
            assert_eq!((shared.to_f64_vec(), fresh.to_f64_vec()), (want, noise([3, 5, 70], 9).to_f64_vec()));
            let want = float_ternary("fma", &fresh, &b, &fresh, Fused).unwrap().to_f64_vec();
            let mut unique = fresh.to_owned_copy().unwrap();
            float_ternary_mut("fma", &mut unique, &b, &fresh, Fused).unwrap();
            assert_eq!(unique.to_f64_vec(), want);
        }
        let mut half = cast(&noise([1000], 1), DType::BF16).unwrap();
        let want = float_unary("scale", &half, Scale).unwrap().to_f64_vec();
        float_unary_mut("scale", &mut half, Scale).unwrap();
        assert_eq!(half.to_f64_vec(), want);
        let mut x = noise([7], 1);
        let y = x.clone();
        float_binary_mut("div", &mut x, &y, Fused).unwrap();
        assert_eq!(x.to_f64_vec(), [1.0; 7]);
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let x = noise([1013], 1);
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let x = cast(&x, dtype).unwrap();
            let bits = |isa| {
                with_isa(isa, || {
                    let y = float_unary("scale", &x, Scale).unwrap();
                    let z = float_binary("div", &x, &y, Fused).unwrap();
                    [y, z].map(|t| t.as_bytes().unwrap().to_vec())
                })
            };
            assert!(Isa::available().iter().all(|&isa| bits(isa) == bits(Isa::Baseline)), "{dtype}");
        }
    }

    #[test]
    fn halves_round_once_integers_wrap_bools_compare() {
        let x = cast(&noise([600], 1), DType::BF16).unwrap();
        let want: Vec<bf16> =
            x.to_vec::<bf16>().unwrap().iter().map(|x| bf16::from_f32(Scale.apply(x.to_f32()))).collect();
        assert_eq!(float_unary("scale", &x, Scale).unwrap().to_vec::<bf16>().unwrap(), want);
        let ints = |v: [i32; 2]| Tensor::from_vec(v.to_vec(), [2]).unwrap();
        let difference = num_binary("sub", &ints([i32::MIN, 5]), &ints([1, 7]), Less).unwrap();
        assert_eq!(difference.to_vec::<i32>().unwrap(), [i32::MAX, -2]);
        let less = compare("lt", &ints([1, 7]), &ints([2, 7]), Less).unwrap();
        assert_eq!(less.to_vec::<bool>().unwrap(), [true, false]);
        let picked = select("where", &less, &ints([1, 2]), &ints([3, 4])).unwrap();
        assert_eq!(picked.to_vec::<i32>().unwrap(), [1, 4]);
        assert_eq!(compare("lt", &less, &less, Less).unwrap().to_vec::<bool>().unwrap(), [false; 2]);
    }

    #[test]
    fn refusals_and_empty() {
        let (f, b) = (noise([2], 1), Tensor::zeros(DType::Bool, [2]));
        let refused = num_binary("sub", &f, &noise([3], 1), Less).unwrap_err().to_string();
        assert_eq!(
            refused,
            "sub: the operands' dtypes or shapes differ; got f32[2], f32[3]; cast or expand them first"
        );
        assert_eq!(
            num_binary("sub", &b, &b, Less).unwrap_err().to_string(),
            "sub: bool has no arithmetic; got bool[2]; cast it first"
        );
        assert!(float_unary("scale", &Tensor::zeros(DType::I64, [2]), Scale).is_err());
        assert!(select("where", &f, &f, &f).is_err());
        assert_eq!(float_unary("scale", &noise([0, 3], 1), Scale).unwrap().shape()[..], [0, 3]);
        assert_eq!(num_binary("sub", &noise([], 1), &noise([], 1), Less).unwrap().item().unwrap(), 0.0);
    }
}
