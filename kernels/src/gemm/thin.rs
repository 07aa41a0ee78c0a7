//! Products of a few rows and a matrix that is read once, in the order in which it lies.
//!
//! Packing the matrix would take as long as multiplying it. If its columns are contiguous along the contraction (`y = x W^T`),
//! they are *lines*: as many as a vector has lanes are read side by side and transposed in [registers](super::tiles::lines). A lane
//! is the chain of one line. Chains of several leaves run side by side, since a chain alone would wait for each of its
//! multiply-adds. Otherwise columns are next to each other, and are read in [strips](super::tiles::strip). There are kernels for some numbers
//! of rows, in f32, bf16 and f16; fewer rows are filled up with zeros, since the matrix is what takes time. Other products go over
//! [`blocks`](super::block_loops::blocks).
//! Every element has the bits that it has in any other tile.

use super::block_loops::blocks::GemmOperands;
use super::block_loops::pack::{native, pack_rows, packed_rows_len};
use super::block_loops::scratch::with_scratch;
use super::epilogue::{Epilogue, MAX_TILE_LEN};
use super::matrix::MatRef;
use super::tiles::stored::Stored;
use super::tiles::strip::{Strip, most_columns, place, room};
use super::tiles::thin_tile::ThinTile;
use super::tiles::tile::Tiled;
use crate::isa::simd::Isa;
use crate::num::real::Real;

/// Returns true if [`run`] takes the product, and is the fastest way.
pub(super) fn fits<E: Stored>(a: MatRef<'_, E>, b: MatRef<'_, E>) -> bool {
    has_lines(a, b) || has_strips(a, b)
}

/// Returns the kernel for `m` rows, and the number of rows that it has: a few more, if there is none for just these.
fn kernel_of<F: Copy>(kernels: &[(usize, F)], m: usize) -> Option<(usize, F)> {
    kernels.iter().copied().find(|&(rows, _)| m > 0 && rows >= m)
}

/// Returns true if the columns of `b` are lines that the kernels can read. The elements of two lines may coincide, so columns
/// can be contiguous as well.
fn has_lines<E: Stored>(a: MatRef<'_, E>, b: MatRef<'_, E>) -> bool {
    let kernels = E::stored_kernels(Isa::current());
    let (lanes, shortest) = kernels.line_lanes;
    let fit = b.strides().0 == 1 && b.shape().0 >= shortest && b.shape().1 >= lanes;
    fit && kernel_of(kernels.lines, a.shape().0).is_some()
}

/// Returns true if strips are the fastest way: columns are contiguous, and so many that a strip does not wait for each of its sums.
fn has_strips<E: Stored>(a: MatRef<'_, E>, b: MatRef<'_, E>) -> bool {
    let (kernels, (m, k)) = (E::stored_kernels(Isa::current()), a.shape());
    let least = if E::NATIVE { 2 * m + 2 } else { 1 };
    let fit = b.strides().1 == 1 && k > 0 && b.shape().1 >= least * kernels.lanes;
    fit && kernel_of(kernels.strips, m).is_some()
}

/// Returns the rows if they lie as kernels for `rows` rows read them: the elements at one index of the contraction side by side.
fn rows_in_place<E: Stored<Wide = T>, T: Real + Tiled>(a: MatRef<'_, E>, rows: usize) -> Option<*const T> {
    let m = a.shape().0;
    let lie = |a: &MatRef<'_, T>| (m == 1 || a.strides().0 == 1) && a.strides().1 == m && m == rows;
    native(a).filter(lie).map(|a| a.data().as_ptr())
}

/// Returns the rows as kernels for `rows` rows read them: in place, or in the buffer. Rows that are not there are 0.
fn rows_for<E: Stored<Wide = T>, T: Real + Tiled>(
    a: MatRef<'_, E>,
    rows: usize,
    packed: &mut [T],
) -> *const T {
    if let Some(rows) = rows_in_place(a, rows) {
        return rows;
    }
    if a.shape().0 < rows {
        packed.fill(T::ZERO);
    }
    pack_rows(a, rows, T::kernels(Isa::current()).interleave, packed).data
}

