//! Buffers of the kernels of attention.

use std::marker::PhantomData;

use crate::gemm::Gemm;
use crate::memory::{PoolBlock, no_room, unwind};

/// A temporary buffer from the pool, with arbitrary elements at first.
pub(super) struct Scratch<T> {
    block: PoolBlock,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Gemm> Scratch<T> {
    /// Returns a buffer of `len` elements. Unwinds up to [`catch`](crate::memory::catch) if there is no room.
    pub(super) fn new(len: usize) -> Self {
        let len_bytes = len.saturating_mul(size_of::<T>());
        let fits = len_bytes <= isize::MAX as usize;
        let block = if fits { PoolBlock::uninit(len_bytes) } else { None };
        let block = block.unwrap_or_else(|| unwind(no_room(format!("{}[{len}]", T::DTYPE), len_bytes)));
        Scratch { block, len, elements: PhantomData }
    }

    pub(super) fn get(&mut self) -> &mut [T] {
        // SAFETY: the block is initialised, aligned to 64 bytes and has `len` elements; every bit pattern is a number, and
        // numbers have no padding.
        unsafe { std::slice::from_raw_parts_mut(self.block.as_mut_ptr().cast(), self.len) }
    }

    pub(super) fn view(&self) -> &[T] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(self.block.as_ptr().cast(), self.len) }
    }
}
