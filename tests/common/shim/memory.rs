//! Device and pinned memory: host allocations between guards, filled with poison when they are allocated and freed.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::{BTreeMap, VecDeque};

/// The sizes of the guards before and after a block, and of their part that is checked whenever a stream is waited
/// for.
const GUARD_BYTES: usize = 4096;
const NEAR_BYTES: usize = 256;
const GUARD: u8 = 0xa5;
const POISON: u8 = 0xff;
const ALIGN: usize = 256;
/// The freed bytes that are kept, to see if they are written to.
const KEPT_BYTES: usize = 64 << 20;

/// All blocks.
#[derive(Debug, Default)]
pub struct Memory {
    blocks: BTreeMap<u64, Block>,
    freed: VecDeque<(u64, Block)>,
    freed_bytes: usize,
    pub device_bytes: usize,
}

/// A block's size without its guards, and true if it is host memory.
#[derive(Clone, Copy, Debug)]
struct Block {
    bytes: usize,
    host: bool,
}

impl Block {
    fn layout(&self) -> Layout {
        let bytes = self.bytes.next_multiple_of(ALIGN) + 2 * GUARD_BYTES;
        Layout::from_size_align(bytes, ALIGN).expect("blocks are smaller than the address space")
    }
}

impl Memory {
    /// Allocates a block, filled with poison.
    pub fn alloc(&mut self, bytes: usize, host: bool) -> u64 {
        let block = Block { bytes, host };
        // SAFETY: the layout's size is not zero.
        let first = unsafe { alloc(block.layout()) };
        assert!(!first.is_null(), "the host has no {bytes} bytes");
        // SAFETY: all of it is in the allocation.
        let at = unsafe {
            first.write_bytes(GUARD, block.layout().size());
            let at = first.add(GUARD_BYTES);
            at.write_bytes(POISON, bytes);
            at as u64
        };
        self.blocks.insert(at, block);
        self.device_bytes += if host { 0 } else { bytes };
        at
    }

    /// Frees a block.
    ///
    /// # Errors
    /// Returns an error if there is no such block, or if its guards were written to.
    pub fn free(&mut self, at: u64, host: bool) -> Result<(), String> {
        let block = self.blocks.remove(&at).filter(|b| b.host == host);
        let block = block.ok_or_else(|| format!("no block begins at {at:#x}: freed twice, or never made"))?;
        self.device_bytes -= if host { 0 } else { block.bytes };
        let whole = check(at, block, GUARD_BYTES);
        // SAFETY: the block's own bytes, which are not used any more.
        unsafe { (at as *mut u8).write_bytes(POISON, block.bytes) };
        self.freed.push_back((at, block));
        self.freed_bytes += block.bytes;
        let mut used = Ok(());
        while self.freed_bytes > KEPT_BYTES {
            let (at, block) = self.freed.pop_front().expect("there are freed bytes");
            self.freed_bytes -= block.bytes;
            used = used.and(check_freed(at, block));
            release(at, block);
        }
        whole.and(used)
    }

    /// Checks every block's guards, and the freed memory.
    ///
    /// # Errors
    /// Returns the first block that was written to.
    pub fn check(&self, thoroughly: bool) -> Result<(), String> {
        let far = if thoroughly { GUARD_BYTES } else { NEAR_BYTES };
        self.blocks.iter().try_for_each(|(&at, &block)| check(at, block, far))?;
        match thoroughly {
            true => self.freed.iter().try_for_each(|&(at, block)| check_freed(at, block)),
            false => Ok(()),
        }
    }

    /// # Errors
    /// Returns an error if the range is not in one block of this kind.
    pub fn holds(&self, at: u64, bytes: usize, host: bool) -> Result<(), String> {
        let found = self.blocks.range(..=at).next_back().filter(|(_, block)| block.host == host);
        let inside = found.is_some_and(|(first, block)| {
            let offset = at - first;
            offset <= block.bytes as u64 && bytes <= block.bytes - offset as usize
        });
        match inside {
            true => Ok(()),
            false => {
                let whose = if host { "pinned host" } else { "device" };
                Err(format!("{bytes} bytes at {at:#x} lie in no live block of {whose} memory"))
            }
        }
    }

    /// Returns the live blocks of device memory.
    pub fn image(&self) -> super::record::MemoryImage {
        let device = self.blocks.iter().filter(|(_, block)| !block.host);
        let bytes = |(&at, block): (&u64, &Block)| {
            let all = bytes_at(at, block.bytes);
            let len = all.iter().rposition(|&b| b != POISON).map_or(0, |last| last + 1);
            (at, block.bytes, all[..len].to_vec())
        };
        device.map(bytes).collect()
    }

    /// The size of the block that begins at `at`, or 0.
    pub fn bytes_of(&self, at: u64) -> usize {
        self.blocks.get(&at).map_or(0, |block| block.bytes)
    }

    /// The number of live blocks.
    pub fn blocks_len(&self) -> usize {
        self.blocks.len()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let blocks = std::mem::take(&mut self.blocks);
        blocks.into_iter().chain(self.freed.drain(..)).for_each(|(at, block)| release(at, block));
    }
}

fn bytes_at<'a>(at: u64, bytes: usize) -> &'a [u8] {
    // SAFETY: called for parts of allocations that are still allocated.
    unsafe { std::slice::from_raw_parts(at as *const u8, bytes) }
}

fn check(at: u64, block: Block, far: usize) -> Result<(), String> {
    let behind = at + block.bytes as u64;
    let (before, after) = (bytes_at(at - far as u64, far), bytes_at(behind, far));
    if first_other(before, GUARD).is_some() {
        let k = before.iter().rposition(|&b| b != GUARD).unwrap_or(0);
        return Err(format!("something is written {} bytes before a block of {}", far - k, block.bytes));
    }
    match first_other(after, GUARD) {
        Some(k) => Err(format!("something is written {k} bytes behind a block of {}", block.bytes)),
        None => Ok(()),
    }
}

fn check_freed(at: u64, block: Block) -> Result<(), String> {
    match first_other(bytes_at(at, block.bytes), POISON) {
        Some(k) => {
            Err(format!("byte {k} of a block of {} is written after the block was freed", block.bytes))
        }
        None => Ok(()),
    }
}

/// Returns the position of the first byte that is not `value`.
fn first_other(bytes: &[u8], value: u8) -> Option<usize> {
    // Whole chunks are compared first, because tests compile this file with few optimisations.
    const CHUNK: usize = 256;
    let equal = bytes.chunks_exact(CHUNK).take_while(|chunk| **chunk == [value; CHUNK]).count() * CHUNK;
    bytes[equal..].iter().position(|&b| b != value).map(|k| equal + k)
}

fn release(at: u64, block: Block) {
    // SAFETY: allocated in `alloc` with this layout, and no longer in a list.
    unsafe { dealloc((at - GUARD_BYTES as u64) as *mut u8, block.layout()) };
}