/// Computes a product that [`fits`], and passes every element to `epilogue`.
///
/// # Safety
/// The result of `epilogue` has the product's shape, and no other code reads or writes it.
pub(super) unsafe fn run<E: Stored<Wide = T>, T: Real + Tiled>(
    operands: &GemmOperands<'_, E>,
    epilogue: &dyn Epilogue<T>,
) {
    let GemmOperands { a, b, tree } = *operands;
    let ((m, k), n) = (a.shape(), b.shape().1);
    assert!(b.shape().0 == k && fits(a, b), "{:?} {:?}", (m, k), b.shape());
    assert!(
        tree.blocks.iter().all(|block| block.start + block.len <= k),
        "the tree is inside the contraction"
    );
    if !has_lines(a, b) {
        // SAFETY: the caller's promise.
        return unsafe { run_strips(operands, epilogue) };
    }
    let kernels = E::stored_kernels(Isa::current());
    let (rows, kernel) = kernel_of(kernels.lines, m).expect("the product fits");
    let (step, lanes) = (b.strides().1, kernels.line_lanes.0);
    // An epilogue takes as many columns at a time as fit in a tile.
    let most = MAX_TILE_LEN / (rows * lanes) * lanes;
    let sizes = [
        if rows_in_place(a, rows).is_some() { 0 } else { packed_rows_len(m, k, rows) },
        rows * most + lanes,
        (tree.depth + tree.levels) * rows * lanes,
    ];
    with_scratch::<T, _>(sizes, |[packed, sums, stack]| {
        let rows = rows_for(a, rows, packed);
        let mut col = 0;
        while col < n {
            // The last lines of a matrix that ends within a vector are read together with some before them.
            let before = lanes.saturating_sub(n - col);
            let width = most.min(n - col).max(lanes) / lanes * lanes;
            for done in (0..width).step_by(lanes) {
                let tile = ThinTile {
                    rows,
                    matrix: b.data()[(col + done - before) * step..].as_ptr(),
                    step,
                    len: k,
                    tree,
                    stack: stack.as_mut_ptr(),
                    sums: sums[done..].as_mut_ptr(),
                    sums_step: width,
                };
                // SAFETY: the lines are inside the matrix, as every `MatRef` is, and have at least a piece; the rows have as
                // many elements for each index as the kernel reads; the stack has room for all nodes of the tree, and the
                // sums for the kernel's rows of `width`; this CPU has the kernel's instruction set.
                unsafe { kernel(&tile) };
            }
            // SAFETY: the columns are inside the result.
            unsafe { epilogue.put((0, col), (m, width - before), &mut sums[before..], width) };
            col += width - before;
        }
    });
}

