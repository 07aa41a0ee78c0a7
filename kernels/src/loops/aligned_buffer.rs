//! A buffer aligned to a cache line.

use std::ops::{Deref, DerefMut};

use crate::isa::caches::CACHE_LINE_BYTES;

/// A buffer aligned to a cache line, so that no vector load touches two lines.
pub struct AlignedBuffer<W> {
    all: Vec<W>,
    padding: usize,
    start: usize,
}

impl<W: Default + Clone> AlignedBuffer<W> {
    /// Returns a buffer of `len` defaults.
    pub fn new(len: usize) -> AlignedBuffer<W> {
        let padding = if len == 0 { 0 } else { CACHE_LINE_BYTES / size_of::<W>() };
        let all = vec![W::default(); len + padding];
        let start = all.as_ptr().align_offset(CACHE_LINE_BYTES).min(padding);
        AlignedBuffer { all, padding, start }
    }
}

impl<W: Default + Clone> Clone for AlignedBuffer<W> {
    /// Returns an aligned buffer of the same length, without the contents.
    fn clone(&self) -> AlignedBuffer<W> {
        AlignedBuffer::new(self.all.len() - self.padding)
    }
}

impl<W> Deref for AlignedBuffer<W> {
    type Target = [W];
    fn deref(&self) -> &[W] {
        &self.all[self.start..]
    }
}

impl<W> DerefMut for AlignedBuffer<W> {
    fn deref_mut(&mut self) -> &mut [W] {
        &mut self.all[self.start..]
    }
}
