//! The terms that reductions of rows join: elements, or squares of elements.

use crate::element::Element;
use crate::num::real::Num;
use crate::sums::lanes::Lanes;

/// The terms that a reduction of `T` joins.
pub(crate) trait RowTerm<T: Num>: Copy {
    /// The type of the row's elements.
    type Element: Element;

    /// Returns the term of an element.
    fn of(x: Self::Element) -> T;

    /// Returns the terms of `N` elements.
    ///
    /// # Safety
    /// `x` points to `N` elements.
    unsafe fn whole<L: Lanes<N>, const N: usize>(lanes: L, x: *const Self::Element) -> [T; N];

    /// Returns the terms of the first `len` elements, followed by `pad`.
    ///
    /// # Safety
    /// `x` points to `len` elements, and `len` is at most `N`.
    unsafe fn first<L: Lanes<N>, const N: usize>(
        lanes: L,
        x: *const Self::Element,
        len: usize,
        pad: T,
    ) -> [T; N];
}

/// The elements themselves.
#[derive(Clone, Copy)]
pub(crate) struct Elements;

impl<T: Num + Element> RowTerm<T> for Elements {
    type Element = T;

    #[inline(always)]
    fn of(x: T) -> T {
        x
    }

    #[inline(always)]
    unsafe fn whole<L: Lanes<N>, const N: usize>(_: L, x: *const T) -> [T; N] {
        // SAFETY: the caller's promise.
        unsafe { x.cast::<[T; N]>().read() }
    }

    #[inline(always)]
    unsafe fn first<L: Lanes<N>, const N: usize>(lanes: L, x: *const T, len: usize, pad: T) -> [T; N] {
        // SAFETY: as above.
        unsafe { lanes.load_first(x, len, pad) }
    }
}

/// The squares of f32 in f64, which are exact.
#[derive(Clone, Copy)]
pub(crate) struct Squares;

impl RowTerm<f64> for Squares {
    type Element = f32;

    #[inline(always)]
    fn of(x: f32) -> f64 {
        f64::from(x) * f64::from(x)
    }

    #[inline(always)]
    unsafe fn whole<L: Lanes<N>, const N: usize>(lanes: L, x: *const f32) -> [f64; N] {
        // SAFETY: the caller's promise.
        unsafe { lanes.load_squares(x) }
    }

    #[inline(always)]
    unsafe fn first<L: Lanes<N>, const N: usize>(lanes: L, x: *const f32, len: usize, _: f64) -> [f64; N] {
        // SAFETY: as above. A square is never -0, so zeros are the padding of a sum.
        unsafe { lanes.load_first_squares(x, len) }
    }
}
