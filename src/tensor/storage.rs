//! The memory of tensors: buffers, and the pool of each thread that reuses their blocks.
//!
//! ```
//! use isoshard::tensor::{DType, Tensor, storage};
//!
//! storage::trim_pool(); // starts with an empty pool
//! drop(Tensor::zeros(DType::F32, [1000]));
//! assert_eq!(storage::pool_stats().free_bytes, 4096); // 4000 bytes take a block of 4096
//! let reused = storage::pool_stats().reused_len;
//! let _x = Tensor::zeros(DType::F32, [999]); // takes that block
//! assert_eq!(storage::pool_stats().reused_len, reused + 1);
//! ```
//!
//! A buffer in the CPU's memory is a block aligned to 64 bytes; a buffer on a device is that device's block
//! ([`cuda`](super::cuda)). The pool zeroes a block when it comes from the system, and hands it out again with the
//! bytes that its last owner wrote. So all bytes of a buffer are always initialised.
//!
//! The memory of a thread's tensors is counted: [`pool_stats`] has the bytes, and [`set_memory_limit`] limits them.
//!
//! A block returns to the pool of the thread that took it from the system, on whatever thread its buffer is dropped.
//! Otherwise threads that read each other's tensors would drain some pools and fill others.

use std::any::Any;
use std::cell::RefCell;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use super::Device;
use super::cuda::DeviceBlock;
use super::meta::CountedBytes;
use super::pool_block::{BlockMemory, CLASSES, PoolBlock, ReturnQueue, class_bytes, class_of};
use super::segments::{MIN_SPAN_BYTES, Segment, SpanList, segment_bytes, span_bytes};
use super::system_block;
use crate::error::{Error, MemoryFault};

/// The most bytes that one thread's pool keeps for reuse; further blocks go back to the system.
const POOL_LIMIT_BYTES: usize = 2 << 30;

/// A block of memory that is the pool's, another owner's (a `Vec`), a file's, a device's, or absent.
pub(crate) struct Buffer {
    ptr: BufferStart,
    len_bytes: usize,
    /// The device that holds the bytes.
    device: Device,
    owner: BufferOwner,
}

enum BufferOwner {
    /// A thread's pool; `origin` is `None` if that thread has ended.
    Pool {
        memory: BlockMemory,
        origin: Option<Arc<ReturnQueue>>,
    },
    Foreign {
        _keep: Box<dyn Any + Send + Sync>,
    },
    /// A part of a file.
    Mapped {
        _region: Box<dyn Any + Send + Sync>,
    },
    /// A device's block; `ptr` is dangling.
    Device(DeviceBlock),
    /// No bytes, only their number; `ptr` is dangling.
    Meta {
        _counted: CountedBytes,
    },
    /// One of the parts into which a buffer was cut; no other part shares its bytes.
    Part {
        whole: Arc<Buffer>,
        start: usize,
        index: usize,
        parts_len: usize,
    },
    /// All bytes of a buffer that was cut. Its parts are shared here, so that none of them is written meanwhile.
    Joined {
        whole: Arc<Buffer>,
        _parts: Vec<Storage>,
    },
}

/// A buffer that tensors share. It is writable only while it has one owner ([`exclusive`]).
pub(crate) type Storage = Arc<Buffer>;

/// Returns the buffer for writing if nothing else shares its bytes.
pub(super) fn exclusive(storage: &mut Storage) -> Option<&mut Buffer> {
    // A shared buffer, the common case for operands, is known without the locked instruction of `get_mut`.
    if Arc::strong_count(storage) > 1 {
        return None;
    }
    Arc::get_mut(storage).filter(|buffer| !matches!(buffer.owner, BufferOwner::Joined { .. }))
}

/// The address of a buffer's bytes.
#[derive(Clone, Copy)]
struct BufferStart(NonNull<u8>);

