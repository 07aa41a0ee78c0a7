//! Parts of [attention](super): blocks of queries, heads as matrices, and the loops over a block's rows.

use crate::error::Result;
use crate::tensor::Tensor;
use crate::tensor::cpu::{Gemm, Kernel, MatMut, MatRef, RowTree, SumReducer, as_elements_mut, row_max};

/// The number of query rows of a full block.
pub(super) const ROWS: usize = 64;

/// A block of query rows and the keys to which they attend.
pub(super) struct QueryBlock {
    /// The first row's index among the given queries.
    pub(super) start: usize,
    /// The first row's global index.
    pub(super) global: usize,
    pub(super) rows: usize,
    /// The number of keys to which any row of a full block attends.
    pub(super) keys: usize,
    /// The row length of the scores: `keys` rounded up to a multiple of the block size.
    pub(super) width: usize,
}

impl QueryBlock {
    /// Returns the number of keys to which row `i` attends.
    #[inline(always)]
    pub(super) fn seen(&self, i: usize) -> usize {
        (self.global + i + 1).min(self.keys)
    }

    pub(super) fn matrix<'a, T>(&self, data: &'a [T]) -> MatRef<'a, T> {
        MatRef::new(data, (self.rows, self.keys), (self.width, 1)).expect("room for the block")
    }

    pub(super) fn matrix_mut<'a, T>(&self, data: &'a mut [T]) -> MatMut<'a, T> {
        MatMut::new(data, (self.rows, self.keys), (self.width, 1)).expect("room for the block")
    }
}

/// A tensor `[batch, heads, length, d]` as matrices.
pub(super) struct Heads<'a, T> {
    pub(super) data: &'a [T],
    pub(super) len: usize,
    pub(super) d: usize,
    strides: [usize; 4],
}

impl<'a, T: Gemm> Heads<'a, T> {
    pub(super) fn of(x: &'a Tensor) -> Result<Self> {
        let s = x.strides();
        Ok(Heads { data: x.data()?, len: x.shape()[2], d: x.shape()[3], strides: [s[0], s[1], s[2], s[3]] })
    }

    /// Returns `len` rows of a head from `start` on.
    pub(super) fn rows(&self, (head, start, len): ([usize; 2], usize, usize)) -> MatRef<'a, T> {
        self.at(head).rows(start, len)
    }

    pub(super) fn at(&self, [b, h]: [usize; 2]) -> MatRef<'a, T> {
        let start = (b * self.strides[0] + h * self.strides[1]).min(self.data.len());
        let (shape, strides) = ((self.len, self.d), (self.strides[2], self.strides[3]));
        MatRef::new(&self.data[start..], shape, strides).expect("a tensor's head")
    }
}

/// A temporary buffer from the pool.
pub(super) struct Scratch<T>(Tensor, std::marker::PhantomData<T>);

impl<T: Gemm> Scratch<T> {
    pub(super) fn new(len: usize) -> Self {
        Scratch(Tensor::uninit(T::DTYPE, [len]), std::marker::PhantomData)
    }

    pub(super) fn get(&mut self) -> &mut [T] {
        as_elements_mut(self.0.bytes_mut())
    }
}

/// The kernel that turns scores into exponentials row by row, and computes their sums and the logarithms of the sums.
pub(super) struct Exponentials<'a, T> {
    pub(super) s: &'a mut [T],
    pub(super) block: &'a QueryBlock,
    pub(super) tree: &'a mut RowTree<T>,
    pub(super) sums: &'a mut [T],
    pub(super) lse: &'a mut [T],
}

impl<T: Gemm> Kernel for Exponentials<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let rows = self.s.chunks_exact_mut(self.block.width).zip(self.sums.iter_mut().zip(self.lse));
        for (i, (row, (sum, lse))) in rows.enumerate() {
            row[self.block.seen(i)..].fill(T::LOWEST);
            let max = row_max(row);
            for s in row.iter_mut() {
                *s = (*s - max).exp();
            }
            *sum = self.tree.fold::<SumReducer>(row);
            *lse = sum.ln() + max;
        }
    }
}

/// The kernel that turns scores `p` into probabilities, and gradients `ds` of the probabilities into those of the
/// unscaled scores. Masked entries become 0.
pub(super) struct ScoreGradients<'a, T> {
    pub(super) p: &'a mut [T],
    pub(super) ds: &'a mut [T],
    pub(super) block: &'a QueryBlock,
    pub(super) scale: T,
    pub(super) lse: &'a [T],
    pub(super) o: MatRef<'a, T>,
    pub(super) grad: MatRef<'a, T>,
    pub(super) dot: &'a mut RowTree<T>,
}

impl<T: Gemm> Kernel for ScoreGradients<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let d = self.o.shape().1;
        let mut products = vec![T::ZERO; d];
        let width = self.block.width;
        let rows = self.p.chunks_exact_mut(width).zip(self.ds.chunks_exact_mut(width));
        for (i, ((p, ds), &lse)) in rows.zip(self.lse).enumerate() {
            let o = self.o.row(i);
            let grad = self.grad.row(i);
            for (s, (&o, &grad)) in products.iter_mut().zip(o.iter().zip(grad)) {
                *s = o * grad;
            }
            let delta = self.dot.fold::<SumReducer>(&products);
            let (seen, masked) = p.split_at_mut(self.block.seen(i));
            masked.fill(T::ZERO);
            ds[seen.len()..].fill(T::ZERO);
            for (p, ds) in seen.iter_mut().zip(ds) {
                *p = (*p - lse).exp();
                *ds = self.scale * (*p * (*ds - delta));
            }
        }
    }
}
