//! Products of many matrices, and linear maps: closed functions for each element type.

use half::{bf16, f16};

use super::epilogue::{LinearEpilogue, MapEpilogue, RoundingEpilogue};
use super::matrix::MatRef;
use super::product::{Gemm, multiply};
use super::tiles::stored::Stored;
use super::tiles::tile::Added;
use crate::element::Element;
use crate::loops::formulas::LoopFn;
use crate::num::real::Num;
use crate::threads::parts::RowsMut;
use crate::threads::team::{allowed, for_each_part};

/// A stack of matrices over a slice: the elements from the first one on, and the distances from matrix to matrix, from row to
/// row and from column to column.
#[derive(Clone, Copy, Debug)]
pub struct Stack<'a, T> {
    /// The elements; each of them lies inside.
    pub data: &'a [T],
    /// The distances, in elements.
    pub strides: [usize; 3],
}

/// An element type of products: f32, f64, f16 or bf16. f16 and bf16 compute in f32, and each result is rounded once.
pub trait Product: Element {
    /// Sets `c = a @ b` for `a` of shape `[batch, m, k]`, `b` of shape `[batch, k, n]` and a contiguous `c`; `shape` is
    /// `[batch, m, k, n]`. The sums follow the tree over `extents`, whose product is `k`.
    ///
    /// If `b` is repeated along the batch (stride 0, or a batch of 1) and the batch of `a` can be merged with its rows, one product is
    /// computed.
    ///
    /// ```
    /// use isoshard_kernels::{Product, Stack};
    /// let (a, b, mut c) = ([1.0f32, 2.0, 3.0, 4.0], [1.0f32, 1.0, 0.0, 1.0], [0.0; 4]);
    /// let strides = [4, 2, 1];
    /// f32::products([1, 2, 2, 2], Stack { data: &a, strides }, Stack { data: &b, strides }, &[2], &mut c);
    /// assert_eq!(c, [1.0, 3.0, 3.0, 7.0]);
    /// ```
    ///
    /// # Panics
    /// Panics if an element lies outside its slice, or if `c` has another length than the results.
    fn products(shape: [usize; 4], a: Stack<'_, Self>, b: Stack<'_, Self>, extents: &[usize], c: &mut [Self]);

    /// Sets `y = f(z)` and `z = x w + bias` for `x` of shape `[m, k]`, `w` of shape `[k, n]` and a bias of `n` elements. The results
    /// are contiguous. Without `f`, `y` is `z`. The function reads `z` before it is rounded.
    ///
    /// f32 and f64 take no function: theirs reads `z` afterwards.
    ///
    /// # Panics
    /// Panics if the shapes do not fit each other, or if there is a function for f32 or f64.
    fn linear(
        x: MatRef<'_, Self>,
        w: MatRef<'_, Self>,
        bias: Option<&[Self]>,
        y: &mut [Self],
        f: Option<(LoopFn<f32, f32>, &mut [Self])>,
    );
}

macro_rules! products {
    ($linear:ident: $($t:ty)*) => {$(
        impl Product for $t {
            fn products(
                shape: [usize; 4],
                a: Stack<'_, $t>,
                b: Stack<'_, $t>,
                extents: &[usize],
                c: &mut [$t],
            ) {
                batched(shape, a, b, extents, c);
            }

            fn linear(
                x: MatRef<'_, $t>,
                w: MatRef<'_, $t>,
                bias: Option<&[$t]>,
                y: &mut [$t],
                f: Option<(LoopFn<f32, f32>, &mut [$t])>,
            ) {
                let ((m, k), (wk, n)) = (x.shape(), w.shape());
                let fits = k == wk && y.len() == m * n && bias.is_none_or(|bias| bias.len() == n);
                assert!(fits && f.as_ref().is_none_or(|(_, z)| z.len() == y.len()), "{m} {k}, {wk} {n}");
                $linear(x, w, bias, y, f);
            }
        }
    )*};
}
products!(linear_wide: f32 f64);
products!(linear_half: f16 bf16);

/// About the speed of a thread.
const MULTIPLICATIONS_PER_NANO: usize = 30;