// SAFETY: the buffer owns its block, or bytes of it that no other buffer has. Shared access is read-only, and writing needs
// `&mut Buffer`, which `exclusive` gives; a buffer whose bytes are also those of its parts is never written. Owners may be
// sent and shared by themselves.
unsafe impl Send for BufferStart {}
// SAFETY: as above.
unsafe impl Sync for BufferStart {}

impl Buffer {
    /// Returns a buffer of at least `len_bytes` from the pool, with arbitrary but initialised contents, or `None` if the
    /// thread's limit or the system leaves no room for it: [`no_room`] is the error.
    pub(crate) fn uninit(len_bytes: usize) -> Option<Buffer> {
        let from_pool = POOL.try_with(|p| {
            let mut pool = p.borrow_mut();
            Some((pool.take(len_bytes)?, Some(pool.returns.clone())))
        });
        // Without a pool, the thread is ending.
        let (block, origin) = from_pool.unwrap_or_else(|_| Some((PoolBlock::fresh(len_bytes)?, None)))?;
        let owner = BufferOwner::Pool { memory: block.memory, origin };
        Some(Buffer { ptr: BufferStart(block.ptr), len_bytes, device: Device::Cpu, owner })
    }

    /// Takes over `data` without copying it.
    pub(crate) fn adopt<T: super::Element>(mut data: Vec<T>) -> Buffer {
        let ptr = NonNull::new(data.as_mut_ptr().cast()).expect("a Vec's pointer is never null");
        let len_bytes = std::mem::size_of_val(data.as_slice());
        let owner = BufferOwner::Foreign { _keep: Box::new(data) };
        Buffer { ptr: BufferStart(ptr), len_bytes, device: Device::Cpu, owner }
    }

    /// Returns the buffer of a region of a file, which is mapped at `ptr` and readable and writable until `region` is dropped.
    pub(super) fn mapped(ptr: NonNull<u8>, len_bytes: usize, region: Box<dyn Any + Send + Sync>) -> Buffer {
        let owner = BufferOwner::Mapped { _region: region };
        Buffer { ptr: BufferStart(ptr), len_bytes, device: Device::Cpu, owner }
    }

    /// Returns true if a file has the bytes.
    pub(super) fn is_mapped(&self) -> bool {
        matches!(self.owner, BufferOwner::Mapped { .. })
    }

    /// Returns the buffer of the first `len_bytes` of a device's block.
    pub(crate) fn on_device(block: DeviceBlock, len_bytes: usize) -> Buffer {
        let device = block.owner().device();
        Buffer { ptr: BufferStart(NonNull::dangling()), len_bytes, device, owner: BufferOwner::Device(block) }
    }

    /// Returns a buffer without bytes that counts as `len_bytes`.
    pub(super) fn without_bytes(counted: CountedBytes, len_bytes: usize) -> Buffer {
        Buffer {
            ptr: BufferStart(NonNull::dangling()),
            len_bytes,
            device: Device::Meta,
            owner: BufferOwner::Meta { _counted: counted },
        }
    }

    /// Returns the device that holds the bytes.
    #[inline]
    pub(super) fn device(&self) -> Device {
        self.device
    }

    /// Returns the device's block, or `None` if the buffer is not on a CUDA device.
    #[inline]
    pub(crate) fn device_block(&self) -> Option<&DeviceBlock> {
        if self.device.is_cuda() { self.block() } else { None }
    }

    fn block(&self) -> Option<&DeviceBlock> {
        match &self.owner {
            BufferOwner::Device(block) => Some(block),
            BufferOwner::Part { whole, .. } | BufferOwner::Joined { whole, .. } => whole.block(),
            BufferOwner::Pool { .. }
            | BufferOwner::Foreign { .. }
            | BufferOwner::Mapped { .. }
            | BufferOwner::Meta { .. } => None,
        }
    }

    /// Returns the position of the first byte in its block.
    pub(super) fn start_in_block(&self) -> usize {
        match &self.owner {
            BufferOwner::Part { whole, start, .. } => whole.start_in_block() + start,
            _ => 0,
        }
    }

