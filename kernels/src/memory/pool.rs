//! The pool of blocks that each thread keeps for its tensors, and the count of their bytes.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use super::fault::MemoryFault;
use super::pool_block::{BlockMemory, CLASSES, FreeBlock, ReturnQueue, class_bytes, class_of, class_within};
use super::segments::{MIN_SPAN_BYTES, SHARED_BYTES, SHARED_FROM_BYTES, Segment, SpanList, span_bytes};
use super::system_block;

/// The most bytes that one thread's pool keeps for reuse; further blocks go back to the system.
const POOL_LIMIT_BYTES: usize = 2 << 30;

/// The length of a segment of short blocks. Bytes that no block has had take addresses, not memory.
pub(crate) const SHORT_SEGMENT_BYTES: usize = system_block::WHOLE_PAGES_BYTES;

/// The state of one thread's pool of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolStats {
    /// Bytes of the blocks that tensors hold. A block that another thread has dropped counts until this thread's pool takes it
    /// back, which it does before it takes one from the system.
    pub live_bytes: usize,
    /// The most that `live_bytes` has been, since the thread began or since [`reset_peak`].
    pub peak_live_bytes: usize,
    /// Bytes kept for reuse, and addresses of a block from the system that no tensor has used yet.
    pub free_bytes: usize,
    /// The most bytes that `live_bytes` and `free_bytes` may be together; `usize::MAX` if no limit was set.
    pub limit_bytes: usize,
    /// The number of blocks that came from the system so far.
    pub system_len: u64,
    /// The number of blocks that were reused so far.
    pub reused_len: u64,
}

/// Counts the peak of the calling thread's live bytes anew, from what is live now.
///
/// ```
/// use isoshard_kernels::memory::{PoolBlock, pool_stats, reset_peak};
/// drop(PoolBlock::uninit(1 << 20));
/// assert!(pool_stats().peak_live_bytes >= 1 << 20);
/// reset_peak();
/// assert_eq!(pool_stats().peak_live_bytes, 0);
/// ```
pub fn reset_peak() {
    let _ = POOL.try_with(|pool| {
        let stats = &mut pool.borrow_mut().stats;
        stats.peak_live_bytes = stats.live_bytes;
    });
}

/// Returns the state of the calling thread's pool.
///
/// ```
/// use isoshard_kernels::memory::{PoolBlock, pool_stats};
/// let before = pool_stats();
/// let _block = PoolBlock::uninit(1 << 20);
/// let now = pool_stats();
/// assert_eq!(now.system_len + now.reused_len, before.system_len + before.reused_len + 1);
/// ```
pub fn pool_stats() -> PoolStats {
    POOL.try_with(|p| p.borrow().stats).unwrap_or_default()
}

/// Sets the most bytes that the blocks of the calling thread's tensors may take, those kept for reuse included;
/// `usize::MAX` is no limit.
///
/// At the limit the thread first gives back the blocks that it keeps, but for free parts of larger blocks that are in
/// use; then an allocation is a [fault](super::MemoryFault). Lists that a tensor takes over,
/// and the lists that the crate and the standard library need besides tensors, do not count.
///
/// ```
/// use isoshard_kernels::memory::{PoolBlock, set_memory_limit};
/// set_memory_limit(1 << 20);
/// assert!(PoolBlock::uninit(900_000).is_some());
/// assert!(PoolBlock::uninit(4 << 20).is_none());
/// set_memory_limit(usize::MAX);
/// ```
pub fn set_memory_limit(bytes: usize) {
    POOL.with(|p| p.borrow_mut().stats.limit_bytes = bytes);
}

/// Returns the fault of a tensor or list of `wanted_bytes` for which the calling thread has no room.
#[cold]
pub fn no_room(wanted: String, wanted_bytes: usize) -> MemoryFault {
    let PoolStats { live_bytes, free_bytes: kept_bytes, limit_bytes, .. } = pool_stats();
    MemoryFault { device: "cpu".into(), wanted, wanted_bytes, live_bytes, kept_bytes, limit_bytes }
}

/// Gives the blocks that the calling thread's pool keeps for reuse back to the system, but for free parts of larger
/// blocks that are in use.
///
/// ```
/// use isoshard_kernels::memory::{PoolBlock, pool_stats, trim_pool};
/// drop(PoolBlock::uninit(80_000));
/// assert!(pool_stats().free_bytes >= 80_000);
/// trim_pool();
/// assert_eq!(pool_stats().free_bytes, 0);
/// ```
pub fn trim_pool() {
    POOL.with(|p| p.borrow_mut().trim());
}

