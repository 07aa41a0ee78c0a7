//! The memory of kernels and tensors: the pool of each thread, and lists whose lack of room is a fault of the kernel.
//!
//! The pool zeroes a block when it comes from the system, and hands it out again with the bytes that its last owner wrote. So all
//! bytes of a block are always initialised.
//!
//! From 1 MiB on, blocks are parts of segments of 16 and 64 MiB, which lie in huge pages: kernels read those faster than pages of
//! 4 KiB, on a virtual machine above all. Bytes that no block has used take addresses, not memory.
//!
//! ```
//! use isoshard_kernels::memory::{PoolBlock, pool_stats, trim_pool};
//! trim_pool(); // starts with an empty pool
//! drop(PoolBlock::uninit(4000));
//! assert_eq!(pool_stats().free_bytes, 4096); // 4000 bytes take a block of 4096
//! ```

mod block;
mod fault;
mod kernel_list;
mod no_room;
mod pool;
mod pool_block;
pub(crate) mod segments;
pub(crate) mod system_block;

pub use block::PoolBlock;
pub use fault::MemoryFault;
pub use kernel_list::KernelList;
pub use no_room::{catch, fault_of, is_caught, unwind};
pub(crate) use no_room::{resume_of_helper, with_caught};
pub use pool::{PoolStats, no_room, pool_stats, reset_peak, set_memory_limit, trim_pool};
