//! The first index of the largest element of a row, or of a value.

use half::{bf16, f16};

use super::extremes::{fast_extreme, first_with};
use super::reducer::MaxReducer;
use crate::element::Element;
use crate::isa::simd::{Isa, Kernel, dispatch};
use crate::num::real::{Num, is_nan};

/// An element type of rows in which elements are looked for: all of them.
///
/// ```
/// use isoshard_kernels::sums::FirstIndices;
/// let mut out = [0; 2];
/// f32::first_largest(&[1.0, 5.0, 7.0, f32::NAN], 2, &mut out);
/// assert_eq!(out, [1, 1]);
/// f32::first_equal(&[1.0, 5.0, 7.0, 5.0], 2, &[5.0, 5.0], 10, &mut out);
/// assert_eq!(out, [11, 11]);
/// ```
pub trait FirstIndices: Element {
    /// Writes the index of the first largest element of each row of `n`, or of its first NaN.
    fn first_largest(rows: &[Self], n: usize, out: &mut [i64]);

    /// Writes `start` plus the first index at which each row of `n` equals its value, or [`i64::MAX`].
    fn first_equal(rows: &[Self], n: usize, value: &[Self], start: usize, out: &mut [i64]);
}

macro_rules! first_indices {
    ($largest:ident: $($t:ty)*) => {$(
        impl FirstIndices for $t {
            fn first_largest(rows: &[$t], n: usize, out: &mut [i64]) {
                $largest(rows, n, out);
            }

            fn first_equal(rows: &[$t], n: usize, value: &[$t], start: usize, out: &mut [i64]) {
                dispatch(FirstEqual { rows, n, value, start, out });
            }
        }
    )*};
}
first_indices!(largest_by_blocks: f32 f64 i64 i32);
first_indices!(largest_one_by_one: f16 bf16 u8 bool);

fn largest_by_blocks<T: Num>(rows: &[T], n: usize, out: &mut [i64]) {
    dispatch(FirstLargest { rows, n, out });
}

fn largest_one_by_one<T: PartialOrd + Copy>(rows: &[T], n: usize, out: &mut [i64]) {
    for (row, out) in rows.chunks_exact(n).zip(out) {
        *out = first_largest(row) as i64;
    }
}

/// The number of elements whose largest is computed before it is looked for.
const BLOCK: usize = 2048;

/// The loop over rows of `n` elements, for types whose comparison is an instruction.
struct FirstLargest<'a, T> {
    rows: &'a [T],
    n: usize,
    out: &'a mut [i64],
}

impl<T: Num> Kernel for FirstLargest<'_, T> {
    type Out = ();
    const WIDEST: Isa = Isa::Avx2;
    #[inline(always)]
    fn run(self) {
        for (row, out) in self.rows.chunks_exact(self.n).zip(self.out) {
            *out = first_largest_by_blocks(row) as i64;
        }
    }
}

/// Returns what [`first_largest`] does. It finds the block first, so that the loops vectorise.
#[inline(always)]
fn first_largest_by_blocks<T: Num>(row: &[T]) -> usize {
    let (isa, mut best, mut start) = (Isa::current(), T::LOWEST, 0);
    for (i, block) in row.chunks(BLOCK).enumerate() {
        let Some(largest) = fast_extreme::<T, MaxReducer>(isa, block) else {
            return i * BLOCK + first_with(block, is_nan).expect("a NaN in the block");
        };
        if largest > best {
            (best, start) = (largest, i * BLOCK);
        }
    }
    let block = &row[start..][..BLOCK.min(row.len() - start)];
    start + first_with(block, |x| x == best).expect("the largest in its block")
}

/// Returns the index of the first largest element, or of the first NaN.
fn first_largest<T: PartialOrd + Copy>(row: &[T]) -> usize {
    let mut best = 0;
    for (i, &x) in row.iter().enumerate() {
        if is_nan(row[best]) {
            return best;
        }
        if x > row[best] || is_nan(x) {
            best = i;
        }
    }
    best
}

/// The loop over rows of `n` elements that looks for a value in each.
struct FirstEqual<'a, T> {
    rows: &'a [T],
    n: usize,
    value: &'a [T],
    start: usize,
    out: &'a mut [i64],
}

impl<T: PartialEq + Copy> Kernel for FirstEqual<'_, T> {
    type Out = ();
    const WIDEST: Isa = Isa::Avx2;
    #[inline(always)]
    fn run(self) {
        for (r, (out, &v)) in self.out.iter_mut().zip(self.value).enumerate() {
            let row = &self.rows[r * self.n..][..self.n];
            let found = if is_nan(v) { first_with(row, is_nan) } else { first_with(row, |x| x == v) };
            *out = found.map_or(i64::MAX, |i| (self.start + i) as i64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::simd::with_isa;

    #[test]
    fn blocks_find_the_same_index() {
        fn check<T: Num>(of: impl Fn(usize) -> T) {
            for n in (1..130).chain([BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5]) {
                let rows: Vec<T> = (0..3 * n).map(&of).collect();
                let want: Vec<i64> = rows.chunks(n).map(|row| first_largest(row) as i64).collect();
                for &isa in Isa::available() {
                    let mut out = [0; 3];
                    with_isa(isa, || dispatch(FirstLargest { rows: &rows, n, out: &mut out }));
                    assert_eq!(out[..], want, "{n} {isa:?}");
                }
            }
        }
        check(|i| (i * 7919 % 1009) as f32);
        check(|i| -((i * 7919 % 11) as f64));
        check(|i| if i % 5000 == 4999 { f32::NAN } else { i as f32 });
        check(|i| if i % 3 == 0 { -0.0f32 } else { 0.0 });
        check(|_| f32::NEG_INFINITY);
        check(|_| i64::MIN);
        check(|i| -(i as i32) / 40);
    }
}
