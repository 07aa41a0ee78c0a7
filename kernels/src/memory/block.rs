//! A block of a pool with its owner.

use std::ptr::NonNull;
use std::sync::Arc;

use super::pool::POOL;
use super::pool_block::{BlockMemory, PoolBlock, ReturnQueue};

/// A block of the pool of the thread that took it, to which it returns when it is dropped, on whatever thread that happens.
/// It is aligned to 64 bytes.
pub struct Block {
    ptr: NonNull<u8>,
    len_bytes: usize,
    memory: BlockMemory,
    /// The queue of the pool; `None` if its thread was ending.
    origin: Option<Arc<ReturnQueue>>,
}

// SAFETY: the block owns its bytes, which are read through `&Block` and written through `&mut Block` alone.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Block {
    /// Returns a block of at least `len_bytes` from the pool, with arbitrary but initialised contents, or `None` if the
    /// thread's limit or the system leaves no room for it: [`no_room`](super::no_room()) is the fault.
    ///
    /// ```
    /// use isoshard_kernels::memory::Block;
    /// assert!(Block::uninit(100).unwrap().as_ptr().addr().is_multiple_of(64));
    /// ```
    pub fn uninit(len_bytes: usize) -> Option<Block> {
        let from_pool = POOL.try_with(|p| {
            let mut pool = p.borrow_mut();
            Some((pool.take(len_bytes)?, Some(pool.returns.clone())))
        });
        // Without a pool, the thread is ending.
        let (block, origin) = from_pool.unwrap_or_else(|_| Some((PoolBlock::fresh(len_bytes)?, None)))?;
        Some(Block { ptr: block.ptr, len_bytes, memory: block.memory, origin })
    }

    /// Returns the number of bytes that were asked for.
    #[inline]
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Returns the address of the first byte.
    #[inline]
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr.as_ptr()
    }

    /// Returns the address of the first byte, for writing.
    #[inline]
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.ptr.as_ptr()
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let memory = std::mem::replace(&mut self.memory, BlockMemory::Class { class: 0, segment: None });
        let block = PoolBlock { ptr: self.ptr, memory };
        let Some(origin) = self.origin.take() else { return block.free() };
        // The block goes to this thread's pool if it came from there, else to the queue of the thread that it came
        // from.
        let mut block = Some(block);
        let _ = POOL.try_with(|p| {
            if let Ok(mut pool) = p.try_borrow_mut()
                && Arc::ptr_eq(&pool.returns, &origin)
                && let Some(excess) = block.take().and_then(|b| pool.put(b))
            {
                excess.free();
            }
        });
        if let Some(block) = block {
            origin.push(block);
        }
    }
}
