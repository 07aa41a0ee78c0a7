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
//! From 1 MiB on, blocks are parts of segments of 16 and 64 MiB, which lie in huge pages: kernels read those faster than pages of
//! 4 KiB, on a virtual machine above all. Bytes that no block has used take addresses, not memory.
//!
//! The memory of a thread's tensors is counted: [`pool_stats`] has the bytes, and [`set_memory_limit`] limits them.
//!
//! A block returns to the pool of the thread that took it from the system, on whatever thread its buffer is dropped.
//! Otherwise threads that read each other's tensors would drain some pools and fill others.

use std::any::Any;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use isoshard_kernels::memory::PoolBlock;
#[doc(inline)]
pub use isoshard_kernels::memory::PoolStats;
/// ```
/// use isoshard::tensor::{DType, Tensor, storage};
/// let before = storage::pool_stats();
/// let _x = Tensor::zeros(DType::U8, [1 << 20]);
/// let now = storage::pool_stats();
/// assert_eq!(now.system_len + now.reused_len, before.system_len + before.reused_len + 1);
/// ```
#[doc(inline)]
pub use isoshard_kernels::memory::pool_stats;
/// ```
/// use isoshard::tensor::{DType, Tensor, storage};
/// drop(Tensor::zeros(DType::U8, [1 << 20]));
/// assert!(storage::pool_stats().peak_live_bytes >= 1 << 20);
/// storage::reset_peak();
/// assert_eq!(storage::pool_stats().peak_live_bytes, 0);
/// ```
#[doc(inline)]
pub use isoshard_kernels::memory::reset_peak;
/// ```
/// use isoshard::tensor::{DType, Device, Tensor, storage};
/// storage::set_memory_limit(1 << 20);
/// assert!(Tensor::zeros_on(Device::Cpu, DType::U8, [900_000]).is_ok());
/// let e = Tensor::zeros_on(Device::Cpu, DType::F32, [1 << 20]).unwrap_err().to_string();
/// assert!(e.starts_with("memory: cpu has no room; got f32[1048576] of 4194304 bytes, 0 bytes of live tensors, "), "{e}");
/// storage::set_memory_limit(usize::MAX);
/// ```
#[doc(inline)]
pub use isoshard_kernels::memory::set_memory_limit;
/// ```
/// use isoshard::tensor::{DType, Tensor, storage};
/// drop(Tensor::zeros(DType::F64, [10_000]));
/// assert!(storage::pool_stats().free_bytes >= 80_000);
/// storage::trim_pool();
/// assert_eq!(storage::pool_stats().free_bytes, 0);
/// ```
#[doc(inline)]
pub use isoshard_kernels::memory::trim_pool;

use super::Device;
use super::cuda_device::stream::DeviceBlock;
use super::meta::CountedBytes;

/// A block of memory that is the pool's, another owner's (a `Vec`), a file's, a device's, or absent.
pub(crate) struct Buffer {
    ptr: BufferStart,
    len_bytes: usize,
    /// The device that holds the bytes.
    device: Device,
    owner: BufferOwner,
}

enum BufferOwner {
    /// A thread's pool.
    Pool {
        _block: PoolBlock,
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
        let mut block = PoolBlock::uninit(len_bytes)?;
        let ptr = NonNull::new(block.as_mut_ptr()).expect("a block's pointer is never null");
        let owner = BufferOwner::Pool { _block: block };
        Some(Buffer { ptr: BufferStart(ptr), len_bytes, device: Device::Cpu, owner })
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
