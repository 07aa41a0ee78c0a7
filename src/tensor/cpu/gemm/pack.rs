//! Packing of operands into the form that tiles read: widened to f32, gathered, transposed. Operands that already have
//! that form are read in place.

use super::super::real::Widen;
use super::matrix::MatRef;
use super::transpose::TransposeFn;

/// Returns the matrix in the type of the computation, or `None` if its elements must be widened.
pub(super) fn native<E: Widen>(x: MatRef<'_, E>) -> Option<MatRef<'_, E::Wide>> {
    E::NATIVE.then(|| x.with_data(E::load(x.data(), &mut [])))
}

/// Panels of rows of the left operand, as tiles read them: row `r` of panel `p` begins at `p * panel_step + r *
/// steps.0`.
#[derive(Clone, Copy)]
pub(super) struct RowPanels<T> {
    pub(super) data: *const T,
    pub(super) panel_step: usize,
    /// The distances from row to row and along the contraction.
    pub(super) steps: (usize, usize),
}

/// Returns the number of elements that [`pack_rows`] writes.
pub(super) fn packed_rows_len(rows: usize, k: usize, panel: usize) -> usize {
    rows.next_multiple_of(panel) * k
}

/// Widens rows into panels of `panel` rows. Rows that are contiguous along the contraction stay so; else the elements
/// of a panel's rows at one index of the contraction become contiguous.
pub(super) fn pack_rows<E: Widen>(a: MatRef<'_, E>, panel: usize, dst: &mut [E::Wide]) -> RowPanels<E::Wide> {
    let ((m, k), (row_step, step)) = (a.shape(), a.strides());
    assert!(dst.len() >= packed_rows_len(m, k, panel));
    if step == 1 {
        for (i, line) in dst.chunks_exact_mut(k).take(m).enumerate() {
            E::widen_into(a.row(i), line);
        }
        return RowPanels { data: dst.as_ptr(), panel_step: panel * k, steps: (k, 1) };
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
            dst[(p * k + j) * panel..][..rows.len()].copy_from_slice(rows);
        }
    }
    RowPanels { data: dst.as_ptr(), panel_step: panel * k, steps: (1, panel) }
}

/// Packs columns: the elements at one index of the contraction become contiguous, `step` apart from those at the next
/// index; zeros fill the gap.
pub(super) fn pack_cols<E: Widen>(
    b: MatRef<'_, E>,
    step: usize,
    transpose: TransposeFn<E::Wide>,
    dst: &mut [E::Wide],
) {
    let (k, n) = b.shape();
    let dst = &mut dst[..k * step];
    assert!(n <= step);
    if n < step {
        dst.chunks_exact_mut(step).for_each(|row| row[n..].fill(E::Wide::default()));
    }
    match (b.strides(), native(b)) {
        ((_, 1), _) => {
            for (i, row) in dst.chunks_exact_mut(step).enumerate() {
                E::widen_into(b.row(i), &mut row[..n]);
            }
        }
        ((1, apart), Some(b)) => {
            // SAFETY: the source is inside its slice, as every `MatRef` is, and `k` rows of `step` are inside `dst`.
            unsafe { transpose(b.data().as_ptr(), apart, n, k, dst.as_mut_ptr(), step) };
        }
        ((1, _), None) => transpose_widened(b, step, transpose, dst),
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

/// Packs columns that are contiguous along the contraction, a chunk of indices at a time, with widening.
fn transpose_widened<E: Widen>(
    b: MatRef<'_, E>,
    step: usize,
    transpose: TransposeFn<E::Wide>,
    dst: &mut [E::Wide],
) {
    const CHUNK: usize = 64;
    let ((k, n), (_, col_step)) = (b.shape(), b.strides());
    let mut wide = vec![E::Wide::default(); n * CHUNK];
    for start in (0..k).step_by(CHUNK) {
        let len = CHUNK.min(k - start);
        for (j, line) in wide.chunks_exact_mut(CHUNK).enumerate() {
            E::widen_into(&b.data()[j * col_step + start..][..len], &mut line[..len]);
        }
        let dst = &mut dst[start * step..][..len * step];
        // SAFETY: `n` lines of `CHUNK` are inside `wide`, and `len` rows of `step` inside `dst`.
        unsafe { transpose(wide.as_ptr(), CHUNK, n, len, dst.as_mut_ptr(), step) };
    }
}
