//! Packing of operands into the form that tiles read: widened to f32, gathered, transposed. Operands that already have
//! that form are read in place.

use crate::gemm::matrix::MatRef;
use crate::gemm::tiles::stored::Stored;
use crate::gemm::tiles::tile::INTERLEAVED;
use crate::gemm::tiles::transpose::TransposeFn;
use crate::isa::caches::CACHE_LINE_BYTES;
use crate::isa::simd::{Isa, prefetch_line};
use crate::num::real::Widen;

/// The number of indices that are widened at a time.
const CHUNK: usize = 64;

/// Returns the matrix in the type of the computation, or `None` if its elements must be widened.
pub(in crate::gemm) fn native<E: Widen>(x: MatRef<'_, E>) -> Option<MatRef<'_, E::Wide>> {
    E::NATIVE.then(|| x.with_data(E::load(x.data(), &mut [])))
}

/// Panels of rows of the left operand, as tiles read them: row `r` of panel `p` begins at `p * panel_step + r *
/// steps.0`.
#[derive(Clone, Copy)]
pub(in crate::gemm) struct RowPanels<T> {
    pub(in crate::gemm) data: *const T,
    pub(in crate::gemm) panel_step: usize,
    /// The distances from row to row and along the contraction.
    pub(in crate::gemm) steps: (usize, usize),
}

impl<T> RowPanels<T> {
    /// Returns the first element of a row. Panels have `panel` rows.
    pub(in crate::gemm) fn row(&self, row: usize, panel: usize) -> *const T {
        let inside = (row % panel).wrapping_mul(self.steps.0);
        self.data.wrapping_add((row / panel).wrapping_mul(self.panel_step).wrapping_add(inside))
    }
}

/// Returns the number of elements that [`pack_rows`] writes.
pub(in crate::gemm) fn packed_rows_len(rows: usize, k: usize, panel: usize) -> usize {
    rows.div_ceil(panel).saturating_mul(packed_panel_len(k, panel))
}

/// Returns the distance between packed panels: not a multiple of a large power of two, which would let panels share few
/// sets of a cache.
fn packed_panel_len(k: usize, panel: usize) -> usize {
    (panel * k).next_multiple_of(16) + 16
}

/// Packs rows into panels of `panel` rows: the elements of a panel's rows at one index of the contraction become
/// contiguous, and the panel as a whole.
pub(in crate::gemm) fn pack_rows<E: Stored>(
    a: MatRef<'_, E>,
    panel: usize,
    interleave: TransposeFn<E::Wide>,
    dst: &mut [E::Wide],
) -> RowPanels<E::Wide> {
    let panel_step = packed_panel_len(a.shape().1, panel);
    write_row_panels(a, panel, interleave, dst);
    // The pointer is taken after the last write through the slice.
    RowPanels { data: dst.as_ptr(), panel_step, steps: (1, panel) }
}

/// Writes the panels of [`pack_rows`].
fn write_row_panels<E: Stored>(
    a: MatRef<'_, E>,
    panel: usize,
    interleave: TransposeFn<E::Wide>,
    dst: &mut [E::Wide],
) {
    let ((m, k), (row_step, step)) = (a.shape(), a.strides());
    assert!(dst.len() >= packed_rows_len(m, k, panel) && panel <= INTERLEAVED);
    let panel_step = packed_panel_len(k, panel);
    if step == 1 {
        let mut wide = vec![E::Wide::default(); if E::NATIVE { 0 } else { panel * CHUNK }];
        for first in (0..m).step_by(panel) {
            let lines = panel.min(m - first);
            let dst = &mut dst[first / panel * panel_step..][..panel_step];
            for i in first + panel..(first + 2 * panel).min(m) {
                for j in (0..k).step_by(CACHE_LINE_BYTES / size_of::<E>()) {
                    prefetch_line(&raw const a.data()[i * row_step + j]);
                }
            }
            if let Some(a) = native(a.rows(first, lines)) {
                // SAFETY: the source is inside its slice, as every `MatRef` is; `k` columns are inside `dst`.
                unsafe { interleave(a.data().as_ptr(), row_step, lines, k, dst.as_mut_ptr(), panel) };
                continue;
            }
            // A line that is longer than a vector's part is read with those after it, which the next panel overwrites.
            let kernels = E::stored_kernels(Isa::current());
            let lanes = kernels.line_lanes.0;
            if let Some(widen_lines) = kernels.widen_lines
                && (panel..=INTERLEAVED).contains(&lanes)
                && lanes <= m - first
            {
                let from = a.data()[first * row_step..].as_ptr();
                // SAFETY: `lanes` lines are inside the source, as every `MatRef` is; `k` columns are inside `dst`, with
                // room for `INTERLEAVED` elements in each; this CPU has the kernel's instruction set.
                unsafe { widen_lines(from, row_step, lanes, k, dst.as_mut_ptr(), panel) };
                continue;
            }
            for start in (0..k).step_by(CHUNK) {
                let len = CHUNK.min(k - start);
                for (i, line) in wide.chunks_exact_mut(CHUNK).take(lines).enumerate() {
                    E::widen_into(&a.data()[(first + i) * row_step + start..][..len], &mut line[..len]);
                }
                let dst = &mut dst[start * panel..][..len * panel + INTERLEAVED];
                // SAFETY: `lines` lines of `CHUNK` are inside `wide`, and `len` columns inside `dst`.
                unsafe { interleave(wide.as_ptr(), CHUNK, lines, len, dst.as_mut_ptr(), panel) };
            }
        }
        return;
    }
    if let Some(a) = native(a)
        && row_step == 1
    {
        pack_columns(a, panel, dst);
        return;
    }
    let mut gathered = vec![E::default(); m];
    let mut wide = vec![E::Wide::default(); m];
    for j in 0..k {
        let column = &a.data()[j * step..];
        if row_step == 1 {
            E::widen_into(&column[..m], &mut wide);
        } else {
            gathered.iter_mut().enumerate().for_each(|(i, x)| *x = column[i * row_step]);
            E::widen_into(&gathered, &mut wide);
        }
        for (p, rows) in wide.chunks(panel).enumerate() {
            dst[p * panel_step + j * panel..][..rows.len()].copy_from_slice(rows);
        }
    }
}

/// Packs rows whose elements at one index of the contraction are contiguous, into panels of `panel` rows.
fn pack_columns<T: Copy>(a: MatRef<'_, T>, panel: usize, dst: &mut [T]) {
    const AHEAD: usize = 2;
    let ((m, k), (_, step)) = (a.shape(), a.strides());
    let panel_step = packed_panel_len(k, panel);
    assert!(dst.len() >= packed_rows_len(m, k, panel) && panel <= INTERLEAVED);
    // Panels whose rows can be read with those after them, which the next copies overwrite.
    let whole = m.saturating_sub(INTERLEAVED - panel) / panel;
    for j in 0..k {
        if j + AHEAD < k {
            let row = &raw const a.data()[(j + AHEAD) * step];
            (0..m)
                .step_by(CACHE_LINE_BYTES / size_of::<T>())
                .for_each(|i| prefetch_line(row.wrapping_add(i)));
        }
        let row = &a.data()[j * step..][..m];
        let (mut from, mut to) = (row.as_ptr(), dst[j * panel..].as_mut_ptr());
        for _ in 0..whole {
            // SAFETY: panel `p` has elements up to `(p + 1) * panel + INTERLEAVED - panel` of the row, which are inside it if `p`
            // is less than `whole`; a panel has room for `INTERLEAVED` elements from each index on.
            unsafe { to.cast::<[T; INTERLEAVED]>().write(from.cast::<[T; INTERLEAVED]>().read()) };
            (from, to) = (from.wrapping_add(panel), to.wrapping_add(panel_step));
        }
        for (p, rest) in row[whole * panel..].chunks(panel).enumerate() {
            dst[(whole + p) * panel_step + j * panel..][..rest.len()].copy_from_slice(rest);
        }
    }
}

/// Packs columns: the elements at one index of the contraction become contiguous, `step` apart from those at the next
/// index; zeros fill the gap.
pub(in crate::gemm) fn pack_cols<E: Stored>(
    b: MatRef<'_, E>,
    step: usize,
    transpose: TransposeFn<E::Wide>,
    dst: &mut [E::Wide],
) {
    let (kernels, (k, n)) = (E::stored_kernels(Isa::current()), b.shape());
    let len = k.checked_mul(step).filter(|&len| len <= dst.len());
    let dst = &mut dst[..len.expect("the rows fit")];
    assert!(n <= step);
    if n < step {
        dst.chunks_exact_mut(step).for_each(|row| row[n..].fill(E::Wide::default()));
    }
    match (b.strides(), native(b)) {
        ((apart, 1), _) => {
            // SAFETY: `k` rows of `n`, `apart`, are inside the source, as every `MatRef` is, and `k` rows of `step` inside
            // `dst`; this CPU has the kernel's instruction set.
            unsafe { (kernels.widen_rows)(b.data().as_ptr(), apart, k, n, dst.as_mut_ptr(), step) };
        }
        ((1, apart), Some(b)) => {
            // SAFETY: the source is inside its slice, as every `MatRef` is, and `k` rows of `step` are inside `dst`.
            unsafe { transpose(b.data().as_ptr(), apart, n, k, dst.as_mut_ptr(), step) };
        }
        ((1, apart), None) => {
            let widen_lines = kernels.widen_lines.expect("such elements are widened");
            // SAFETY: as above, for `n` lines of `k`.
            unsafe { widen_lines(b.data().as_ptr(), apart, n, k, dst.as_mut_ptr(), step) };
        }
        ((row_step, col_step), _) => {
            let mut gathered = vec![E::default(); n];
            for (i, row) in dst.chunks_exact_mut(step).enumerate() {
                let line = &b.data()[i * row_step..];
                gathered.iter_mut().enumerate().for_each(|(j, x)| *x = line[j * col_step]);
                E::widen_into(&gathered, &mut row[..n]);
            }
        }
    }
}