    /// Cuts the buffer into parts, which are writable each by itself. `ranges` of bytes ascend and do not overlap; bytes
    /// between them are never written again. The memory is freed with the last part.
    ///
    /// # Panics
    /// Panics if a range overlaps the one before it or leaves the buffer.
    pub(super) fn cut(self, ranges: &[Range<usize>]) -> Vec<Buffer> {
        let (whole, parts_len) = (Arc::new(self), ranges.len());
        let mut free = 0;
        let part = |(index, range): (usize, &Range<usize>)| {
            let Range { start, end } = *range;
            assert!(free <= start && start <= end && end <= whole.len_bytes, "parts lie one after the other");
            free = end;
            let ptr = match whole.device == Device::Cpu {
                // SAFETY: the part starts inside the block, or at its end.
                true => BufferStart(unsafe { whole.ptr.0.add(start) }),
                false => whole.ptr,
            };
            let owner = BufferOwner::Part { whole: whole.clone(), start, index, parts_len };
            Buffer { ptr, len_bytes: end - start, device: whole.device, owner }
        };
        ranges.iter().enumerate().map(part).collect()
    }

    /// Returns the buffer that was cut into `parts`, for reading, or `None` unless these are all its parts, in their order,
    /// each from its byte on.
    pub(super) fn joined(parts: Vec<(usize, Storage)>) -> Option<Buffer> {
        let BufferOwner::Part { whole, parts_len, .. } = &parts.first()?.1.owner else { return None };
        let is_next = |(at, (from, part)): (usize, &(usize, Storage))| match &part.owner {
            BufferOwner::Part { whole: other, index, start, .. } => {
                (*index, *start) == (at, *from) && Arc::ptr_eq(whole, other)
            }
            _ => false,
        };
        if *parts_len != parts.len() || !parts.iter().enumerate().all(is_next) {
            return None;
        }
        let whole = whole.clone();
        let parts = parts.into_iter().map(|(_, part)| part).collect();
        let (ptr, len_bytes, device) = (whole.ptr, whole.len_bytes, whole.device);
        Some(Buffer { ptr, len_bytes, device, owner: BufferOwner::Joined { whole, _parts: parts } })
    }

    /// Returns the address of the buffer that this one is a part of, its number among the parts, and its first byte.
    pub(super) fn part(&self) -> Option<(usize, usize, usize)> {
        match &self.owner {
            BufferOwner::Part { whole, start, index, .. } => {
                Some((Arc::as_ptr(whole).addr(), *index, *start))
            }
            _ => None,
        }
    }

    /// Returns true for a part of a buffer that was cut.
    pub(super) fn is_part(&self) -> bool {
        matches!(self.owner, BufferOwner::Part { .. })
    }

    pub(crate) fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.ptr.0.as_ptr()
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.ptr.0.as_ptr()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let BufferOwner::Pool { memory, origin } = &mut self.owner else { return };
        let memory = std::mem::replace(memory, BlockMemory::Class(0));
        let block = PoolBlock { ptr: self.ptr.0, memory };
        let Some(origin) = origin.take() else { return block.free() };
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

/// The state of one thread's pool of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolStats {
    /// Bytes of the blocks that tensors hold. A block that another thread has dropped counts until this thread's pool takes it
    /// back, which it does before it takes one from the system.
    pub live_bytes: usize,
    /// Bytes kept for reuse, and addresses of a block from the system that no tensor has used yet.
    pub free_bytes: usize,
    /// The most bytes that `live_bytes` and `free_bytes` may be together; `usize::MAX` if no limit was set.
    pub limit_bytes: usize,
    /// The number of blocks that came from the system so far.
    pub system_len: u64,
    /// The number of blocks that were reused so far.
    pub reused_len: u64,
}

