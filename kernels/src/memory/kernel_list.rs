//! Lists that kernels need besides their operands and results.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use bytemuck::Pod;

use super::block::PoolBlock;
use super::fault::MemoryFault;
use super::no_room::unwind;
use super::pool::no_room;

/// A list for a kernel's own use. Its memory is the pool's, so a thread's limit counts it.
pub struct KernelList<T> {
    /// The first `len` elements' bytes, and more; absent while the list is empty.
    block: Option<PoolBlock>,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Pod> KernelList<T> {
    /// Returns an empty list, which takes no memory.
    pub const fn new() -> KernelList<T> {
        KernelList { block: None, len: 0, elements: PhantomData }
    }

    /// Returns a list of `len` zeros. `verb` names the kernel in a fault.
    ///
    /// # Errors
    /// Returns a fault if there is no room.
    pub fn zeros(verb: &str, len: usize) -> Result<KernelList<T>, MemoryFault> {
        let mut list = KernelList::new();
        match list.try_resize(len) {
            Ok(()) => Ok(list),
            Err(fault) => Err(fault.in_kernel(verb)),
        }
    }

    /// Makes the list `len` elements long; new ones are zeros. Unwinds up to [`catch`](super::catch) if there is no room.
    pub fn resize(&mut self, len: usize) {
        if let Err(error) = self.try_resize(len) {
            unwind(error);
        }
    }

    fn try_resize(&mut self, len: usize) -> Result<(), MemoryFault> {
        let held = self.len;
        self.reserve(len)?;
        self.len = len;
        if let Some(added) = self.get_mut(held..) {
            added.fill(T::zeroed());
        }
        Ok(())
    }

    /// Makes room for `len` elements.
    fn reserve(&mut self, len: usize) -> Result<(), MemoryFault> {
        let capacity_bytes = self.block.as_ref().map_or(0, PoolBlock::len_bytes);
        let len_bytes = len.saturating_mul(size_of::<T>());
        if len_bytes <= capacity_bytes {
            return Ok(());
        }
        let fits = len_bytes <= isize::MAX as usize;
        let block = if fits { PoolBlock::uninit(len_bytes) } else { None };
        let Some(block) = block else {
            return Err(no_room(format!("a list of {len} numbers"), len_bytes));
        };
        let mut larger = KernelList { block: Some(block), len: self.len, elements: PhantomData };
        larger.copy_from_slice(self);
        *self = larger;
        Ok(())
    }

    /// Adds an element. Unwinds as [`resize`](Self::resize) does.
    pub fn push(&mut self, element: T) {
        let capacity = self.block.as_ref().map_or(0, |block| block.len_bytes() / size_of::<T>());
        if self.len == capacity
            && let Err(error) = self.reserve((2 * capacity).max(64))
        {
            unwind(error);
        }
        self.len += 1;
        if let Some(last) = self.last_mut() {
            *last = element;
        }
    }

    /// Drops all elements from the `len`-th on, if there are more, and keeps the memory.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Drops all elements, and keeps the memory.
    pub fn clear(&mut self) {
        self.len = 0;
    }
}

impl<T> Default for KernelList<T> {
    fn default() -> Self {
        KernelList { block: None, len: 0, elements: PhantomData }
    }
}

impl<T> fmt::Debug for KernelList<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of {} numbers", self.len)
    }
}

impl<T: Pod> Deref for KernelList<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.block {
            // SAFETY: the block is initialised, aligned to 64 bytes and has `len` elements of any bit pattern: `reserve` comes
            // before `len` grows.
            Some(block) => unsafe { std::slice::from_raw_parts(block.as_ptr().cast(), self.len) },
            None => &[],
        }
    }
}

impl<T: Pod> DerefMut for KernelList<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.block {
            // SAFETY: as above; the list owns the block. Elements have no padding, so the bytes stay initialised.
            Some(block) => unsafe { std::slice::from_raw_parts_mut(block.as_mut_ptr().cast(), self.len) },
            None => &mut [],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::pool::{pool_stats, set_memory_limit, trim_pool};

    #[test]
    fn a_list_grows_and_shrinks_as_a_vector_does() {
        trim_pool();
        let (mut list, mut vector) = (KernelList::<u32>::new(), Vec::new());
        for i in 0..1000u32 {
            list.push(i);
            vector.push(i);
        }
        assert_eq!(*list, vector[..]);
        for len in [1000, 10, 300, 5000, 0, 1] {
            list.resize(len);
            vector.resize(len, 0);
            assert_eq!(*list, vector[..], "{len}");
        }
        list.truncate(7);
        assert_eq!(list.len(), 1);
        list.clear();
        assert!(list.is_empty() && KernelList::<u128>::default().is_empty());
    }

    #[test]
    fn a_list_counts_as_tensors_do_and_is_an_error_without_room() {
        std::thread::spawn(|| {
            set_memory_limit(1 << 20);
            let list = KernelList::<u64>::zeros("sample", 1000).unwrap();
            assert_eq!(pool_stats().live_bytes, 8192);
            let said = |len| KernelList::<u64>::zeros("sample", len).map(drop).unwrap_err().to_string();
            assert!(
                said(1 << 20).contains("a list of 1048576 numbers for sample of 8388608 bytes, 8192 bytes")
            );
            assert!(said(1 << 50).contains("a list of 1125899906842624 numbers for sample"));
            assert!(said(usize::MAX).contains("for sample of 18446744073709551615 bytes"));
            drop(list);
            assert_eq!(pool_stats().live_bytes, 0);
        })
        .join()
        .expect("no panic");
    }
}
