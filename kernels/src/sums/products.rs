//! Products of the elements of rows, and their derivatives.

use super::reducer::{JoinOperation, Reducer};
use super::tree::RowTree;
use crate::isa::simd::{Isa, Kernel, dispatch};
use crate::num::real::Num;

/// A number type whose rows are multiplied: f32, f64 or i64.
///
/// ```
/// use isoshard_kernels::sums::Products;
/// let (mut out, mut others) = ([0i64; 2], [0i64; 4]);
/// i64::products_of_rows(&[2, 3, 4, 5], 2, &mut out);
/// i64::products_of_others(&[1, 10], &[2, 3, 4, 5], 2, &mut others);
/// assert_eq!((out, others), ([6, 20], [3, 2, 50, 40]));
/// ```
pub trait Products: Num {
    /// Writes the product of each row of `n` elements, along the tree of its length.
    fn products_of_rows(rows: &[Self], n: usize, out: &mut [Self]);
    /// Writes, for each element of a row, its row's `dy` times the product of the other elements.
    fn products_of_others(dy: &[Self], rows: &[Self], n: usize, out: &mut [Self]);
}

macro_rules! products {
    ($($t:ty)*) => {$(
        impl Products for $t {
            fn products_of_rows(rows: &[$t], n: usize, out: &mut [$t]) {
                dispatch(ProductRows { rows, n, out });
            }

            fn products_of_others(dy: &[$t], rows: &[$t], n: usize, out: &mut [$t]) {
                others(dy, rows, n, out);
            }
        }
    )*};
}
products!(f32 f64 i64);

/// The product.
#[derive(Clone, Copy)]
struct ProductReducer;

impl<T: Num> Reducer<T> for ProductReducer {
    const OPERATION: JoinOperation = JoinOperation::Mul;
    const PAD: T = T::ONE;
    const EMPTY: T = T::ONE;
    #[inline(always)]
    fn join(a: T, b: T) -> T {
        a.mul(b)
    }
}

/// The loop over rows of `n` elements.
struct ProductRows<'a, T> {
    rows: &'a [T],
    n: usize,
    out: &'a mut [T],
}

impl<T: Num> Kernel for ProductRows<'_, T> {
    type Out = ();
    /// The tree has its own vectors.
    const WIDEST: Isa = Isa::Baseline;
    #[inline(always)]
    fn run(self) {
        RowTree::<T>::new(self.n).fold_rows::<ProductReducer>(self.rows, self.out);
    }
}

/// Writes each row's products of the other elements, times `dy`.
fn others<T: Num>(dy: &[T], rows: &[T], n: usize, out: &mut [T]) {
    if n == 0 {
        return;
    }
    for ((row, out), &dy) in rows.chunks_exact(n).zip(out.chunks_exact_mut(n)).zip(dy) {
        let mut before = T::ONE;
        for (o, &x) in out.iter_mut().zip(row) {
            *o = before;
            before = before.mul(x);
        }
        let mut after = dy;
        for (o, &x) in out.iter_mut().zip(row).rev() {
            *o = o.mul(after);
            after = after.mul(x);
        }
    }
}
