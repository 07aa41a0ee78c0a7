//! Folds that several members compute together.
//!
//! A large all-reduce is folded once for all members, by those that wait for it; so are the folds of a large
//! reduce-scatter with uneven parts. Members take chunks of the results in turn, and fold them from all members'
//! tensors.

use smallvec::{SmallVec, smallvec};

use super::shared_chunks::{CHUNK_BYTES, FirstByte, LARGE_BYTES, SharedChunks};
use crate::comm::transport::Reduce;
use crate::comm::transport::fold::{fold_into, fold_range};
use crate::error::Result;
use crate::tensor::{DType, Device, Tensor};

/// The smallest fold that is worth sharing with a member that has more to fold.
const HELPED_BYTES: usize = 2 * CHUNK_BYTES;

/// The largest result whose memory is kept. A program that writes to such a result copies these few bytes first.
const REUSED_BYTES: usize = 16 << 10;

/// Results that are being folded: one for all members, or one per member.
#[derive(Debug)]
pub(super) struct SharedFolds {
    all: SmallVec<[SharedFold; 1]>,
}

#[derive(Debug)]
struct SharedFold {
    reduce: Reduce,
    /// The index of the folded tensor among those of each member.
    part: usize,
    /// Not read before all chunks are done.
    out: Tensor,
    /// The first byte of `out`.
    at: FirstByte,
    chunk_len: usize,
    chunks: SharedChunks,
}

impl SharedFolds {
    /// Shares the fold of a large all-reduce on the CPU. `x` is one of its tensors. Returns `None` if it is small.
    pub(super) fn large(reduce: &Reduce, x: &Tensor) -> Result<Option<SharedFolds>> {
        let bytes = reduce.out_shape().numel() * x.dtype().size_bytes();
        let large = bytes >= LARGE_BYTES && x.device() == Device::Cpu;
        let only = || SharedFold::new(reduce, 0, x.dtype());
        large.then(only).transpose().map(|only| only.map(|only| SharedFolds { all: smallvec![only] }))
    }

    /// Shares the folds of a large reduce-scatter if some member has more to fold than the others. `reduce_of`
    /// returns each member's fold, and `x` is one of the tensors.
    pub(super) fn uneven<'a>(
        members: usize,
        reduce_of: impl Fn(usize) -> &'a Reduce,
        x: &Tensor,
    ) -> Result<Option<SharedFolds>> {
        let reduces = || (0..members).map(&reduce_of);
        let bytes = |reduce: &Reduce| reduce.out_shape().numel() * x.dtype().size_bytes();
        let most = reduces().map(bytes).max().unwrap_or(0);
        let uneven = most * members > reduces().map(bytes).sum::<usize>() / 4 * 5;
        if most < HELPED_BYTES || !uneven || x.device() != Device::Cpu {
            return Ok(None);
        }
        let one = |(part, reduce)| SharedFold::new(reduce, part, x.dtype());
        Ok(Some(SharedFolds { all: reduces().enumerate().map(one).collect::<Result<_>>()? }))
    }

    /// Folds chunks of this member's result, then of the other members', until none is left. Returns true if this
    /// finished a result that another member may wait for. `part` returns a member's tensor by index.
    pub(super) fn work<'a>(&self, position: usize, part: impl Fn(usize, usize) -> &'a Tensor) -> bool {
        let own = self.own(position);
        let mut last = false;
        for fold in self.all[own..].iter().chain(&self.all[..own]) {
            last |= fold.work(&part);
        }
        last
    }

    /// Returns true once the member's result is finished.
    pub(super) fn is_done(&self, position: usize) -> bool {
        self.all[self.own(position)].is_done()
    }

    /// Returns the member's finished result.
    pub(super) fn result(&self, position: usize) -> Tensor {
        let fold = &self.all[self.own(position)];
        assert!(fold.is_done(), "chunks are still being written");
        fold.out.clone()
    }

    fn own(&self, position: usize) -> usize {
        if self.all.len() == 1 { 0 } else { position }
    }
}

impl SharedFold {
    fn new(reduce: &Reduce, part: usize, dtype: DType) -> Result<SharedFold> {
        let mut out = Tensor::try_uninit(dtype, reduce.out_shape())?;
        let at = FirstByte(out.bytes_mut().as_mut_ptr());
        let chunk_len = CHUNK_BYTES / dtype.size_bytes();
        let empty = reduce.order.outs_len() == 0;
        let chunks = if empty { 0 } else { reduce.shape.numel().div_ceil(chunk_len) };
        let chunks = SharedChunks::new(chunks);
        Ok(SharedFold { reduce: reduce.clone(), part, out, at, chunk_len, chunks })
    }

    /// Folds chunks until none is left. Returns true if this finished the last one.
    fn work<'a>(&self, part: impl Fn(usize, usize) -> &'a Tensor) -> bool {
        let (size, each) = (self.out.dtype().size_bytes(), self.reduce.shape.numel());
        self.chunks.work(|chunk| {
            let start = chunk * self.chunk_len;
            let end = (start + self.chunk_len).min(each);
            let row = |k: usize| {
                // SAFETY: `at` points to the buffer of `out`, which this structure keeps alive, gives to no one and
                // does not read until all chunks are done. Chunk numbers are handed out once each; the ranges
                // `start..end` of the rows of `out`, each `each` elements long, are disjoint and inside `out`, so
                // this is the only access to these (initialised) bytes.
                unsafe {
                    let first = self.at.0.add((k * each + start) * size);
                    std::slice::from_raw_parts_mut(first, (end - start) * size)
                }
            };
            let rows = (0..self.reduce.order.outs_len()).map(row).collect();
            fold_range(&self.reduce, &|member| part(member, self.part), start..end, rows);
        })
    }

    fn is_done(&self) -> bool {
        self.chunks.is_done()
    }
}

/// The last small result. Its memory is reused once nothing else holds it, so that a steady program allocates
/// nothing.
#[derive(Debug, Default)]
pub(super) struct ReusedResult(Option<Tensor>);

impl ReusedResult {
    /// Returns the fold of the tensors that `of` returns by member.
    pub(super) fn fold<'a>(&mut self, reduce: &Reduce, of: &dyn Fn(usize) -> &'a Tensor) -> Result<Tensor> {
        let mut last = self.0.take();
        let mut is_fresh = false;
        let out = fold_into(reduce, of, |dtype, shape| {
            is_fresh = true;
            let fits =
                |last: &mut Tensor| last.dtype() == dtype && *last.shape() == shape && last.is_unique();
            last.take_if(fits).map_or_else(|| Tensor::try_uninit(dtype, shape), Ok)
        })?;
        // A result that needed no fold is a member's own tensor.
        if is_fresh && out.len_bytes() <= REUSED_BYTES {
            self.0 = Some(out.clone());
        }
        Ok(out)
    }
}
