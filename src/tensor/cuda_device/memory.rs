//! The allocator of a stream: blocks cut from segments of device memory, and reused in stream order.
//!
//! Small blocks come from segments of 2 MiB, larger ones from segments of 20 MiB or of their own size. The allocator
//! takes the best fit among the free spans, splits off the rest, and merges free neighbours. A block that other
//! streams have read carries events, and is reused only after them. Memory goes back to the driver only if memory is
//! short or the stream ends, because freeing waits for the device.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use smallvec::SmallVec;

use super::driver::Driver;
use super::handle::{Address, DriverError, DriverResult, Handle};

/// Block sizes are multiples of this.
const GRAIN_BYTES: usize = 512;
/// The largest block that comes from a small segment.
const SMALL_BYTES: usize = 1 << 20;
const SMALL_SEGMENT_BYTES: usize = 2 << 20;
const LARGE_SEGMENT_BYTES: usize = 20 << 20;
/// The smallest block that gets a segment of its own, rounded up to [`SMALL_SEGMENT_BYTES`].
const OWN_SEGMENT_BYTES: usize = 10 << 20;

/// The memory that this process uses on a device, over all threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceMemoryStats {
    /// Bytes of live tensors.
    pub live_bytes: usize,
    /// The most bytes of live tensors at one time.
    pub peak_live_bytes: usize,
    /// Bytes reserved from the driver: live, or kept for reuse.
    pub reserved_bytes: usize,
    /// The most reserved bytes at one time.
    pub peak_reserved_bytes: usize,
    /// The limit of the reserved bytes.
    pub limit_bytes: usize,
    /// The number of segments that were reserved so far.
    pub segments_len: u64,
}

/// The counters behind [`DeviceMemoryStats`].
#[derive(Debug)]
pub(crate) struct MemoryCounters {
    live: AtomicUsize,
    peak_live: AtomicUsize,
    reserved: AtomicUsize,
    peak_reserved: AtomicUsize,
    limit: AtomicUsize,
    segments: AtomicU64,
}

/// A device's driver and counters, through which pools allocate.
pub(crate) struct DeviceMemory<'a> {
    pub driver: &'a dyn Driver,
    pub counters: &'a MemoryCounters,
}

impl MemoryCounters {
    pub fn new(limit_bytes: usize) -> MemoryCounters {
        let zero = || AtomicUsize::new(0);
        MemoryCounters {
            live: zero(),
            peak_live: zero(),
            reserved: zero(),
            peak_reserved: zero(),
            limit: AtomicUsize::new(limit_bytes),
            segments: AtomicU64::new(0),
        }
    }

    pub fn stats(&self) -> DeviceMemoryStats {
        DeviceMemoryStats {
            live_bytes: self.live.load(Relaxed),
            peak_live_bytes: self.peak_live.load(Relaxed),
            reserved_bytes: self.reserved.load(Relaxed),
            peak_reserved_bytes: self.peak_reserved.load(Relaxed),
            limit_bytes: self.limit.load(Relaxed),
            segments_len: self.segments.load(Relaxed),
        }
    }

    /// Resets the peaks to the current values.
    pub fn reset_peaks(&self) {
        self.peak_live.store(self.live.load(Relaxed), Relaxed);
        self.peak_reserved.store(self.reserved.load(Relaxed), Relaxed);
    }

    pub fn set_limit(&self, bytes: usize) {
        self.limit.store(bytes, Relaxed);
    }

    fn reserve(&self, driver: &dyn Driver, bytes: usize) -> DriverResult<Address> {
        let all = self.reserved.fetch_add(bytes, Relaxed) + bytes;
        let limit = self.limit.load(Relaxed);
        let block = match all <= limit {
            true => driver.alloc(bytes),
            false => {
                let code = format!("a limit of {limit} bytes");
                Err(DriverError { call: "alloc", code, out_of_memory: true })
            }
        };
        match &block {
            Ok(_) => {
                self.peak_reserved.fetch_max(all, Relaxed);
                self.segments.fetch_add(1, Relaxed);
            }
            Err(_) => {
                self.reserved.fetch_sub(bytes, Relaxed);
            }
        }
        block
    }

    fn give_back(&self, driver: &dyn Driver, at: Address, bytes: usize) {
        // SAFETY: the pool passes whole segments of its own that are free.
        if unsafe { driver.free(at) }.is_ok() {
            self.reserved.fetch_sub(bytes, Relaxed);
        }
    }

    fn add_live(&self, bytes: usize) {
        let live = self.live.fetch_add(bytes, Relaxed) + bytes;
        self.peak_live.fetch_max(live, Relaxed);
    }

    fn remove_live(&self, bytes: usize) {
        self.live.fetch_sub(bytes, Relaxed);
    }
}

/// A block in use, or on its way back to its pool.
#[derive(Debug)]
pub(crate) struct StreamBlock {
    pub at: Address,
    bytes: usize,
    /// The events after which the block may be reused.
    pub pending: PendingEvents,
}

type PendingEvents = SmallVec<[Handle; 1]>;

impl StreamBlock {
    /// Returns a block without memory.
    pub fn none() -> StreamBlock {
        StreamBlock { at: 0, bytes: 0, pending: PendingEvents::new() }
    }
}

/// A range of a segment that is one block or free.
#[derive(Debug)]
struct SegmentSpan {
    bytes: usize,
    /// The address of its segment.
    segment: Address,
    small: bool,
    free: bool,
    pending: PendingEvents,
}