fn batched<E: Stored<Wide: Gemm>>(
    [batch, m, k, n]: [usize; 4],
    a: Stack<'_, E>,
    b: Stack<'_, E>,
    extents: &[usize],
    c: &mut [E],
) {
    assert_eq!(c.len(), batch * m * n, "the result has the products' elements");
    if c.is_empty() {
        return;
    }
    let ([a_step, a_row, a_col], [b_step, b_row, b_col]) = (a.strides, b.strides);
    let shared_b = batch == 1 || b_step == 0;
    let batch_extends_rows = batch == 1 || m == 1 || a_step == m * a_row;
    let rows = if m == 1 && batch > 1 { a_step } else { a_row };
    let (products, m) = if shared_b && batch_extends_rows { (1, batch * m) } else { (batch, m) };
    let row_step = if products == 1 { rows } else { a_row };
    let product = |(i, c): (usize, &mut [E])| {
        let a = MatRef::new(from(a.data, i * a_step), (m, k), (row_step, a_col)).expect("the stack's matrix");
        let b = MatRef::new(from(b.data, i * b_step), (k, n), (b_row, b_col)).expect("the stack's matrix");
        let c = c.as_mut_ptr();
        // SAFETY: both epilogues store to this chunk, which is borrowed exclusively and has the product's shape; if `E`
        // is its own wide type, the pointers' types are the same.
        unsafe {
            if E::NATIVE {
                multiply(a, b, extents, (n, 1), |strides, _| LinearEpilogue {
                    c: c.cast::<E::Wide>(),
                    strides,
                    alpha: E::Wide::ONE,
                    added: None,
                });
            } else {
                multiply(a, b, extents, (n, 1), |strides, _| RoundingEpilogue { c, strides });
            }
        }
    };
    // Few large products are cut into parts one after the other, many are computed side by side.
    let (each, all) = ((m * k).saturating_mul(n) / MULTIPLICATIONS_PER_NANO, RowsMut { data: c, len: m * n });
    if products < allowed() {
        all.data.chunks_exact_mut(m * n).enumerate().for_each(product);
    } else {
        for_each_part(products, each.saturating_mul(products), all, |at, c| {
            at.zip(c.data.chunks_exact_mut(m * n)).for_each(product);
        });
    }
}

/// Returns the data from `start` on; an operand without elements may start beyond the end.
fn from<E>(data: &[E], start: usize) -> &[E] {
    &data[start.min(data.len())..]
}

/// [`Product::linear`] of f32 or f64. The bias is added in registers, and the function is computed from `z`: completing columns
/// while the product is under way is slower (`benches/results/2026-11-25-fused.md`).
fn linear_wide<E: Stored<Wide = E> + Gemm>(
    x: MatRef<'_, E>,
    w: MatRef<'_, E>,
    bias: Option<&[E]>,
    y: &mut [E],
    f: Option<(LoopFn<f32, f32>, &mut [E])>,
) {
    assert!(f.is_none(), "a function of f32 or f64 reads the finished product");
    let ((k, n), c) = (w.shape(), y.as_mut_ptr());
    // SAFETY: the result is borrowed exclusively and has the product's shape; the bias has an element for every column.
    unsafe {
        multiply(x, w, &[k], (n, 1), |strides, transposed| {
            let steps = if transposed { (1, 0) } else { (0, 1) };
            let added = bias.map(|bias| Added { factor: E::ONE, x: bias.as_ptr(), strides: steps });
            LinearEpilogue { c, strides, alpha: E::ONE, added }
        });
    }
}

/// [`Product::linear`] of f16 or bf16, in one pass.
fn linear_half<E: Stored<Wide = f32>>(
    x: MatRef<'_, E>,
    w: MatRef<'_, E>,
    bias: Option<&[E]>,
    y: &mut [E],
    f: Option<(LoopFn<f32, f32>, &mut [E])>,
) {
    let ((k, n), y) = (w.shape(), y.as_mut_ptr());
    let activation = f.map(|(f, z)| (z.as_mut_ptr(), f));
    // SAFETY: the results are borrowed exclusively and have the product's shape.
    unsafe {
        multiply(x, w, &[k], (n, 1), |strides, transposed| {
            let steps = if transposed { (1, 0) } else { (0, 1) };
            MapEpilogue { y, activation, strides, bias: bias.map(|data| (data, steps)) }
        });
    }
}
