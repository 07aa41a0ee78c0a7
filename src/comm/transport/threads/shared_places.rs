//! Gathers whose parts are copied once, to memory that all members read: one member brings the places, and those that
//! wait copy chunks of all parts in turn.

use smallvec::SmallVec;

use super::shared_chunks::{CHUNK_BYTES, FirstByte, LARGE_BYTES, SharedChunks};
use crate::comm::transport::CallResults;
use crate::tensor::storage::pool_stats;
use crate::tensor::{Device, Tensor};

/// The part of a rank's free memory that the places which it brings to a call may take: a sixteenth, so that places which
/// slower members still read cannot keep it from going on.
const ROOM_SHARE: usize = 16;

/// The places of a gather, one per member, while members copy their parts there.
#[derive(Debug)]
pub(super) struct SharedPlaces {
    /// Not read before all chunks are done.
    places: CallResults,
    /// The first byte of each place.
    starts: SmallVec<[FirstByte; 8]>,
    /// The number of chunks of the longest part.
    chunks_each: usize,
    chunks: SharedChunks,
}

impl SharedPlaces {
    /// Returns true if parts for these places are worth copying together. All members answer alike.
    pub(super) fn are_worthwhile(places: &[Tensor]) -> bool {
        places.iter().all(|place| place.device() == Device::Cpu)
            && places.iter().map(Tensor::len_bytes).sum::<usize>() >= LARGE_BYTES
    }

    /// Returns true if the memory limit of the calling rank leaves room for many such places.
    pub(super) fn leave_room(places: &[Tensor]) -> bool {
        let (pool, bytes) = (pool_stats(), places.iter().map(Tensor::len_bytes).sum::<usize>());
        bytes <= pool.limit_bytes.saturating_sub(pool.live_bytes) / ROOM_SHARE
    }

    /// Takes over places in the CPU's memory that nothing else holds.
    pub(super) fn new(places: Vec<Tensor>) -> SharedPlaces {
        let mut places = CallResults::from_vec(places);
        let chunks_each = places.iter().map(|x| x.len_bytes().div_ceil(CHUNK_BYTES)).max().unwrap_or(0);
        let starts = places.iter_mut().map(|x| FirstByte(x.bytes_mut().as_mut_ptr())).collect();
        let chunks = SharedChunks::new(chunks_each * places.len());
        SharedPlaces { places, starts, chunks_each, chunks }
    }

    /// Copies chunks of the members' parts until none is left. Returns true if this finished the last one. `part` returns a
    /// member's tensor, which has the shape and dtype of its place.
    pub(super) fn work<'a>(&self, part: impl Fn(usize) -> &'a Tensor) -> bool {
        self.chunks.work(|chunk| {
            let (member, chunk) = (chunk / self.chunks_each, chunk % self.chunks_each);
            let part = part(member).packed();
            let bytes = part.as_bytes().expect("packed, in the CPU's memory");
            assert_eq!(bytes.len(), self.places[member].len_bytes(), "calls that agree have the same parts");
            let start = (chunk * CHUNK_BYTES).min(bytes.len());
            let bytes = &bytes[start..bytes.len().min(start + CHUNK_BYTES)];
            // SAFETY: the place's buffer has these initialised bytes. This structure keeps it alive, and neither reads it nor
            // gives it away until all chunks are done. Each number is handed out once, and chunks are disjoint, so this
            // is the only access to these bytes. The part is another buffer, since nothing else held the place.
            let into =
                unsafe { std::slice::from_raw_parts_mut(self.starts[member].0.add(start), bytes.len()) };
            into.copy_from_slice(bytes);
        })
    }

    /// Returns true once all parts have been copied.
    pub(super) fn is_done(&self) -> bool {
        self.chunks.is_done()
    }

    /// Returns the parts, in group order, which all members share.
    pub(super) fn tensors(&self) -> CallResults {
        assert!(self.is_done(), "parts are still being copied");
        self.places.clone()
    }
}
