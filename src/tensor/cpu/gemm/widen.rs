//! Copies of stored elements as the wide numbers of the computation, in rows or in columns.

use super::super::real::Widen;
use super::lines::{LineVector, StoredIn, UnitsIn};
use super::vector::Vector;

/// Copies `rows` rows of `len` elements, widened.
///
/// # Safety
/// The CPU has `V`'s instruction set. `src` and `dst` cover the rows, which are `src_step` and `dst_step` apart, and do not
/// overlap.
#[inline(always)]
pub(super) unsafe fn widen_rows<V, E>(
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
pub(super) unsafe fn widen_lines<V, E>(
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
        for (line, k) in (0..lines).flat_map(|line| (0..len).map(move |k| (line, k))) {
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