/// Returns the state of the calling thread's pool.
///
/// ```
/// use isoshard::tensor::{DType, Tensor, storage};
/// let before = storage::pool_stats();
/// let _x = Tensor::zeros(DType::U8, [1 << 20]);
/// let now = storage::pool_stats();
/// assert_eq!(now.system_len + now.reused_len, before.system_len + before.reused_len + 1);
/// ```
pub fn pool_stats() -> PoolStats {
    POOL.try_with(|p| p.borrow().stats).unwrap_or_default()
}

/// Sets the most bytes that the blocks of the calling thread's tensors may take, those kept for reuse included;
/// `usize::MAX` is no limit.
///
/// At the limit the thread first gives back the blocks that it keeps, but for free parts of larger blocks that are in
/// use; then an allocation is an [`Error::OutOfMemory`]. Lists that [`Tensor::from_vec`](super::Tensor::from_vec) takes over,
/// and the lists that the crate and the standard library need besides tensors, do not count.
///
/// ```
/// use isoshard::tensor::{DType, Device, Tensor, storage};
/// storage::set_memory_limit(1 << 20);
/// assert!(Tensor::zeros_on(Device::Cpu, DType::U8, [900_000]).is_ok());
/// let e = Tensor::zeros_on(Device::Cpu, DType::F32, [1 << 20]).unwrap_err().to_string();
/// assert!(e.starts_with("memory: cpu has no room; got f32[1048576] of 4194304 bytes, 0 bytes of live tensors, "), "{e}");
/// storage::set_memory_limit(usize::MAX);
/// ```
pub fn set_memory_limit(bytes: usize) {
    POOL.with(|p| p.borrow_mut().stats.limit_bytes = bytes);
}

/// Returns the error for a tensor or list of `wanted_bytes` for which the calling thread has no room.
#[cold]
pub(super) fn no_room(wanted: String, wanted_bytes: usize) -> Error {
    let stats = POOL.try_with(|p| p.borrow().stats).unwrap_or_default();
    let PoolStats { live_bytes, free_bytes: kept_bytes, limit_bytes, .. } = stats;
    let device = Device::Cpu.to_string();
    Error::OutOfMemory(Box::new(MemoryFault {
        device,
        wanted,
        wanted_bytes,
        live_bytes,
        kept_bytes,
        limit_bytes,
    }))
}

/// Gives the blocks that the calling thread's pool keeps for reuse back to the system, but for free parts of larger
/// blocks that are in use.
///
/// ```
/// use isoshard::tensor::{DType, Tensor, storage};
/// drop(Tensor::zeros(DType::F64, [10_000]));
/// assert!(storage::pool_stats().free_bytes >= 80_000);
/// storage::trim_pool();
/// assert_eq!(storage::pool_stats().free_bytes, 0);
/// ```
pub fn trim_pool() {
    POOL.with(|p| p.borrow_mut().trim());
}

/// The blocks that a thread keeps for reuse: by size class, and spans.
struct BlockPool {
    free: Vec<Vec<NonNull<u8>>>,
    spans: SpanList,
    returns: Arc<ReturnQueue>,
    stats: PoolStats,
}

thread_local! {
    static POOL: RefCell<BlockPool> = RefCell::new(BlockPool {
        free: vec![Vec::new(); CLASSES],
        spans: SpanList::default(),
        returns: Arc::new(ReturnQueue(Mutex::new(Vec::new()))),
        stats: PoolStats::default(),
    });
}

/// An empty pool without a limit.
impl Default for PoolStats {
    fn default() -> PoolStats {
        PoolStats { live_bytes: 0, free_bytes: 0, limit_bytes: usize::MAX, system_len: 0, reused_len: 0 }
    }
}

impl PoolStats {
    /// Returns true if the limit leaves room for so many bytes from the system.
    fn has_room(&self, bytes: usize) -> bool {
        bytes <= self.limit_bytes.saturating_sub(self.live_bytes).saturating_sub(self.free_bytes)
    }
}

