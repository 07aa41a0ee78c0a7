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