/// The blocks of one stream.
#[derive(Debug, Default)]
pub(crate) struct StreamPool {
    /// The stream whose work uses the blocks.
    stream: Handle,
    spans: BTreeMap<Address, SegmentSpan>,
    /// Free spans by size, of small segments and of large ones.
    free: [BTreeSet<(usize, Address)>; 2],
}

impl StreamPool {
    /// Returns the empty pool of a stream.
    pub fn of(stream: Handle) -> StreamPool {
        StreamPool { stream, ..StreamPool::default() }
    }

    /// Returns a block of at least `bytes`. The caller waits for the events in `pending` before it uses the block.
    pub fn take(&mut self, memory: &DeviceMemory, bytes: usize) -> DriverResult<StreamBlock> {
        let bytes = bytes.max(1).next_multiple_of(GRAIN_BYTES);
        let small = bytes <= SMALL_BYTES;
        let found = self.free[usize::from(!small)].range((bytes, 0)..).next().copied();
        let at = match found {
            Some((_, at)) => at,
            None => self.grow(memory, bytes, small)?,
        };
        let span = self.spans.get_mut(&at).expect("free spans are spans");
        self.free[usize::from(!small)].remove(&(span.bytes, at));
        span.free = false;
        let pending = std::mem::take(&mut span.pending);
        let (rest, segment) = (span.bytes - bytes, span.segment);
        if rest >= if small { GRAIN_BYTES } else { SMALL_BYTES } {
            span.bytes = bytes;
            let after = at + bytes as u64;
            // The rest has no events of its own: the stream that takes this block waits for them before the rest can
            // be taken.
            self.spans.insert(
                after,
                SegmentSpan { bytes: rest, segment, small, free: true, pending: PendingEvents::new() },
            );
            self.free[usize::from(!small)].insert((rest, after));
        }
        let bytes = self.spans[&at].bytes;
        memory.counters.add_live(bytes);
        Ok(StreamBlock { at, bytes, pending })
    }

    /// Takes back a block.
    pub fn put(&mut self, memory: &DeviceMemory, block: StreamBlock) {
        if block.bytes == 0 {
            return;
        }
        memory.counters.remove_live(block.bytes);
        let (mut at, mut pending) = (block.at, block.pending);
        let SegmentSpan { mut bytes, segment, small, .. } =
            self.spans.remove(&at).expect("the block came from here");
        let list = &mut self.free[usize::from(!small)];
        let after = at + bytes as u64;
        if self.spans.get(&after).is_some_and(|s| s.free && s.segment == segment) {
            let next = self.spans.remove(&after).expect("looked at above");
            list.remove(&(next.bytes, after));
            bytes += next.bytes;
            pending.extend(next.pending);
        }
        let before = self.spans.range(..at).next_back().map(|(&b, _)| b);
        if let Some(b) = before.filter(|b| self.spans[b].free && self.spans[b].segment == segment) {
            let previous = self.spans.remove(&b).expect("looked at above");
            list.remove(&(previous.bytes, b));
            bytes += previous.bytes;
            pending.extend(previous.pending);
            at = b;
        }
        list.insert((bytes, at));
        self.spans.insert(at, SegmentSpan { bytes, segment, small, free: true, pending });
    }

    /// Returns every segment that is free as a whole to the driver, once the work that uses it is done: that of the
    /// pool's stream, and that of other streams that have read its blocks. Returns true if there was one.
    pub fn clear(&mut self, memory: &DeviceMemory) -> bool {
        let ends = |pool: &StreamPool, at: Address, span: &SegmentSpan| {
            let next = pool.spans.get(&(at + span.bytes as u64));
            span.free && span.segment == at && next.is_none_or(|n| n.segment != span.segment)
        };
        let whole: Vec<Address> =
            self.spans.iter().filter(|(at, span)| ends(self, **at, span)).map(|(at, _)| *at).collect();
        if !whole.is_empty() {
            for event in whole.iter().flat_map(|at| &self.spans[at].pending) {
                // If the driver fails here, freeing the segments fails as well, or waits for the device.
                let _ = memory.driver.wait(self.stream, *event);
            }
            let _ = memory.driver.synchronize(self.stream);
        }
        for at in &whole {
            let span = self.spans.remove(at).expect("found above");
            self.free[usize::from(!span.small)].remove(&(span.bytes, *at));
            span.pending.iter().for_each(|&event| memory.driver.drop_event(event));
            memory.counters.give_back(memory.driver, *at, span.bytes);
        }
        !whole.is_empty()
    }

    /// Reserves a segment with room for `bytes`, as one free span.
    fn grow(&mut self, memory: &DeviceMemory, bytes: usize, small: bool) -> DriverResult<Address> {
        let segment_bytes = match bytes {
            _ if small => SMALL_SEGMENT_BYTES,
            _ if bytes < OWN_SEGMENT_BYTES => LARGE_SEGMENT_BYTES,
            _ => bytes.next_multiple_of(SMALL_SEGMENT_BYTES),
        };
        let reserve = |bytes| memory.counters.reserve(memory.driver, bytes).map(|at| (at, bytes));
        let (at, segment_bytes) = match reserve(segment_bytes) {
            // The remaining memory may be smaller than a segment.
            Err(e) if e.out_of_memory && segment_bytes > bytes => reserve(bytes)?,
            other => other?,
        };
        let span = SegmentSpan {
            bytes: segment_bytes,
            segment: at,
            small,
            free: true,
            pending: PendingEvents::new(),
        };
        self.spans.insert(at, span);
        self.free[usize::from(!small)].insert((segment_bytes, at));
        Ok(at)
    }
}