impl BlockPool {
    /// Returns a kept block of the length, else one from the system, or `None` if there is no room for it.
    #[inline]
    fn take(&mut self, len_bytes: usize) -> Option<PoolBlock> {
        if len_bytes > MIN_SPAN_BYTES {
            return self.take_span(span_bytes(len_bytes)?);
        }
        let class = class_of(len_bytes);
        if self.free[class].is_empty() {
            self.take_back();
        }
        let bytes = class_bytes(class);
        let ptr = match self.free[class].pop() {
            Some(kept) => {
                self.stats.reused_len += 1;
                self.stats.free_bytes -= bytes;
                kept
            }
            None => {
                let fresh = self.fresh(bytes, || system_block::allocate(bytes))?;
                self.stats.system_len += 1;
                fresh
            }
        };
        self.stats.live_bytes += bytes;
        Some(PoolBlock { ptr, memory: BlockMemory::Class(class) })
    }

    /// Returns a span of kept segments, else of a new one, or `None` if there is no room for it.
    #[inline(never)]
    fn take_span(&mut self, bytes: usize) -> Option<PoolBlock> {
        self.take_back();
        let kept = self.spans.take(bytes);
        let (ptr, bytes, segment) = match kept {
            Some(kept) => {
                self.stats.reused_len += 1;
                kept
            }
            None => {
                let wished = segment_bytes(bytes, self.stats.live_bytes + self.stats.free_bytes);
                // A segment in use does not go back to the system, so it is longer only with much room.
                let longer = self.stats.has_room(wished.saturating_mul(8)).then(|| Segment::new(wished));
                let segment = longer.flatten().or_else(|| self.fresh(bytes, || Segment::new(bytes)))?;
                self.stats.system_len += 1;
                self.stats.free_bytes += segment.len_bytes();
                self.spans.add(segment);
                self.spans.take(bytes)?
            }
        };
        self.stats.free_bytes -= bytes;
        self.stats.live_bytes += bytes;
        Some(PoolBlock { ptr, memory: BlockMemory::Span { _segment: segment } })
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
    fn put(&mut self, block: PoolBlock) -> Option<PoolBlock> {
        match block.memory {
            BlockMemory::Class(class) => {
                let bytes = class_bytes(class);
                self.stats.live_bytes -= bytes;
                if self.stats.free_bytes + bytes > POOL_LIMIT_BYTES {
                    return Some(block);
                }
                self.stats.free_bytes += bytes;
                self.free[class].push(block.ptr);
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

    /// Frees all kept blocks, but for spans of segments that are in use.
    fn trim(&mut self) {
        self.take_back();
        for (class, blocks) in self.free.iter_mut().enumerate() {
            self.stats.free_bytes -= class_bytes(class) * blocks.len();
            let block = |ptr| PoolBlock { ptr, memory: BlockMemory::Class(class) };
            blocks.drain(..).for_each(|ptr| block(ptr).free());
        }
        self.stats.free_bytes -= self.spans.trim(usize::MAX);
    }
}

impl Drop for BlockPool {
    fn drop(&mut self) {
        self.trim();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(len_bytes: usize) -> Buffer {
        Buffer::uninit(len_bytes).expect("there is room")
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
            assert!(Buffer::uninit(1).is_none());
            std::thread::spawn(move || drop(live)).join().expect("no panic");
            assert!(Buffer::uninit(4 * 4096).is_some(), "the block came back from the other thread");
            drop(other);
            trim_pool();
            assert_eq!((pool_stats().live_bytes, pool_stats().free_bytes), (0, 0));
            set_memory_limit(usize::MAX);
            // Miri ends the program if its own memory is short.
            let has_room = |len_bytes: usize| !cfg!(miri) && Buffer::uninit(len_bytes).is_some();
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
        drop(orphan); // its thread has ended, so dropping the buffer frees the block
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
        // SAFETY: the buffer's bytes, which nothing else uses.
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
            assert!(Buffer::uninit(400_000).is_none());
            drop(live);
            assert!(Buffer::uninit(1 << 20).is_some() && Buffer::uninit((1 << 20) + 1).is_none());
        })
        .join()
        .expect("no panic");
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
