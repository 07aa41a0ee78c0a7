//! Prefetching of the next panel of columns while tiles of the current one are computed.

use super::vector::prefetch;

/// The bytes of a cache line.
pub(super) const LINE_BYTES: usize = 64;

/// Memory that will be read soon: rows of some cache lines each.
pub(super) struct Ahead {
    data: *const u8,
    /// The number of rows, and the bytes from one to the next.
    rows: (usize, usize),
    /// The number of lines in a row.
    lines: usize,
    /// The next row and line.
    next: (usize, usize),
    /// The number of lines at a time.
    share: usize,
}

impl Ahead {
    /// Nothing to read.
    pub(super) const NOTHING: Ahead =
        Ahead { data: std::ptr::null(), rows: (0, 0), lines: 1, next: (0, 0), share: 0 };

    /// Returns the memory of `rows` rows of `len` elements, `step` elements apart, to be prefetched in `calls` calls.
    pub(super) fn new<T>(data: *const T, rows: usize, step: usize, len: usize, calls: usize) -> Ahead {
        let lines = (len * size_of::<T>()).div_ceil(LINE_BYTES).max(1);
        let share = (rows * lines).div_ceil(calls.max(1));
        Ahead {
            data: data.cast(),
            rows: (rows, step.wrapping_mul(size_of::<T>())),
            lines,
            next: (0, 0),
            share,
        }
    }

    /// Prefetches the next lines, until there are no more.
    #[inline]
    pub(super) fn advance(&mut self) {
        let (mut row, mut line) = self.next;
        for _ in 0..self.share {
            if row == self.rows.0 {
                break;
            }
            prefetch(self.data.wrapping_add(row.wrapping_mul(self.rows.1)).wrapping_add(line * LINE_BYTES));
            line += 1;
            if line == self.lines {
                (row, line) = (row + 1, 0);
            }
        }
        self.next = (row, line);
    }
}
