//! Buffers and the per-thread pool they return to.
//!
//! A buffer on a device is that device's block ([`cuda`](super::cuda)), which no code here looks into. In the processor's
//! memory a buffer is a 64-byte aligned block. Pool blocks are zeroed when they first come from the system and are handed out
//! again with whatever their last owner wrote, so a buffer's bytes are always initialised and reading uninit ones is
//! wasteful but never undefined. A block returns to the pool of the thread that took it from the system, whoever drops
//! it: threads that read one another's tensors would otherwise drain some pools and swell others.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;
use std::cell::RefCell;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use super::Device;
use super::cuda::DeviceBlock;
use super::meta::Absent;

/// Blocks are aligned for the widest vector and for a cache line.
const ALIGN: usize = 64;
/// The smallest block.
const MIN_BYTES: usize = 64;
/// What one thread keeps for reuse at most; beyond it blocks go back to the system.
const POOL_LIMIT_BYTES: usize = 2 << 30;
/// Four size classes per doubling waste at most a fifth of a block; enough for any length that has addresses.
const CLASSES: usize = 4 * 58;

/// A block of memory: from the pool, lent by a foreign owner such as a `Vec`, on a device, or none at all.
pub(crate) struct Buffer {
    ptr: NonNull<u8>,
    len_bytes: usize,
    owner: Owner,
}

enum Owner {
    /// The pool of a thread that lives no more where `owner` is none.
    Pool {
        class: usize,
        owner: Option<Arc<Inbox>>,
    },
    Foreign {
        _keep: Box<dyn Any + Send + Sync>,
    },
    /// `ptr` points nowhere.
    Device(DeviceBlock),
    /// `ptr` points nowhere: there are no bytes, only their number.
    Meta {
        _counted: Absent,
    },
}

/// A shared buffer. Writable only while nobody shares it.
pub(crate) type Storage = Arc<Buffer>;

// SAFETY: the buffer owns its block; shared access is read-only, and writing wants `&mut Buffer`.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// A block of at least `len_bytes`, with arbitrary but initialised contents.
    pub(crate) fn uninit(len_bytes: usize) -> Buffer {
        let class = class_of(len_bytes);
        let from_pool = POOL.try_with(|p| {
            let mut pool = p.borrow_mut();
            (pool.take(class), pool.inbox.clone())
        });
        let (block, owner) = from_pool.map_or((None, None), |(block, inbox)| (block, Some(inbox)));
        let ptr = block.unwrap_or_else(|| {
            // SAFETY: the layout has a non-zero size.
            let ptr = unsafe { alloc_zeroed(layout_of(class)) };
            NonNull::new(ptr).unwrap_or_else(|| handle_alloc_error(layout_of(class)))
        });
        Buffer { ptr, len_bytes, owner: Owner::Pool { class, owner } }
    }

    /// Takes over `data` without copying.
    pub(crate) fn adopt<T: super::Element>(mut data: Vec<T>) -> Buffer {
        let ptr = NonNull::new(data.as_mut_ptr().cast()).expect("a Vec's pointer is never null");
        let len_bytes = std::mem::size_of_val(data.as_slice());
        Buffer { ptr, len_bytes, owner: Owner::Foreign { _keep: Box::new(data) } }
    }

    /// The first `len_bytes` of a device's block.
    pub(crate) fn on_device(block: DeviceBlock, len_bytes: usize) -> Buffer {
        Buffer { ptr: NonNull::dangling(), len_bytes, owner: Owner::Device(block) }
    }

    /// No bytes, counted as `len_bytes`.
    pub(super) fn absent(counted: Absent, len_bytes: usize) -> Buffer {
        Buffer { ptr: NonNull::dangling(), len_bytes, owner: Owner::Meta { _counted: counted } }
    }

    /// Where the bytes are.
    pub(super) fn device(&self) -> Device {
        match &self.owner {
            Owner::Device(block) => block.owner().device(),
            Owner::Meta { .. } => Device::Meta,
            Owner::Pool { .. } | Owner::Foreign { .. } => Device::Cpu,
        }
    }

    /// The device's block, of a buffer that is one.
    pub(crate) fn device_block(&self) -> Option<&DeviceBlock> {
        match &self.owner {
            Owner::Device(block) => Some(block),
            _ => None,
        }
    }

    pub(crate) fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.ptr.as_ptr()
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.ptr.as_ptr()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Owner::Pool { class, owner } = &mut self.owner else { return };
        let block = Block { ptr: self.ptr, class: *class };
        let Some(owner) = owner.take() else { return block.free() };
        // To this thread's pool if it came from there, else by letter to the thread it came from.
        let mut block = Some(block);
        let _ = POOL.try_with(|p| {
            if let Ok(mut pool) = p.try_borrow_mut()
                && Arc::ptr_eq(&pool.inbox, &owner)
                && let Some(excess) = block.take().and_then(|b| pool.put(b))
            {
                excess.free();
            }
        });
        if let Some(block) = block {
            owner.post(block);
        }
    }
}

/// A block on its way between owners: freed by whoever keeps it last.
struct Block {
    ptr: NonNull<u8>,
    class: usize,
}

// SAFETY: a block is memory without an owner's pointers into it; it may be freed or reused on any thread.
unsafe impl Send for Block {}

