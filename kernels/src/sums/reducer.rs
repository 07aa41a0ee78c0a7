//! The operations that join two nodes of a tree.

use crate::num::real::Num;

/// An operation of a vector's lanes that a join can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JoinOperation {
    /// The sum.
    Add,
    /// The product.
    Mul,
    /// Another operation.
    Other,
}

/// The operation that joins two nodes of a tree.
pub trait Reducer<T>: Copy {
    /// The operation that `join` is for floats, if it is one that vectors have. Loops then use it instead of `join`.
    const OPERATION: JoinOperation = JoinOperation::Other;
    /// The identity: `join(a, PAD)` is `a`.
    const PAD: T;
    /// The result over no elements.
    const EMPTY: T;
    /// Joins two nodes. `join(a, b)` and `join(b, a)` have the same bits, except those of a NaN.
    fn join(a: T, b: T) -> T;
    /// Returns the result from the node of the whole range, which may be a single element that was never joined.
    #[inline(always)]
    fn finish(a: T) -> T {
        a
    }
}

/// The sum.
#[derive(Clone, Copy)]
pub struct SumReducer;

/// The sum of squares of f32, in f64: all of them are exact and in range.
#[derive(Clone, Copy)]
pub struct SquareSumReducer;

/// The maximum, [`Num::max`].
#[derive(Clone, Copy)]
pub struct MaxReducer;

/// The minimum, [`Num::min`].
#[derive(Clone, Copy)]
pub struct MinReducer;

impl<T: Num> Reducer<T> for SumReducer {
    const OPERATION: JoinOperation = JoinOperation::Add;
    const PAD: T = T::SUM_PAD;
    const EMPTY: T = T::ZERO;
    #[inline(always)]
    fn join(a: T, b: T) -> T {
        a.add(b)
    }
}

impl Reducer<f64> for SquareSumReducer {
    const OPERATION: JoinOperation = JoinOperation::Add;
    // No square is -0, so 0 is the identity.
    const PAD: f64 = 0.0;
    const EMPTY: f64 = 0.0;
    #[inline(always)]
    fn join(a: f64, b: f64) -> f64 {
        a + b
    }
}

impl<T: Num> Reducer<T> for MaxReducer {
    const PAD: T = T::LOWEST;
    const EMPTY: T = T::LOWEST;
    #[inline(always)]
    fn join(a: T, b: T) -> T {
        a.max(b)
    }
    /// Returns the canonical NaN for any NaN, as a join does.
    #[inline(always)]
    fn finish(a: T) -> T {
        a.max(Self::PAD)
    }
}

impl<T: Num> Reducer<T> for MinReducer {
    const PAD: T = T::HIGHEST;
    const EMPTY: T = T::HIGHEST;
    #[inline(always)]
    fn join(a: T, b: T) -> T {
        a.min(b)
    }
    #[inline(always)]
    fn finish(a: T) -> T {
        a.min(Self::PAD)
    }
}
