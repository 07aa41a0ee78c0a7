//! Kernels that compute one row of the result from one row of each operand, such as softmax.

use crate::isa::simd::{Isa, Kernel, dispatch};
use crate::loops::formulas::widest_of;
use crate::num::real::Real;
use crate::sums::tree::RowTree;
use crate::threads::parts::RowsMut;
use crate::threads::team::for_each_part;

/// A function that computes one row of the result from one row of each of `N` operands. Implement `row`
/// `#[inline(always)]`.
pub trait RowBody<const N: usize>: Copy + Sync {
    /// Writes `out`. `tree` is the [summation tree](RowTree) of the row's length, and `scratch` has that length.
    fn row<T: Real>(self, x: [&[T]; N], out: &mut [T], tree: &mut RowTree<T>, scratch: &mut [T]);
}

/// Runs `body` on every row of `len` elements.
///
/// # Panics
/// Panics if an operand is shorter than the result, or if `len` is 0.
pub fn each_row<T: Real, const N: usize, B: RowBody<N>>(
    inputs: [&[T]; N],
    len: usize,
    out: &mut [T],
    body: B,
) {
    let rows = out.len() / len;
    let nanos = NANOS_PER_ELEMENT * out.len();
    let data = RowsMut { data: out, len };
    for_each_part(rows, nanos, data, |at, out| {
        let inputs = inputs.map(|x: &[T]| &x[at.start * len..at.end * len]);
        dispatch(RowKernel { inputs, out: out.data, len, body });
    });
}

/// About the time that a function takes.
const NANOS_PER_ELEMENT: usize = 1;

struct RowKernel<'a, T, const N: usize, B> {
    inputs: [&'a [T]; N],
    out: &'a mut [T],
    len: usize,
    body: B,
}

impl<T: Real, const N: usize, B: RowBody<N>> Kernel for RowKernel<'_, T, N, B> {
    type Out = ();
    const WIDEST: Isa = widest_of::<T>();
    #[inline(always)]
    fn run(self) {
        let len = self.len;
        let mut tree = RowTree::new(len);
        let mut scratch = vec![T::ZERO; len];
        for (i, out) in self.out.chunks_exact_mut(len).enumerate() {
            let mut x = self.inputs;
            for x in &mut x {
                *x = &x[i * len..][..len];
            }
            self.body.row(x, out, &mut tree, &mut scratch);
        }
    }
}