impl Block {
    fn free(self) {
        // SAFETY: the block was allocated with this very layout, and this is its only owner.
        unsafe { dealloc(self.ptr.as_ptr(), layout_of(self.class)) };
    }
}

/// Where other threads leave a thread's blocks.
struct Inbox(Mutex<Vec<Block>>);

impl Inbox {
    fn post(&self, block: Block) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(block);
    }

    /// Hands over what has come; the room for letters stays.
    fn collect(&self, keep: impl FnMut(Block)) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).drain(..).for_each(keep);
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        self.collect(Block::free);
    }
}

/// What the calling thread's pool holds, for tests and for whoever hunts memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Bytes kept for reuse.
    pub free_bytes: usize,
    /// Blocks that came from the system so far.
    pub system_len: u64,
    /// Blocks that were reused so far.
    pub reused_len: u64,
}

/// The state of the calling thread's pool.
pub fn pool_stats() -> PoolStats {
    POOL.with(|p| p.borrow().stats)
}

/// Gives everything the calling thread's pool keeps back to the system.
pub fn trim_pool() {
    POOL.with(|p| p.borrow_mut().trim());
}

struct Pool {
    free: Vec<Vec<NonNull<u8>>>,
    inbox: Arc<Inbox>,
    stats: PoolStats,
}

thread_local! {
    static POOL: RefCell<Pool> = RefCell::new(Pool {
        free: vec![Vec::new(); CLASSES],
        inbox: Arc::new(Inbox(Mutex::new(Vec::new()))),
        stats: PoolStats::default(),
    });
}

impl Pool {
    fn take(&mut self, class: usize) -> Option<NonNull<u8>> {
        if self.free[class].is_empty() {
            let inbox = self.inbox.clone();
            inbox.collect(|block| {
                if let Some(block) = self.put(block) {
                    block.free();
                }
            });
        }
        let block = self.free[class].pop();
        match block {
            Some(_) => {
                self.stats.reused_len += 1;
                self.stats.free_bytes -= class_bytes(class);
            }
            None => self.stats.system_len += 1,
        }
        block
    }

    /// Keeps a block for reuse, or hands it back if the pool is full.
    fn put(&mut self, block: Block) -> Option<Block> {
        let bytes = class_bytes(block.class);
        if self.stats.free_bytes + bytes > POOL_LIMIT_BYTES {
            return Some(block);
        }
        self.stats.free_bytes += bytes;
        self.free[block.class].push(block.ptr);
        None
    }

    fn trim(&mut self) {
        self.inbox.collect(Block::free);
        for (class, blocks) in self.free.iter_mut().enumerate() {
            blocks.drain(..).for_each(|ptr| Block { ptr, class }.free());
        }
        self.stats.free_bytes = 0;
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.trim();
    }
}

/// The class of the smallest block that holds `len_bytes`: `MIN * 2^(c / 4) * (4 + c % 4) / 4`.
fn class_of(len_bytes: usize) -> usize {
    let units = len_bytes.div_ceil(MIN_BYTES).max(1);
    if units <= 4 {
        return [0, 0, 4, 6, 8][units];
    }
    let octave = usize::BITS as usize - 1 - (units - 1).leading_zeros() as usize;
    let step = (units << 2).div_ceil(1 << octave) - 4;
    4 * octave + step
}

fn class_bytes(class: usize) -> usize {
    let (octave, step) = (class / 4, class % 4);
    ((MIN_BYTES << octave) / 4 * (4 + step)).next_multiple_of(ALIGN)
}

fn layout_of(class: usize) -> Layout {
    Layout::from_size_align(class_bytes(class), ALIGN).expect("a block is smaller than the address space")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_hold_and_waste_little() {
        for n in (0..5000).chain((0..40).map(|k| (1usize << k) + 1)).chain((7..40).map(|k| 1usize << k)) {
            let bytes = class_bytes(class_of(n));
            assert!(bytes >= n, "{n} bytes do not fit into {bytes}");
            assert!(n < 512 || bytes * 4 <= n * 5 + 4 * ALIGN, "{n} bytes take {bytes}");
        }
    }

    #[test]
    fn blocks_come_home() {
        trim_pool();
        let lent = Buffer::uninit(100_000);
        let (first, before) = (lent.as_ptr() as usize, pool_stats());
        std::thread::spawn(move || {
            drop(lent);
            assert_eq!(pool_stats().free_bytes, 0, "the block is not this thread's");
        })
        .join()
        .unwrap();
        assert_eq!(Buffer::uninit(100_000).as_ptr() as usize, first);
        assert_eq!(pool_stats().system_len, before.system_len);
        let orphan = std::thread::spawn(|| Buffer::uninit(64)).join().unwrap();
        drop(orphan); // its thread is gone: the last of the two frees it
        trim_pool();
    }

    #[test]
    fn every_length_has_a_class() {
        assert!(class_of(isize::MAX as usize) < CLASSES);
    }

    #[test]
    fn blocks_are_reused() {
        trim_pool();
        let first = Buffer::uninit(100_000).as_ptr();
        let before = pool_stats();
        assert_eq!(Buffer::uninit(99_000).as_ptr(), first);
        assert_eq!(pool_stats().reused_len, before.reused_len + 1);
        trim_pool();
        assert_eq!(pool_stats().free_bytes, 0);
    }
}
