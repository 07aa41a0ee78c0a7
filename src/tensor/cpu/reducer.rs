//! The operations that join two nodes of a tree.

use super::real::Num;

/// The operation that joins two nodes of a tree.
pub trait Reducer<T>: Copy {
    /// The identity on the right: `join(a, PAD)` is `a`.
    const PAD: T;
    /// The result over no elements.
    const EMPTY: T;
    /// Joins two nodes; `a` has the lower indices.
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

/// The maximum, [`Num::max`].
#[derive(Clone, Copy)]
pub struct MaxReducer;

/// The minimum, [`Num::min`].
#[derive(Clone, Copy)]
pub struct MinReducer;

impl<T: Num> Reducer<T> for SumReducer {
    const PAD: T = T::SUM_PAD;
    const EMPTY: T = T::ZERO;
    #[inline(always)]
    fn join(a: T, b: T) -> T {
        a.add(b)
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