/// The blocks that a thread keeps for reuse: by size class, and spans.
pub(crate) struct BlockPool {
    free: Vec<Vec<FreeBlock>>,
    /// The bytes of the last segment of short blocks that no block has had.
    unused: Option<UnusedBytes>,
    spans: SpanList,
    pub(crate) returns: Arc<ReturnQueue>,
    stats: PoolStats,
}

/// The end of a segment, in bytes that are not 0.
struct UnusedBytes {
    segment: Arc<Segment>,
    len_bytes: usize,
}

impl UnusedBytes {
    /// Returns a block of the class at the start of these bytes, and the rest of them.
    fn cut(self, class: usize) -> (FreeBlock, Option<UnusedBytes>) {
        let UnusedBytes { segment, len_bytes } = self;
        // SAFETY: these bytes are the last of their segment.
        let ptr = unsafe { segment.start().add(segment.len_bytes() - len_bytes) };
        let left = len_bytes - class_bytes(class);
        let rest = (left > 0).then(|| UnusedBytes { segment: segment.clone(), len_bytes: left });
        (FreeBlock { ptr, memory: BlockMemory::Class { class, segment: Some(segment) } }, rest)
    }
}

thread_local! {
    pub(crate) static POOL: RefCell<BlockPool> = RefCell::new(BlockPool {
        free: (0..CLASSES).map(|_| Vec::new()).collect(),
        unused: None,
        spans: SpanList::default(),
        returns: Arc::new(ReturnQueue(Mutex::new(Vec::new()))),
        stats: PoolStats::default(),
    });
}

/// An empty pool without a limit.
impl Default for PoolStats {
    fn default() -> PoolStats {
        PoolStats {
            live_bytes: 0,
            peak_live_bytes: 0,
            free_bytes: 0,
            limit_bytes: usize::MAX,
            system_len: 0,
            reused_len: 0,
        }
    }
}

impl PoolStats {
    fn add_live(&mut self, bytes: usize) {
        self.live_bytes += bytes;
        self.peak_live_bytes = self.peak_live_bytes.max(self.live_bytes);
    }

    /// Returns true if the limit leaves room for so many bytes from the system.
    fn has_room(&self, bytes: usize) -> bool {
        bytes <= self.limit_bytes.saturating_sub(self.live_bytes).saturating_sub(self.free_bytes)
    }
}

impl BlockPool {
    /// Returns a kept block of the length, else one from the system, or `None` if there is no room for it.
    #[inline]
    pub(crate) fn take(&mut self, len_bytes: usize) -> Option<FreeBlock> {
        if len_bytes > MIN_SPAN_BYTES {
            return self.take_span(span_bytes(len_bytes)?);
        }
        let class = class_of(len_bytes);
        if self.free[class].is_empty() {
            self.take_back();
        }
        let bytes = class_bytes(class);
        let block = match self.free[class].pop() {
            Some(kept) => {
                self.stats.reused_len += 1;
                kept
            }
            None => self.first_of_class(class)?,
        };
        self.stats.free_bytes -= bytes;
        self.stats.add_live(bytes);
        Some(block)
    }

    /// Returns a block that no tensor has had, counted as free: a part of a segment, or from the system by itself. `None` if there is
    /// no room for it.
    #[cold]
    fn first_of_class(&mut self, class: usize) -> Option<FreeBlock> {
        let bytes = class_bytes(class);
        if self.unused.as_ref().is_some_and(|unused| unused.len_bytes >= bytes) {
            self.stats.reused_len += 1;
        } else if let Some(segment) = self.shared_segment(SHORT_SEGMENT_BYTES) {
            self.keep_unused();
            self.stats.system_len += 1;
            self.stats.free_bytes += segment.len_bytes();
            self.unused = Some(UnusedBytes { len_bytes: segment.len_bytes(), segment });
        } else {
            let ptr = self.fresh(bytes, || system_block::allocate(bytes))?;
            self.stats.system_len += 1;
            self.stats.free_bytes += bytes;
            return Some(FreeBlock { ptr, memory: BlockMemory::Class { class, segment: None } });
        }
        let (block, rest) = self.unused.take()?.cut(class);
        self.unused = rest;
        Some(block)
    }

