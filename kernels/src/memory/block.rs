//! A block of a pool with its owner.

use std::ptr::NonNull;
use std::sync::Arc;

use super::pool::POOL;
use super::pool_block::{BlockMemory, FreeBlock, ReturnQueue};

/// A block of the pool of the thread that took it, to which it returns when it is dropped, on whatever thread that happens.
/// It is aligned to 64 bytes.
pub struct PoolBlock {
    ptr: NonNull<u8>,
    len_bytes: usize,
    memory: BlockMemory,
    /// The queue of the pool; `None` if its thread was ending.
    origin: Option<Arc<ReturnQueue>>,
}

// SAFETY: the block owns its bytes, which are read through `&PoolBlock` and written through `&mut PoolBlock` alone.
unsafe impl Send for PoolBlock {}
// SAFETY: as above.
unsafe impl Sync for PoolBlock {}

impl PoolBlock {
    /// Returns a block of at least `len_bytes` from the pool, with arbitrary but initialised contents, or `None` if the
    /// thread's limit or the system leaves no room for it: [`no_room`](super::no_room()) is the fault.
    ///
    /// ```
    /// use isoshard_kernels::memory::PoolBlock;
    /// assert!(PoolBlock::uninit(100).unwrap().as_ptr().addr().is_multiple_of(64));
    /// ```
    pub fn uninit(len_bytes: usize) -> Option<PoolBlock> {
        let from_pool = POOL.try_with(|p| {
            let mut pool = p.borrow_mut();
            Some((pool.take(len_bytes)?, Some(pool.returns.clone())))
        });
        // Without a pool, the thread is ending.
        let (block, origin) = from_pool.unwrap_or_else(|_| Some((FreeBlock::fresh(len_bytes)?, None)))?;
        Some(PoolBlock { ptr: block.ptr, len_bytes, memory: block.memory, origin })
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

impl Drop for PoolBlock {
    fn drop(&mut self) {
        let memory = std::mem::replace(&mut self.memory, BlockMemory::Class { class: 0, segment: None });
        let block = FreeBlock { ptr: self.ptr, memory };
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::pool::SHORT_SEGMENT_BYTES;
    use crate::memory::{pool_stats, set_memory_limit, trim_pool};

    fn block(len_bytes: usize) -> PoolBlock {
        PoolBlock::uninit(len_bytes).expect("there is room")
    }

    #[test]
    fn a_limit_counts_live_and_kept_blocks_and_gives_kept_ones_back_first() {
        std::thread::spawn(|| {
            set_memory_limit(10 * 4096);
            let live = block(4 * 4096);
            drop(block(5 * 4096));
            assert_eq!((pool_stats().live_bytes, pool_stats().free_bytes), (4 * 4096, 5 * 4096));
            let other = block(6 * 4096); // takes the place of the kept block
            assert_eq!((pool_stats().live_bytes, pool_stats().free_bytes), (10 * 4096, 0));
            assert!(PoolBlock::uninit(1).is_none());
            std::thread::spawn(move || drop(live)).join().expect("no panic");
            assert!(PoolBlock::uninit(4 * 4096).is_some(), "the block came back from the other thread");
            drop(other);
            trim_pool();
            assert_eq!((pool_stats().live_bytes, pool_stats().free_bytes), (0, 0));
            set_memory_limit(usize::MAX);
            // Miri ends the program if its own memory is short.
            let has_room = |len_bytes: usize| !cfg!(miri) && PoolBlock::uninit(len_bytes).is_some();
            assert!(!has_room(isize::MAX as usize) && !has_room(1 << 50));
            assert_eq!(pool_stats().live_bytes, 0, "what failed is not counted");
        })
        .join()
        .expect("no panic");
    }

    #[test]
    fn blocks_come_home() {
        trim_pool();
        let lent = block(100_000);
        let (first, before) = (lent.as_ptr() as usize, pool_stats());
        std::thread::spawn(move || {
            drop(lent);
            assert_eq!(pool_stats().free_bytes, 0, "the block is not this thread's");
        })
        .join()
        .unwrap();
        assert_eq!(block(100_000).as_ptr() as usize, first);
        assert_eq!(pool_stats().system_len, before.system_len);
        let orphan = std::thread::spawn(|| block(64)).join().unwrap();
        drop(orphan); // its thread has ended, so dropping it frees the block
        trim_pool();
    }

    /// A span outlives the pool of its thread, and goes back to it while it lives.
    #[test]
    fn spans_come_home_or_keep_their_segment() {
        let mut orphan = std::thread::spawn(|| {
            let [kept, lent] = [block(300_000), block(500_000)];
            assert_eq!(pool_stats().live_bytes, 303_104 + 503_808);
            std::thread::spawn(move || drop(lent)).join().expect("no panic");
            assert_eq!(pool_stats().live_bytes, 303_104 + 503_808, "not taken back yet");
            let before = pool_stats();
            drop(block(200_000)); // a part of the span that came back
            assert_eq!(pool_stats().reused_len, before.reused_len + 1);
            assert_eq!((pool_stats().live_bytes, pool_stats().free_bytes), (303_104, 503_808));
            trim_pool();
            assert_eq!((pool_stats().live_bytes, pool_stats().free_bytes), (303_104, 0));
            kept
        })
        .join()
        .expect("no panic");
        // SAFETY: the block's bytes, which nothing else uses.
        unsafe { orphan.as_mut_ptr().write_bytes(7, orphan.len_bytes()) };
        drop(orphan);
    }

    #[test]
    fn a_limit_holds_for_spans_and_frees_unused_segments_first() {
        std::thread::spawn(|| {
            set_memory_limit(1 << 20);
            drop(block(600_000));
            let live = block(700_000); // longer than the kept segment, which makes room
            assert_eq!((pool_stats().live_bytes, pool_stats().free_bytes), (700_416, 0));
            assert!(PoolBlock::uninit(400_000).is_none());
            drop(live);
            assert!(PoolBlock::uninit(1 << 20).is_some() && PoolBlock::uninit((1 << 20) + 1).is_none());
        })
        .join()
        .expect("no panic");
    }

    /// Short blocks of a large pool do not overlap, and their segments go back once all their blocks are free.
    #[test]
    fn short_blocks_of_a_large_pool_are_parts_of_segments() {
        let run = || {
            let _long = block(1 << 20);
            let before = pool_stats();
            let mut blocks: Vec<PoolBlock> =
                (0..200).map(|i| block([100_000, 64, 5000, 131_072][i % 4])).collect();
            let taken = pool_stats();
            assert_eq!(taken.system_len, before.system_len + 1, "one segment for 200 blocks");
            assert_eq!(taken.reused_len, before.reused_len + 199);
            assert_eq!(taken.live_bytes + taken.free_bytes, before.live_bytes + SHORT_SEGMENT_BYTES);
            for (i, block) in blocks.iter_mut().enumerate() {
                // SAFETY: the block's bytes, which nothing else uses.
                unsafe { block.as_mut_ptr().write_bytes(i as u8, block.len_bytes()) };
            }
            for (i, block) in blocks.iter().enumerate() {
                // SAFETY: as above.
                let bytes = unsafe { std::slice::from_raw_parts(block.as_ptr(), block.len_bytes()) };
                assert!(bytes.iter().step_by(if cfg!(miri) { 997 } else { 1 }).all(|&b| b == i as u8));
            }
            // The rest of the first segment holds no more of these: it is kept as other blocks.
            let more: Vec<PoolBlock> = (0..120).map(|_| block(100_000)).collect();
            let both = pool_stats();
            assert_eq!(both.system_len, before.system_len + 2);
            assert_eq!(both.live_bytes + both.free_bytes, before.live_bytes + 2 * SHORT_SEGMENT_BYTES);
            let last = blocks.pop();
            drop((blocks, more));
            trim_pool();
            let now = pool_stats();
            assert_eq!(
                now.live_bytes + now.free_bytes,
                before.live_bytes + SHORT_SEGMENT_BYTES,
                "one is in use"
            );
            let reused = block(5000).as_ptr() as usize;
            let first = last.as_ref().map_or(0, |last| last.as_ptr() as usize);
            assert!(reused.abs_diff(first) < SHORT_SEGMENT_BYTES);
            let lent = block(64);
            std::thread::spawn(move || drop((last, lent))).join().expect("no panic");
            trim_pool();
            assert_eq!((pool_stats().live_bytes, pool_stats().free_bytes), (before.live_bytes, 0));
            block(5000)
        };
        let mut orphan = std::thread::spawn(run).join().expect("no panic");
        // SAFETY: the block's bytes, which nothing else uses; it keeps its segment.
        unsafe { orphan.as_mut_ptr().write_bytes(7, orphan.len_bytes()) };
    }

    #[test]
    fn blocks_are_reused() {
        trim_pool();
        let first = block(100_000).as_ptr();
        let before = pool_stats();
        assert_eq!(block(99_000).as_ptr(), first);
        assert_eq!(pool_stats().reused_len, before.reused_len + 1);
        trim_pool();
        assert_eq!(pool_stats().free_bytes, 0);
    }
}
