//! Lists that count visits of their elements in tests.

use std::ops::{Deref, DerefMut};

/// A list of parameters or units. In tests, [`visits`] counts the elements that iterators of such lists give, so that a test
/// finds a scan that is made once per parameter.
#[derive(Clone, Debug)]
pub(crate) struct CountedList<T>(Vec<T>);

#[cfg(test)]
thread_local!(static VISITS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) });

/// Returns the number of elements that this thread has visited.
#[cfg(test)]
pub(crate) fn visits() -> usize {
    VISITS.get()
}

/// Counts a visit of an element.
#[inline]
pub(crate) fn visit() {
    #[cfg(test)]
    VISITS.set(VISITS.get() + 1);
}

impl<T> CountedList<T> {
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &T> + ExactSizeIterator + Clone {
        self.0.iter().inspect(|_| visit())
    }

    pub fn iter_mut(&mut self) -> impl DoubleEndedIterator<Item = &mut T> {
        self.0.iter_mut().inspect(|_| visit())
    }
}

impl<T> Default for CountedList<T> {
    fn default() -> CountedList<T> {
        CountedList(Vec::new())
    }
}

impl<T> FromIterator<T> for CountedList<T> {
    fn from_iter<I: IntoIterator<Item = T>>(all: I) -> CountedList<T> {
        CountedList(all.into_iter().collect())
    }
}

impl<T> Deref for CountedList<T> {
    type Target = Vec<T>;

    fn deref(&self) -> &Vec<T> {
        &self.0
    }
}

impl<T> DerefMut for CountedList<T> {
    fn deref_mut(&mut self) -> &mut Vec<T> {
        &mut self.0
    }
}
