//! Results of kernels, which are cut into parts for several [threads](crate::threads::team).

use std::marker::PhantomData;

/// Something that kernels write, and that is cut into parts.
pub trait Cut: Sized + Send {
    /// Returns the first `at` of its elements or rows, and the rest.
    fn cut(self, at: usize) -> (Self, Self);
}

/// Rows of `len` elements, which are cut between rows.
pub struct RowsMut<'a, T> {
    /// The rows, one after the other.
    pub data: &'a mut [T],
    /// The number of elements in a row.
    pub len: usize,
}

/// Rows of `len` elements that several threads write: any rows, in any order.
pub(crate) struct SharedRows<'a, T> {
    data: *mut T,
    elements: usize,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: `row` alone gives elements out, and its callers promise to have one row once at a time; `T` may be written on
// other threads.
unsafe impl<T: Send> Sync for SharedRows<'_, T> {}

impl<'a, T> SharedRows<'a, T> {
    /// Returns the rows of `len` elements.
    pub(crate) fn new(data: &'a mut [T], len: usize) -> SharedRows<'a, T> {
        SharedRows { data: data.as_mut_ptr(), elements: data.len(), len, borrow: PhantomData }
    }

    /// Returns the number of elements in a row.
    pub(crate) fn row_len(&self) -> usize {
        self.len
    }

    /// Returns the address of a row, to prefetch it. It may be outside the data.
    #[inline(always)]
    pub(crate) fn address(&self, i: usize) -> *const T {
        self.data.cast_const().wrapping_add(i.wrapping_mul(self.len))
    }

    /// Returns a row.
    ///
    /// # Safety
    /// No other reference to the row lives.
    #[expect(clippy::mut_from_ref, reason = "the caller promises that the references are to different rows")]
    pub(crate) unsafe fn row(&self, i: usize) -> &mut [T] {
        assert!(i < usize::MAX / self.len.max(1) && (i + 1) * self.len <= self.elements, "a row of the data");
        // SAFETY: the row is inside the data, as checked above; the data is borrowed exclusively for `'a`, and the caller
        // has the row alone.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(i * self.len), self.len) }
    }
}

impl Cut for () {
    fn cut(self, _: usize) -> ((), ()) {
        ((), ())
    }
}

impl<T: Cut> Cut for Option<T> {
    fn cut(self, at: usize) -> (Self, Self) {
        self.map_or((None, None), |x| {
            let (head, tail) = x.cut(at);
            (Some(head), Some(tail))
        })
    }
}

impl<T: Send> Cut for &mut [T] {
    fn cut(self, at: usize) -> (Self, Self) {
        self.split_at_mut(at)
    }
}

impl<T: Send> Cut for RowsMut<'_, T> {
    fn cut(self, at: usize) -> (Self, Self) {
        let (head, tail) = self.data.split_at_mut(at * self.len);
        (RowsMut { data: head, len: self.len }, RowsMut { data: tail, len: self.len })
    }
}

impl<A: Cut, B: Cut> Cut for (A, B) {
    fn cut(self, at: usize) -> (Self, Self) {
        let (a, b) = (self.0.cut(at), self.1.cut(at));
        ((a.0, b.0), (a.1, b.1))
    }
}

impl<A: Cut, B: Cut, C: Cut> Cut for (A, B, C) {
    fn cut(self, at: usize) -> (Self, Self) {
        let (a, b, c) = (self.0.cut(at), self.1.cut(at), self.2.cut(at));
        ((a.0, b.0, c.0), (a.1, b.1, c.1))
    }
}
