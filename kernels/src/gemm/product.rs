//! Products of matrices over slices.

use std::marker::PhantomData;

use super::block_loops::blocking::{block_len, long_block_len};
use super::block_loops::blocks::GemmOperands;
use super::block_loops::pack::pack_cols;
use super::contraction::{Contraction, LeafRuns};
use super::epilogue::{Epilogue, LinearEpilogue};
use super::matrix::{MatMut, MatRef};
use super::thin;
use super::threads::run_on_threads;
use super::tiles::stored::Stored;
use super::tiles::tile::{Added, Tiled};
use crate::isa::simd::Isa;
use crate::num::real::{Num, Real};

/// An element type that the product kernels take: f32 or f64.
pub trait Gemm: Real + Tiled {
    /// Sets `c = alpha * a @ b + beta * c`. If `beta` is 0, `c` is not read.
    ///
    /// The sum follows the summation tree of one dim. It is multiplied by `alpha`, then `beta * c` is added; each step
    /// is rounded.
    ///
    /// ```
    /// use isoshard_kernels::{Gemm, MatMut, MatRef};
    /// let (a, b, mut c) = ([1.0f64, 2.0, 3.0, 4.0], [10.0, 100.0], [1.0, 1.0]);
    /// let (a, b) = (MatRef::new(&a, (2, 2), (2, 1))?, MatRef::new(&b, (2, 1), (1, 1))?);
    /// f64::product(2.0, a, b, 1.0, MatMut::new(&mut c, (2, 1), (1, 1))?);
    /// assert_eq!(c, [421.0, 861.0]);
    /// # Ok::<(), isoshard_kernels::MatrixFault>(())
    /// ```
    ///
    /// # Panics
    /// Panics if the shapes do not fit each other.
    fn product(alpha: Self, a: MatRef<'_, Self>, b: MatRef<'_, Self>, beta: Self, c: MatMut<'_, Self>);

    /// Sets `c = a @ b`, where the sums leave out leaves of a longer range: the columns of `a` and the rows of `b` are
    /// the indices [`LeafRuns::indices`], and those that are not present are not read.
    ///
    /// # Panics
    /// Panics if the shapes do not fit each other.
    fn product_over(
        over: &LeafContraction<Self>,
        a: MatRef<'_, Self>,
        b: MatRef<'_, Self>,
        c: MatMut<'_, Self>,
    );

    /// Copies a matrix to rows that are `step` elements apart, and fills their ends with zeros. The columns of `b` in a
    /// product are contiguous afterwards, so that no product packs them.
    ///
    /// # Panics
    /// Panics if a row is longer than `step`, or `to` is shorter than the rows.
    fn copy_rows(x: MatRef<'_, Self>, step: usize, to: &mut [Self]);
}

/// The sums of [`Gemm::product_over`].
///
/// ```
/// use isoshard_kernels::{Gemm, LeafContraction, LeafRuns, MatMut, MatRef};
/// // A sum of 70 indices, in leaves of 32, 32 and 6, without the first leaf.
/// let over = LeafContraction::new(LeafRuns { len: 70, runs: &[1..3] });
/// let (ones, mut c) = ([1.0f64; 38], [0.0]);
/// let (a, b) = (MatRef::new(&ones, (1, 38), (38, 1))?, MatRef::new(&ones, (38, 1), (1, 1))?);
/// f64::product_over(&over, a, b, MatMut::new(&mut c, (1, 1), (1, 1))?);
/// assert_eq!(c, [38.0]);
/// # Ok::<(), isoshard_kernels::MatrixFault>(())
/// ```
#[derive(Debug)]
pub struct LeafContraction<T> {
    tree: Contraction,
    /// The number of indices.
    len: usize,
    element: PhantomData<T>,
}

impl<T: Gemm> LeafContraction<T> {
    /// Returns the sums over the leaves that are present.
    ///
    /// # Panics
    /// Panics if the runs do not ascend, are empty, or exceed the sum's leaves.
    pub fn new(over: LeafRuns<'_>) -> Self {
        over.expect_leaves_of_the_sum();
        // Rows are read in place along such sums.
        let tree = Contraction::over_runs(over, long_block_len::<T>());
        LeafContraction { tree, len: over.indices().len(), element: PhantomData }
    }
}

macro_rules! product {
    ($($t:ty)*) => {$(
        impl Gemm for $t {
            fn product(alpha: $t, a: MatRef<'_, $t>, b: MatRef<'_, $t>, beta: $t, mut c: MatMut<'_, $t>) {
                let ((m, n), strides, k) = (c.shape(), c.strides(), b.shape().0);
                assert!(a.shape() == (m, k) && b.shape().1 == n, "{:?} {:?} {:?}", a.shape(), b.shape(), (m, n));
                let c_data = c.as_mut_ptr();
                // SAFETY: the epilogue is over `c`, which is borrowed exclusively and has the product's shape; its
                // elements are inside its slice and do not coincide.
                unsafe {
                    multiply(a, b, &[k], strides, |strides, _| {
                        let added = Added { factor: beta, x: c_data.cast_const(), strides };
                        LinearEpilogue { c: c_data, strides, alpha, added: (beta != 0.0).then_some(added) }
                    });
                }
            }

            fn copy_rows(x: MatRef<'_, $t>, step: usize, to: &mut [$t]) {
                pack_cols(x, step, <$t>::kernels(Isa::current()).transpose, to);
            }

            fn product_over(
                over: &LeafContraction<$t>,
                a: MatRef<'_, $t>,
                b: MatRef<'_, $t>,
                mut c: MatMut<'_, $t>,
            ) {
                let ((m, n), strides, k) = (c.shape(), c.strides(), b.shape().0);
                assert!(a.shape() == (m, k) && b.shape().1 == n && k == over.len, "{:?} {:?}", a.shape(), over);
                let (c, tree) = (c.as_mut_ptr(), &over.tree);
                let plain = |strides, _| LinearEpilogue { c, strides, alpha: 1.0, added: None };
                // SAFETY: as above.
                unsafe { multiply_along(a, b, tree, strides, plain) };
            }
        }
    )*};
}

product!(f32 f64);

/// Multiplies. `epilogue` makes the epilogue from the result's strides and a flag that is true if the transposed
/// product is computed instead.
///
/// # Safety
/// The epilogue's result has the product's shape, and no other code reads or writes it.
pub(super) unsafe fn multiply<E, S>(
    a: MatRef<'_, E>,
    b: MatRef<'_, E>,
    extents: &[usize],
    strides: (usize, usize),
    epilogue: impl FnOnce((usize, usize), bool) -> S,
) where
    E: Stored<Wide: Gemm>,
    S: Epilogue<E::Wide>,
{
    assert_eq!(contraction_len(extents), Some(a.shape().1), "extents of the contraction");
    let (rows, cols) = if prefers_transposed(a, b, strides) { (b.t(), a.t()) } else { (a, b) };
    let block = if thin::fits(rows, cols) {
        usize::MAX
    } else {
        block_len(rows, cols, E::Wide::kernels(Isa::current()))
    };
    let tree = Contraction::cached(extents, block);
    // SAFETY: the caller's promise.
    unsafe { multiply_along(a, b, &tree, strides, epilogue) };
}

/// Multiplies; the sums follow `tree`, whose indices are in `a` and `b`. The other arguments are as in [`multiply`].
///
/// # Safety
/// The conditions of [`multiply`] hold.
unsafe fn multiply_along<E, S>(
    a: MatRef<'_, E>,
    b: MatRef<'_, E>,
    tree: &Contraction,
    strides: (usize, usize),
    epilogue: impl FnOnce((usize, usize), bool) -> S,
) where
    E: Stored<Wide: Gemm>,
    S: Epilogue<E::Wide>,
{
    let (m, n) = (a.shape().0, b.shape().1);
    if m == 0 || n == 0 {
        return;
    }
    let transposed = prefers_transposed(a, b, strides);
    let (a, b, strides) = if transposed { (b.t(), a.t(), (strides.1, strides.0)) } else { (a, b, strides) };
    let epilogue = epilogue(strides, transposed);
    if tree.blocks.is_empty() {
        for (row, col) in (0..a.shape().0).flat_map(|row| (0..b.shape().1).map(move |col| (row, col))) {
            // SAFETY: the element is inside the result.
            unsafe { epilogue.put((row, col), (1, 1), &mut [E::Wide::ZERO], 1) };
        }
        return;
    }
    // SAFETY: the caller's promise; the transposed product has the transposed result.
    unsafe { run_on_threads(&GemmOperands { a, b, tree }, &epilogue) };
}

/// Returns the number of indices of a contraction over `extents`, or `None` if it overflows.
pub fn contraction_len(extents: &[usize]) -> Option<usize> {
    if extents.contains(&0) {
        return Some(0);
    }
    extents.iter().try_fold(1usize, |len, &extent| len.checked_mul(extent))
}

/// Returns true if the transposed product is faster: only it reads an operand once, it wastes fewer lanes, or only its
/// result has contiguous columns.
fn prefers_transposed<E: Stored<Wide: Gemm>>(
    a: MatRef<'_, E>,
    b: MatRef<'_, E>,
    (rs, cs): (usize, usize),
) -> bool {
    let (m, n) = (a.shape().0, b.shape().1);
    if thin::fits(a, b) || thin::fits(b.t(), a.t()) {
        return !thin::fits(a, b);
    }
    let lanes = E::Wide::kernels(Isa::current()).lanes;
    let (straight, transposed) = (m * n.next_multiple_of(lanes), n * m.next_multiple_of(lanes));
    if cs != 1 && rs == 1 { 2 * transposed <= 3 * straight } else { 3 * transposed <= 2 * straight }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::with_isa;

    /// Two contiguous matrices, to multiply over parts of their contraction.
    struct Case<T> {
        m: usize,
        k: usize,
        n: usize,
        a: Vec<T>,
        b: Vec<T>,
    }

    impl<T: Gemm + Stored> Case<T> {
        fn new(m: usize, k: usize, n: usize) -> Self {
            // Values whose sum has other bits in any other order.
            let value = |i: usize| {
                let x = T::of(((i * 7919 + 13) % 1009) as f64 * 0.01 - 5.0);
                x * T::of([1.0, 1e3, 1e-3, 3.0][i * 5 % 4])
            };
            Case {
                m,
                k,
                n,
                a: (0..m * k).map(value).collect(),
                b: (0..k * n).map(|i| value(i + 77)).collect(),
            }
        }

        /// Returns the product over the indices from `start` on, as many as the extents have.
        fn part(&self, start: usize, extents: &[usize]) -> Vec<T> {
            let len: usize = extents.iter().product();
            let a = MatRef::new(&self.a, (self.m, self.k), (self.k, 1)).unwrap().cols(start, len);
            let b = MatRef::new(&self.b, (self.k, self.n), (self.n, 1)).unwrap().rows(start, len);
            let mut c = vec![T::LOWEST; self.m * self.n];
            let data = c.as_mut_ptr();
            let plain = |strides, _| LinearEpilogue { c: data, strides, alpha: T::ONE, added: None };
            // SAFETY: `c` has the product's shape.
            unsafe { multiply(a, b, extents, (self.n, 1), plain) };
            c
        }

        /// Checks that every node below this one is the sum of its halves, and every leaf by its definition.
        fn check(&self, start: usize, extents: &[usize]) -> Vec<T> {
            let got = self.part(start, extents);
            let (len, inner) = (extents[0], &extents[1..]);
            let of = |x: usize| [&[x], inner].concat();
            let want = match inner {
                [] if len <= 32 => {
                    (0..self.m * self.n).map(|i| self.chain(start, len, i / self.n, i % self.n)).collect()
                }
                [_, ..] if len == 1 => self.check(start, inner),
                _ => {
                    let left = len.div_ceil(2);
                    let right = start + left * inner.iter().product::<usize>();
                    let halves = (self.check(start, &of(left)), self.check(right, &of(len - left)));
                    halves.0.iter().zip(&halves.1).map(|(&l, &r)| l + r).collect()
                }
            };
            assert!(got == want, "{start} {extents:?}");
            got
        }

        fn chain(&self, start: usize, len: usize, row: usize, col: usize) -> T {
            let pair = |k: usize| (self.a[row * self.k + k], self.b[k * self.n + col]);
            let (x, y) = pair(start);
            (start + 1..start + len).fold(x * y, |sum, k| pair(k).0.mul_add(pair(k).1, sum))
        }
    }

    /// Such runs would let a tile read beyond its operands.
    #[test]
    fn runs_that_are_no_leaves_of_the_sum_are_refused() {
        let cases: [(usize, &[(usize, usize)]); 4] =
            [(10, &[(0, 2)]), (200, &[(0, 4), (1, 3)]), (200, &[(3, 4), (0, 1)]), (64, &[(1, 1)])];
        for (len, runs) in cases {
            let runs: Vec<_> = runs.iter().map(|&(start, end)| start..end).collect();
            let made =
                std::panic::catch_unwind(|| LeafContraction::<f32>::new(LeafRuns { len, runs: &runs }));
            let reason = *made.expect_err("refused").downcast::<String>().expect("a message");
            assert!(reason.contains("are no ascending leaves of a sum of"), "{reason}");
        }
        assert_eq!(LeafContraction::<f32>::new(LeafRuns { len: 70, runs: &[0..1, 2..3] }).len, 70);
    }

    /// The last leaf of the longest sum has 31 indices.
    #[test]
    fn the_last_leaf_of_the_longest_sum_is_multiplied() {
        let last = (1 << 59) - 1..1 << 59;
        let runs = std::slice::from_ref(&last);
        let over = LeafContraction::<f32>::new(LeafRuns { len: usize::MAX, runs });
        let (x, mut c) = ([1.0; 31], [0.0]);
        let (a, b) = (MatRef::new(&x, (1, 31), (31, 1)).unwrap(), MatRef::new(&x, (31, 1), (1, 1)).unwrap());
        f32::product_over(&over, a, b, MatMut::new(&mut c, (1, 1), (1, 1)).unwrap());
        assert_eq!(c, [31.0]);
    }

    /// A row that is repeated takes no memory, so that the rows of a copy can be more than any address space has.
    #[test]
    fn rows_are_copied_only_where_they_fit() {
        let (row, mut room) = ([1.0f32; 8], [0.0; 32]);
        let repeated = |rows: usize| MatRef::new(&row, (rows, 8), (0, 1)).unwrap();
        let turned = |rows: usize| MatRef::new(&row[..1], (rows, 1), (0, 0)).unwrap();
        for rows in [5, 1 << 61, usize::MAX] {
            for (x, step) in [(repeated(rows), 8), (turned(rows), 8)] {
                let copied = std::panic::AssertUnwindSafe(|| f32::copy_rows(x, step, &mut room));
                assert!(std::panic::catch_unwind(copied).is_err(), "{rows} rows of {:?}", x.shape());
            }
        }
        f32::copy_rows(repeated(4), 8, &mut room);
        assert_eq!(room, [1.0; 32]);
    }

    #[test]
    fn every_node_is_the_sum_of_its_halves() {
        for k in 1..=130 {
            Case::<f32>::new(3, k, 5).check(0, &[k]);
            Case::<f64>::new(2, k, 3).check(0, &[k]);
        }
        // Longer than a block.
        for k in [1024, 1025, 2047, 4099] {
            Case::<f32>::new(2, k, 3).check(0, &[k]);
        }
        for extents in
            [&[2, 33][..], &[5, 7], &[7, 100], &[3, 1], &[1, 70], &[6, 5, 4], &[3, 700], &[1500, 1]]
        {
            Case::<f32>::new(2, extents.iter().product(), 3).check(0, extents);
        }
    }

    #[test]
    fn bits_do_not_depend_on_instructions_sizes_or_strides() {
        for (m, k, n) in
            [(1, 70, 300), (9, 45, 49), (65, 1100, 17), (50, 33, 64), (300, 20, 1), (17, 64, 130)]
        {
            let case = Case::<f32>::new(m, k, n);
            let want = case.part(0, &[k]);
            for (i, &want) in want.iter().enumerate().step_by(7) {
                let one = MatRef::new(&case.a[i / n * k..], (1, k), (k, 1)).unwrap();
                let col = MatRef::new(&case.b[i % n..], (k, 1), (n, 1)).unwrap();
                let mut c = [0.0];
                f32::product(1.0, one, col, 0.0, MatMut::new(&mut c, (1, 1), (1, 1)).unwrap());
                assert_eq!(c[0].to_bits(), want.to_bits());
            }
            let turn = |x: &[f32], (m, n): (usize, usize)| -> Vec<f32> {
                (0..n).flat_map(|j| (0..m).map(move |i| x[i * n + j])).collect()
            };
            let (at, bt) = (turn(&case.a, (m, k)), turn(&case.b, (k, n)));
            let a =
                [MatRef::new(&case.a, (m, k), (k, 1)).unwrap(), MatRef::new(&at, (m, k), (1, m)).unwrap()];
            let b =
                [MatRef::new(&case.b, (k, n), (n, 1)).unwrap(), MatRef::new(&bt, (k, n), (1, k)).unwrap()];
            for &isa in Isa::available() {
                for (a, b) in a.iter().flat_map(|a| b.iter().map(move |b| (*a, *b))) {
                    for strides in [(n, 1), (1, m), (2 * n + 1, 2)] {
                        let mut c = vec![f32::NAN; (m - 1) * strides.0 + (n - 1) * strides.1 + 1];
                        let into = MatMut::new(&mut c, (m, n), strides).unwrap();
                        with_isa(isa, || f32::product(1.0, a, b, 0.0, into));
                        for (i, want) in want.iter().enumerate() {
                            let got = c[i / n * strides.0 + i % n * strides.1];
                            assert_eq!(
                                got.to_bits(),
                                want.to_bits(),
                                "{m} {k} {n} {isa:?} {strides:?} at {i}"
                            );
                        }
                    }
                }
            }
            let wide = Case::<f64>::new(m, k, n);
            let bits = |isa| with_isa(isa, || wide.part(0, &[k]));
            assert!(Isa::available().iter().all(|&isa| bits(isa) == bits(Isa::Baseline)));
        }
    }

    #[test]
    fn factors_zeros_and_what_was_there() {
        for (m, k, n) in [(3, 40, 50), (8, 40, 48), (5, 2000, 1), (2, 0, 7)] {
            let case = Case::<f32>::new(m, k, n);
            let sum = case.part(0, &[k]);
            for (alpha, beta) in [(1.0, 1.0), (0.3, 0.0), (0.7, -1.1)] {
                let mut c: Vec<f32> = (0..m * n).map(|i| i as f32 * 0.37 - 9.0).collect();
                let want: Vec<f32> = c.iter().zip(&sum).map(|(&c, &s)| alpha * s + beta * c).collect();
                let a = MatRef::new(&case.a, (m, k), (k, 1)).unwrap();
                let b = MatRef::new(&case.b, (k, n), (n, 1)).unwrap();
                f32::product(alpha, a, b, beta, MatMut::new(&mut c, (m, n), (n, 1)).unwrap());
                assert_eq!(c, want);
            }
        }
        let product = |a: f32, b: f32| {
            let (a, b, mut c) = ([a], [b], [f32::NAN]);
            let one = |x| MatRef::new(x, (1, 1), (1, 1)).unwrap();
            f32::product(1.0, one(&a), one(&b), 0.0, MatMut::new(&mut c, (1, 1), (1, 1)).unwrap());
            c[0].to_bits()
        };
        assert_eq!(product(-1.0, 0.0), (-0.0f32).to_bits(), "a single product keeps its sign");
        let nothing = Case::<f32>::new(1, 0, 1).part(0, &[0]);
        assert_eq!(nothing[0].to_bits(), 0.0f32.to_bits(), "an empty sum is 0.0");
    }
}