    /// Keeps the unused bytes as blocks.
    fn keep_unused(&mut self) {
        while let Some(unused) = self.unused.take() {
            let class = class_within(unused.len_bytes);
            let (block, rest) = unused.cut(class);
            self.free[class].push(block);
            self.unused = rest;
        }
    }

    /// Returns a span of kept segments, else of a new one, or `None` if there is no room for it.
    #[inline(never)]
    fn take_span(&mut self, bytes: usize) -> Option<FreeBlock> {
        self.take_back();
        let kept = self.spans.take(bytes);
        let (ptr, bytes, segment) = match kept {
            Some(kept) => {
                self.stats.reused_len += 1;
                kept
            }
            None => {
                let shared = self.shared_segment(bytes.max(SHARED_BYTES));
                let segment = shared.or_else(|| self.fresh(bytes, || Segment::new(bytes)))?;
                self.stats.system_len += 1;
                self.stats.free_bytes += segment.len_bytes();
                self.spans.add(segment);
                self.spans.take(bytes)?
            }
        };
        self.stats.free_bytes -= bytes;
        self.stats.add_live(bytes);
        Some(FreeBlock { ptr, memory: BlockMemory::Span { _segment: segment } })
    }

    /// Returns a segment for several blocks, or `None` for a small pool, which takes no more than it needs, or one whose limit is
    /// near: a segment in use does not go back to the system.
    fn shared_segment(&self, len_bytes: usize) -> Option<Arc<Segment>> {
        let PoolStats { live_bytes, free_bytes, .. } = self.stats;
        let is_worthwhile =
            live_bytes + free_bytes >= SHARED_FROM_BYTES && self.stats.has_room(len_bytes.saturating_mul(8));
        if is_worthwhile { Segment::new(len_bytes) } else { None }
    }

    /// Returns what `allocate` takes from the system, of `bytes`, if need be after giving back all kept blocks.
    fn fresh<T>(&mut self, bytes: usize, allocate: impl Fn() -> Option<T>) -> Option<T> {
        let fresh = self.stats.has_room(bytes).then(&allocate).flatten();
        fresh.or_else(|| {
            self.trim();
            self.stats.has_room(bytes).then(&allocate).flatten()
        })
    }

    /// Takes back the blocks that other threads have dropped.
    fn take_back(&mut self) {
        let returns = self.returns.clone();
        returns.drain(|block| {
            if let Some(block) = self.put(block) {
                block.free();
            }
        });
    }

    /// Keeps a block for reuse, or returns it if the pool is full.
    pub(crate) fn put(&mut self, block: FreeBlock) -> Option<FreeBlock> {
        match &block.memory {
            BlockMemory::Class { class, segment } => {
                let bytes = class_bytes(*class);
                self.stats.live_bytes -= bytes;
                // A part of a segment gives nothing back by itself.
                if segment.is_none() && self.stats.free_bytes + bytes > POOL_LIMIT_BYTES {
                    return Some(block);
                }
                self.stats.free_bytes += bytes;
                self.free[*class].push(block);
            }
            BlockMemory::Span { .. } => {
                let bytes = self.spans.give(block.ptr);
                self.stats.live_bytes -= bytes;
                self.stats.free_bytes += bytes;
                let excess = self.stats.free_bytes.saturating_sub(POOL_LIMIT_BYTES);
                self.stats.free_bytes -= self.spans.trim(excess);
            }
        }
        None
    }

    /// Frees all kept blocks, but for parts of segments that are in use.
    fn trim(&mut self) {
        self.take_back();
        self.keep_unused();
        // The kept bytes of each segment: if these are all, it is free.
        let mut kept = BTreeMap::<*const Segment, usize>::new();
        for block in self.free.iter().flatten() {
            if let BlockMemory::Class { class, segment: Some(segment) } = &block.memory {
                *kept.entry(Arc::as_ptr(segment)).or_default() += class_bytes(*class);
            }
        }
        for (class, blocks) in self.free.iter_mut().enumerate() {
            let goes_back = |block: &mut FreeBlock| match &block.memory {
                BlockMemory::Class { segment: Some(segment), .. } => {
                    kept[&Arc::as_ptr(segment)] == segment.len_bytes()
                }
                _ => true,
            };
            let freed = blocks.extract_if(.., goes_back).map(FreeBlock::free).count();
            self.stats.free_bytes -= class_bytes(class) * freed;
        }
        self.stats.free_bytes -= self.spans.trim(usize::MAX);
    }
}

impl Drop for BlockPool {
    fn drop(&mut self) {
        self.trim();
    }
}
