//! Derivatives written as arithmetic: `dz * y` on two values of a [`Vjp`] adds a step. Each row of the table is a
//! method of [`GradientExpr`] as well.

use std::cell::{Cell, RefCell};
use std::ops::{Add, Div, Mul, Neg, Sub};

use super::compare::{Compare, CompareKind};
use super::mask::Mask;
use super::record::Pointwise;
use super::zero_grad::ZeroGrad;
use crate::error::{Error, Result};
use crate::ops::{Op, Vjp, VjpValue};

/// A derivative being written as expressions. Returns its values, and keeps the first error until
/// [`GradientWriter::finish`].
pub(crate) struct GradientWriter<'v, 'a> {
    vjp: RefCell<&'v mut Vjp<'a>>,
    refused: Cell<Option<Error>>,
}

/// A value of the derivative. Arithmetic with other values or with numbers adds steps; an equal step is added only
/// once.
#[derive(Clone, Copy)]
pub(crate) struct GradientExpr<'t> {
    program: &'t dyn StepWriter,
    value: VjpValue,
}

/// A program that steps can be added to.
trait StepWriter {
    fn step(&self, op: &dyn Op, ins: &[VjpValue]) -> VjpValue;
    fn refuse(&self, why: &'static str);
}

impl<'v, 'a> GradientWriter<'v, 'a> {
    pub fn new(vjp: &'v mut Vjp<'a>) -> GradientWriter<'v, 'a> {
        GradientWriter { vjp: RefCell::new(vjp), refused: Cell::new(None) }
    }

    /// Returns the operands.
    pub fn operands<const N: usize>(&self) -> [GradientExpr<'_>; N] {
        std::array::from_fn(|i| self.term(self.vjp.borrow().input(i)))
    }

    /// Returns the incoming gradient of the result.
    pub fn grad(&self) -> GradientExpr<'_> {
        self.term(self.vjp.borrow().grad(0))
    }

    /// Returns the result.
    pub fn output(&self) -> GradientExpr<'_> {
        self.term(self.vjp.borrow().output(0))
    }

    /// Returns true if the gradient of this operand is wanted.
    pub fn needs(&self, operand: GradientExpr<'_>) -> bool {
        self.vjp.borrow().needs(operand.value.index())
    }

    /// Sets the gradient of an operand.
    pub fn set(&self, operand: GradientExpr<'_>, gradient: GradientExpr<'_>) {
        let refused = self.refused.take();
        if refused.is_none() {
            self.vjp.borrow_mut().set(operand.value.index(), gradient.value);
        }
        self.refused.set(refused);
    }

    /// States why an operand has no gradient.
    pub fn none(&self, operand: GradientExpr<'_>, why: &'static str) {
        self.vjp.borrow_mut().none(operand.value.index(), why);
    }

    /// Returns the error of the first step that was refused, if any.
    pub fn finish(self) -> Result<()> {
        self.refused.into_inner().map_or(Ok(()), Err)
    }

    fn term(&self, value: VjpValue) -> GradientExpr<'_> {
        GradientExpr { program: self, value }
    }
}

impl StepWriter for GradientWriter<'_, '_> {
    fn step(&self, op: &dyn Op, ins: &[VjpValue]) -> VjpValue {
        let taken = self.vjp.borrow_mut().apply_once(op, ins);
        taken.unwrap_or_else(|e| {
            self.refused.set(Some(self.refused.take().unwrap_or(e)));
            ins[0]
        })
    }

    fn refuse(&self, why: &'static str) {
        let refused = self.refused.take();
        self.refused.set(refused.or(self.vjp.borrow_mut().refuse(why).err()));
    }
}

impl<'t> GradientExpr<'t> {
    /// Adds a step of a pointwise operator with this value as first operand, and returns its result.
    pub fn then(self, op: impl Pointwise, others: &[GradientExpr<'t>]) -> GradientExpr<'t> {
        self.step(&op, others)
    }

    fn step(self, op: &dyn Op, others: &[GradientExpr<'t>]) -> GradientExpr<'t> {
        let ins: smallvec::SmallVec<[VjpValue; 3]> =
            std::iter::once(self.value).chain(others.iter().map(|t| t.value)).collect();
        GradientExpr { program: self.program, value: self.program.step(op, &ins) }
    }

    /// Returns `self ≥ other`, as bool.
    pub fn ge(self, other: GradientExpr<'t>) -> GradientExpr<'t> {
        self.then(Compare { kind: CompareKind::Ge }, &[other])
    }

    /// Returns `self > other`, as bool.
    pub fn gt(self, other: GradientExpr<'t>) -> GradientExpr<'t> {
        self.then(Compare { kind: CompareKind::Gt }, &[other])
    }

    /// Returns `self < other`, as bool.
    pub fn lt(self, other: GradientExpr<'t>) -> GradientExpr<'t> {
        self.then(Compare { kind: CompareKind::Lt }, &[other])
    }

    /// Returns `self == other`, as bool.
    pub fn equals(self, other: GradientExpr<'t>) -> GradientExpr<'t> {
        self.then(Compare { kind: CompareKind::Eq }, &[other])
    }

    /// Returns zeros of this value's shape and layout.
    pub fn zero(self) -> GradientExpr<'t> {
        self.then(ZeroGrad, &[])
    }

    /// Refuses the derivative, and says why. Returns this value, which is not used.
    pub fn refuse(self, why: &'static str) -> GradientExpr<'t> {
        self.program.refuse(why);
        self
    }

    /// Returns `self ≤ other`, as bool.
    pub fn le(self, other: GradientExpr<'t>) -> GradientExpr<'t> {
        self.then(Compare { kind: CompareKind::Le }, &[other])
    }

    /// Returns the elements of `of` at which this condition equals `on`, and 0 elsewhere.
    pub fn mask(self, on: bool, of: GradientExpr<'t>) -> GradientExpr<'t> {
        self.then(Mask { on }, &[of])
    }
}

macro_rules! arithmetic {
    ($($Trait:ident $method:ident;)*) => {$(
        impl $Trait for GradientExpr<'_> {
            type Output = Self;
            fn $method(self, other: Self) -> Self {
                GradientExpr::$method(self, other)
            }
        }
    )*};
}
arithmetic! { Add add; Sub sub; Mul mul; Div div; }

impl Neg for GradientExpr<'_> {
    type Output = Self;
    fn neg(self) -> Self {
        GradientExpr::neg(self)
    }
}

/// Multiplies by a constant.
impl Mul<f64> for GradientExpr<'_> {
    type Output = Self;
    fn mul(self, factor: f64) -> Self {
        self.mul_scalar(factor)
    }
}

/// Adds a constant.
impl Add<f64> for GradientExpr<'_> {
    type Output = Self;
    fn add(self, by: f64) -> Self {
        self.add_scalar(by)
    }
}
