//! Prefetching of the next panel of columns while tiles of the current one are computed, some lines for each leaf. All lines of a tile
//! at once would make the tile's own columns wait, so that panels of few tiles could not be prefetched
//! (`benches/results/2026-11-29-zen5.md`).

use crate::isa::caches::CACHE_LINE_BYTES;
use crate::isa::simd::prefetch_line;

/// More lines at a time would take the buffers in which a core waits for lines.
const MAX_LINES: usize = 8;

/// Memory that will be read soon: rows of some cache lines each.
#[derive(Clone, Copy)]
pub(in crate::gemm) struct Ahead {
    data: *const u8,
    /// The number of rows, and the bytes from one to the next.
    rows: (usize, usize),
    /// The bytes of a row.
    bytes: usize,
    /// The next row, and the byte of it.
    next: (usize, usize),
    /// The number of lines, and of the calls that share them evenly.
    lines: usize,
    calls: usize,
    /// Lines times calls that are due.
    due: usize,
}

impl Ahead {
    /// Nothing to read.
    pub(in crate::gemm) const NOTHING: Ahead =
        Ahead { data: std::ptr::null(), rows: (0, 0), bytes: 1, next: (0, 0), lines: 0, calls: 1, due: 0 };

    /// Returns the memory of `rows` rows of `len` elements, `step` elements apart, to be prefetched in `calls` calls.
    pub(in crate::gemm) fn new<T>(
        data: *const T,
        rows: usize,
        step: usize,
        len: usize,
        calls: usize,
    ) -> Ahead {
        let bytes = (len * size_of::<T>()).max(1);
        let (lines, calls) = (rows * bytes.div_ceil(CACHE_LINE_BYTES), calls.max(1));
        if lines.div_ceil(calls) > MAX_LINES {
            return Ahead::NOTHING;
        }
        Ahead {
            data: data.cast(),
            rows: (rows, step.wrapping_mul(size_of::<T>())),
            bytes,
            next: (0, 0),
            lines,
            calls,
            due: 0,
        }
    }

    /// Prefetches the next lines, until there are no more. Returns what is left. Lines that come much earlier than others would push
    /// the current panel out of the first cache.
    #[inline(always)]
    pub(in crate::gemm) fn advanced(self) -> Ahead {
        let ((mut row, mut at), mut due) = (self.next, self.due + self.lines);
        while due >= self.calls {
            due -= self.calls;
            if row == self.rows.0 {
                break;
            }
            // The last byte of 64: if rows do not begin with a line, the panel before has read their first one.
            let byte = (at + CACHE_LINE_BYTES).min(self.bytes) - 1;
            prefetch_line(self.data.wrapping_add(row.wrapping_mul(self.rows.1)).wrapping_add(byte));
            at += CACHE_LINE_BYTES;
            if at >= self.bytes {
                (row, at) = (row + 1, 0);
            }
        }
        Ahead { next: (row, at), due, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_lines_are_prefetched_in_the_calls() {
        let data = [0.0f32; 1 << 14];
        for (rows, step, len, calls) in
            [(100, 160, 48, 40), (1, 0, 4800, 300), (7, 33, 33, 1000), (64, 64, 16, 8)]
        {
            let all = Ahead::new(data.as_ptr(), rows, step, len, calls);
            let after = |calls| (0..calls).fold(all, |ahead, _| ahead.advanced()).next;
            assert_eq!(after(calls), (rows, 0), "{rows} {len} {calls}");
            assert_ne!(after(calls - 1), (rows, 0), "{rows} {len} {calls}");
            assert_eq!(after(calls + 9), (rows, 0), "{rows} {len} {calls}");
        }
        let nothing = Ahead::new(data.as_ptr(), 100, 160, 48, 30);
        assert_eq!(
            (nothing.lines, nothing.advanced().next),
            (0, (0, 0)),
            "more lines than a leaf has time for"
        );
    }
}