/// Computes a product of contiguous columns and as many rows as strips have.
///
/// # Safety
/// The conditions of [`run`] hold.
unsafe fn run_strips<E: Stored<Wide = T>, T: Real + Tiled>(
    operands: &GemmOperands<'_, E>,
    epilogue: &dyn Epilogue<T>,
) {
    let GemmOperands { a, b, tree } = *operands;
    let ((m, k), n) = (a.shape(), b.shape().1);
    let kernels = E::stored_kernels(Isa::current());
    let ((rows, kernel), lanes) = (kernel_of(kernels.strips, m).expect("the product fits"), kernels.lanes);
    let most = most_columns::<T>(rows, lanes);
    let sizes = [
        if rows_in_place(a, rows).is_some() { 0 } else { packed_rows_len(m, k, rows) },
        (tree.depth + tree.levels + 1) * rows * room(most.min(n), lanes),
        MAX_TILE_LEN,
    ];
    with_scratch::<T, _>(sizes, |[packed, nodes, tile]| {
        let rows = rows_for(a, rows, packed);
        let mut first = 0;
        while first < n {
            // Less than a vector is not left over.
            let rest = n - first;
            let columns = if rest <= most || rest - most >= lanes { most.min(rest) } else { most - lanes };
            let matrix = b.data()[first..].as_ptr();
            let strip = Strip { rows, matrix, step: b.strides().0, columns, tree, nodes: nodes.as_mut_ptr() };
            // SAFETY: the columns are inside the matrix, as every `MatRef` is; the rows have as many elements for each
            // index as the kernel reads; the nodes have room for those of the tree; this CPU has the kernel's instruction set.
            unsafe { kernel(&strip) };
            let node = room(columns, lanes);
            for done in (0..columns).step_by(MAX_TILE_LEN / m) {
                let width = (columns - done).min(MAX_TILE_LEN / m);
                for (row, tile) in tile.chunks_mut(width).take(m).enumerate() {
                    for (i, sum) in tile.iter_mut().enumerate() {
                        *sum = nodes[row * node + place(done + i, columns, lanes)];
                    }
                }
                // SAFETY: the columns are inside the result.
                unsafe { epilogue.put((0, first + done), (m, width), &mut tile[..m * width], width) };
            }
            first += columns;
        }
    });
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::super::block_loops::blocks;
    use super::super::contraction::{Contraction, LeafRuns};
    use super::super::epilogue::LinearEpilogue;
    use super::*;
    use crate::isa::caches::{Caches, with_caches};
    use crate::isa::simd::with_isa;
    use crate::num::real::{Num, is_nan};
    use crate::{LEAF, SplitRule};

    /// Rows and lines that are as long as the longest contraction.
    struct Case<E> {
        rows: Vec<E>,
        lines: Vec<E>,
        /// The distance from line to line, and the first element.
        step: usize,
        start: usize,
    }

    const ROWS: usize = 8;
    const LINES: usize = 50;

    impl<E: Stored> Case<E> {
        /// Makes noise whose sum has other bits in any other order, with infinities and a NaN in the last lines.
        fn new(k: usize) -> Case<E> {
            let narrow = |x: f64| {
                let mut narrow = [E::default()];
                E::narrow_into(&[E::Wide::of(x)], &mut narrow);
                narrow[0]
            };
            let value =
                |i: usize| (((i * 7919 + 13) % 1009) as f64 * 0.01 - 5.0) * [1.0, 1e3, 1e-3, 3.0][i * 5 % 4];
            let (step, start) = (k + 3, 1);
            let mut lines: Vec<E> = (0..start + LINES * step).map(|i| narrow(value(i + 77))).collect();
            for (line, at, x) in
                [(44, k / 2, f64::NAN), (46, 0, f64::INFINITY), (49, k - 1, f64::NEG_INFINITY)]
            {
                lines[start + line * step + at] = narrow(x);
            }
            Case { rows: (0..ROWS * k).map(|i| narrow(value(i))).collect(), lines, step, start }
        }

        fn wide(x: &E) -> E::Wide {
            E::load(std::slice::from_ref(x), &mut [E::Wide::default()])[0]
        }

        /// Returns the sum of a node by its definition.
        fn node(&self, (row, line, k): (usize, usize, usize), start: usize, extents: &[usize]) -> E::Wide {
            let (len, inner) = (extents[0], &extents[1..]);
            let of = |x: usize| [&[x], inner].concat();
            match inner {
                [] if len <= LEAF => {
                    let pair = |i: usize| {
                        let line = &self.lines[self.start + line * self.step..];
                        (Self::wide(&self.rows[row * k + i]), Self::wide(&line[i]))
                    };
                    let (x, y) = pair(start);
                    (start + 1..start + len).fold(x * y, |sum, i| pair(i).0.mul_add(pair(i).1, sum))
                }
                [_, ..] if len == 1 => self.node((row, line, k), start, inner),
                _ => {
                    let left = SplitRule::Halves.left_of(len);
                    let right = start + left * inner.iter().product::<usize>();
                    self.node((row, line, k), start, &of(left))
                        + self.node((row, line, k), right, &of(len - left))
                }
            }
        }

        /// Returns the sums of `m` rows and `n` lines along a tree, by the kernels of thin products or by others.
        fn product(
            &self,
            (m, n, k): (usize, usize, usize),
            tree: &Contraction,
            layout: usize,
            thin: bool,
        ) -> Vec<E::Wide> {
            let (step, apart) = [(k, 1), (1, m), (1, m + 2), (2 * k + 1, 2)][layout];
            let mut rows = vec![E::default(); (m - 1) * step + (k - 1) * apart + 1];
            for (i, &x) in self.rows[..m * k].iter().enumerate() {
                rows[i / k * step + i % k * apart] = x;
            }
            let a = MatRef::new(&rows, (m, k), (step, apart)).unwrap();
            // The last line ends with the slice.
            let lines = &self.lines[self.start..][..(n - 1) * self.step + k];
            let b = MatRef::new(lines, (k, n), (1, self.step)).unwrap();
            let mut sums = vec![E::Wide::LOWEST; m * n];
            let epilogue =
                LinearEpilogue { c: sums.as_mut_ptr(), strides: (n, 1), alpha: E::Wide::ONE, added: None };
            let operands = GemmOperands { a, b, tree };
            // SAFETY: the sums have the product's shape.
            unsafe { if thin { run(&operands, &epilogue) } else { blocks::run(&operands, &epilogue) } };
            sums
        }
    }

    /// Panics unless the numbers are equal by bits, or both NaNs.
    fn expect_equal<T: Real>(got: &[T], want: impl Iterator<Item = T>, case: &dyn std::fmt::Debug) {
        for (i, (&got, want)) in got.iter().zip(want).enumerate() {
            // Zeros of different signs are equal, but not their reciprocals.
            let equal = got == want && got.recip() == want.recip() || is_nan(got) && is_nan(want);
            assert!(equal, "{got:?}, not {want:?} at {i} of {case:?}");
        }
    }

    fn check<E: Stored>() {
        let lens = [2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 32, 33, 40, 63, 64, 65, 96, 130, 261, 1000];
        for k in if cfg!(miri) { &lens[..10] } else { &lens } {
            let (k, case) = (*k, Case::<E>::new(*k));
            for extents in [&[k][..], &[2, k / 2]].into_iter().filter(|x| x.iter().product::<usize>() == k) {
                let at = |row: usize, line: usize| case.node((row, line, k), 0, extents);
                let want: Vec<E::Wide> = (0..ROWS * LINES).map(|i| at(i / LINES, i % LINES)).collect();
                for &isa in Isa::available() {
                    let kernels = E::stored_kernels(isa);
                    let (lanes, shortest) = kernels.line_lanes;
                    if k < shortest {
                        continue;
                    }
                    for (i, m) in (1..=kernels.lines.last().expect("lines").0).enumerate() {
                        // Numbers of lines, blocks and layouts take turns.
                        let n = [lanes, LINES, lanes + 1, 2 * lanes + 1][i % 4];
                        let tree = Contraction::new(extents, [usize::MAX, LEAF, 100][i % 3]);
                        for layout in [i % 4, (i + k) % 4] {
                            let got = with_isa(isa, || case.product((m, n, k), &tree, layout, true));
                            let want = (0..m * n).map(|i| want[i / n * LINES + i % n]);
                            expect_equal(
                                &got,
                                want,
                                &(std::any::type_name::<E>(), m, n, extents, layout, isa),
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn sums_of_lines_are_those_of_the_definition() {
        check::<f32>();
        check::<bf16>();
        check::<f16>();
    }

    #[test]
    fn sums_of_contiguous_columns_are_those_of_other_kernels() {
        fn check<E: Stored>() {
            let detected = Caches::current();
            for (k, n, first) in [
                (1usize, 32usize, detected.first),
                (31, 21, detected.first),
                (70, 45, 1),
                (40, 301, detected.first),
                // Strips of two vectors, of one, and of several that end within one.
                (70, 163, 1),
                (33, 145, 500),
                (100, 300, 700),
            ] {
                let case = Case::<E>::new(if n > 2 * LINES { 3 * n } else { k.max(n) });
                let tree = Contraction::new(&[k], if n == 45 { LEAF } else { usize::MAX });
                let caches = Caches { first, ..detected };
                for &isa in Isa::available() {
                    let kernels = E::stored_kernels(isa);
                    let most = kernels.strips.last().expect("strips").0;
                    for m in (1..=most).filter(|m| n >= (2 * m + 2) * kernels.lanes) {
                        let a = MatRef::new(&case.rows, (m, k), (k, 1)).unwrap();
                        let b =
                            MatRef::new(&case.lines[..(k - 1) * (n + 2) + n], (k, n), (n + 2, 1)).unwrap();
                        let product = |thin: bool| {
                            let mut c = vec![E::Wide::LOWEST; m * n];
                            let (strides, alpha) = ((n, 1), E::Wide::ONE);
                            let epilogue = LinearEpilogue { c: c.as_mut_ptr(), strides, alpha, added: None };
                            let operands = GemmOperands { a, b, tree: &tree };
                            // SAFETY: the sums have the product's shape.
                            unsafe {
                                if thin {
                                    run(&operands, &epilogue)
                                } else {
                                    blocks::run(&operands, &epilogue)
                                }
                            };
                            c
                        };
                        let [thin, other] =
                            [true, false].map(|thin| with_caches(caches, || with_isa(isa, || product(thin))));
                        expect_equal(&thin, other.into_iter(), &(std::any::type_name::<E>(), m, k, n, isa));
                    }
                }
            }
        }
        check::<f32>();
        check::<bf16>();
        check::<f16>();
    }

    /// Such columns are too short to be lines: a piece of one would exceed the slice.
    #[test]
    fn short_columns_that_overlap_are_contiguous_ones() {
        let case = Case::<bf16>::new(64);
        for &isa in Isa::available() {
            for (k, n) in [(1, 66), (2, 65), (3, 64)] {
                let last = &case.lines[case.lines.len() - (n + k - 1)..];
                let a = MatRef::new(&case.rows, (1, k), (k, 1)).unwrap();
                let b = MatRef::new(last, (k, n), (1, 1)).unwrap();
                let tree = Contraction::new(&[k], usize::MAX);
                with_isa(isa, || assert!(fits(a, b) && !has_lines(a, b)));
                let product = |thin: bool| {
                    let mut c = vec![f32::LOWEST; n];
                    let epilogue =
                        LinearEpilogue { c: c.as_mut_ptr(), strides: (n, 1), alpha: 1.0, added: None };
                    let operands = GemmOperands { a, b, tree: &tree };
                    // SAFETY: the sums have the product's shape.
                    with_isa(isa, || unsafe {
                        if thin { run(&operands, &epilogue) } else { blocks::run(&operands, &epilogue) }
                    });
                    c
                };
                expect_equal(&product(true), product(false).into_iter(), &(k, n, isa));
            }
        }
    }

    #[test]
    #[expect(clippy::single_range_in_vec_init, reason = "a list of one run")]
    fn sums_without_some_leaves_are_those_of_other_kernels() {
        let case = Case::<f32>::new(999);
        for runs in [&[1..32][..], &[0..1, 5..6, 9..22, 30..32], &[3..4]] {
            let over = LeafRuns { len: 999, runs };
            let k = over.indices().len();
            for &isa in Isa::available() {
                for block in [64, usize::MAX] {
                    let tree = Contraction::over_runs(over, block);
                    let m = f32::stored_kernels(isa).lines.last().expect("lines").0.min(4);
                    let product = |thin| with_isa(isa, || case.product((m, 21, k), &tree, 0, thin));
                    expect_equal(&product(true), product(false).into_iter(), &(runs, isa, block));
                }
            }
        }
    }
}
