//! Copies of stored elements as the wide numbers of the computation, in rows or in columns.

use super::lines::{LineVector, StoredIn, UnitsIn};
use super::vector::Vector;
use crate::num::real::Widen;

/// Copies `rows` rows of `len` elements, widened.
///
/// # Safety
/// The CPU has `V`'s instruction set. `src` and `dst` cover the rows, which are `src_step` and `dst_step` apart, and do not
/// overlap.
#[inline(always)]
pub(in crate::gemm) unsafe fn widen_rows<V, E>(
    src: *const E,
    src_step: usize,
    rows: usize,
    len: usize,
    dst: *mut V::T,
    dst_step: usize,
) where
    V: Vector,
    E: StoredIn<V> + Widen<Wide = V::T>,
{
    for row in 0..rows {
        // SAFETY: the caller's promise, for everything below.
        unsafe {
            let (src, dst) = (src.add(row * src_step), dst.add(row * dst_step));
            if len < V::LANES {
                E::widen_into(std::slice::from_raw_parts(src, len), std::slice::from_raw_parts_mut(dst, len));
                continue;
            }
            for at in (0..len / V::LANES * V::LANES).step_by(V::LANES) {
                E::load_lanes(src.add(at)).store(dst.add(at));
            }
            // The last vector may begin in the one before.
            let last = len - V::LANES;
            E::load_lanes(src.add(last)).store(dst.add(last));
        }
    }
}

/// Copies `lines` lines of `len` elements into columns, widened: element `k` of line `j` goes to `dst[k * dst_step + j]`. With
/// `LANES` lines and columns that are closer together, each column overwrites what the one before has written beyond it;
/// the last one writes beyond the lines.
///
/// # Safety
/// The CPU has `V`'s instruction set. `src` and `dst` cover the lines and whole vectors, and do not overlap.
#[inline(always)]
pub(in crate::gemm) unsafe fn widen_lines<V, E>(
    src: *const E,
    src_step: usize,
    lines: usize,
    len: usize,
    dst: *mut V::T,
    dst_step: usize,
) where
    V: LineVector,
    E: UnitsIn<V> + Widen<Wide = V::T>,
{
    let piece = V::PIECE * E::PER_UNIT;
    if lines < V::LANES || len < piece {
        for (k, line) in (0..len).flat_map(|k| (0..lines).map(move |line| (k, line))) {
            // SAFETY: the caller's promise; an element is a slice of one.
            unsafe {
                let from = std::slice::from_raw_parts(src.add(line * src_step + k), 1);
                E::widen_into(from, std::slice::from_raw_parts_mut(dst.add(k * dst_step + line), 1));
            }
        }
        return;
    }
    let mut line = 0;
    while line < lines {
        // The last vector may begin in the one before, and the last piece too.
        line = line.min(lines - V::LANES);
        let mut k = 0;
        while k < len {
            k = k.min(len - piece);
            // SAFETY: the caller's promise, for everything below.
            unsafe {
                let units = V::piece(src.add(line * src_step + k).cast(), src_step * size_of::<E>());
                for &unit in units.as_ref() {
                    for column in &E::columns(unit)[..E::PER_UNIT] {
                        column.store(dst.add(k * dst_step + line));
                        k += 1;
                    }
                }
            }
        }
        line += V::LANES;
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::super::stored::Stored;
    use crate::isa::simd::Isa;
    use crate::num::real::Real;

    /// Columns that are closer together than a vector is long have the elements of their own lines, also if lines are
    /// shorter than a piece.
    fn check<E: Stored>(of: impl Fn(f64) -> E) {
        for &isa in Isa::available() {
            let kernels = E::stored_kernels(isa);
            let (lanes, widen_lines) = (kernels.line_lanes.0, kernels.widen_lines.expect("16-bit elements"));
            for (len, apart) in (1..=33).flat_map(|len| (1..=lanes + 1).map(move |apart| (len, apart))) {
                let (step, room) = (len + 3, len * apart + lanes);
                let lines: Vec<E> = (0..lanes * step).map(|i| of((i % 97) as f64)).collect();
                let mut columns = vec![E::Wide::of(-1.0); room];
                // SAFETY: the lines are there, and room for whole vectors; this CPU has the kernel's instruction set.
                unsafe {
                    widen_lines(lines.as_ptr(), step, lanes, len, columns.as_mut_ptr(), apart);
                }
                for (k, line) in (0..len).flat_map(|k| (0..apart.min(lanes)).map(move |line| (k, line))) {
                    let (got, want) =
                        (columns[k * apart + line], E::Wide::of(((line * step + k) % 97) as f64));
                    assert!(
                        got == want,
                        "{isa:?}, {len} of {lanes} lines, {apart} apart: {got:?} at {k}, {line}"
                    );
                }
            }
        }
    }

    #[test]
    fn each_column_has_its_own_lines() {
        check(bf16::from_f64);
        check(f16::from_f64);
    }
}
