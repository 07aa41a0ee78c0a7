//! Folds that are done together.
//!
//! A large all-reduce is done once for all members, by whoever waits for it, and so are the folds of a large reduce-scatter
//! whose parts are uneven. Members take chunks of the results in turn and fold them from everybody's tensors. No chunk
//! belongs to a rank, so nobody waits for one that does not wait itself.

use smallvec::SmallVec;

use super::slot::Contents;
use super::sync::atomic::{AtomicUsize, Ordering};
use crate::comm::Reduce;
use crate::comm::transport::fold::{fold_into, fold_range};
use crate::error::Result;
use crate::tensor::{DType, Device, Tensor};

/// Models try the same on few elements.
const MODEL: bool = cfg!(any(loom, shuttle));

/// From this size on, an all-reduce is folded in chunks by all who wait; below, by the last to come.
const LARGE_BYTES: usize = if MODEL { 8 } else { 64 << 10 };

/// Small enough to share the work evenly, large enough that taking one costs nothing.
const CHUNK_BYTES: usize = if MODEL { 8 } else { 256 << 10 };

/// From this size on, it pays to help a member that has more to fold.
const HELPED_BYTES: usize = 2 * CHUNK_BYTES;

/// The results in the making: one that is everybody's, or one a member.
#[derive(Debug)]
pub(super) struct Folds {
    all: SmallVec<[Fold; 1]>,
}

#[derive(Debug)]
struct Fold {
    reduce: Reduce,
    /// Which tensor of each member it folds.
    part: usize,
    /// Not read before all chunks are done.
    out: Tensor,
    /// The first byte of `out`.
    at: FirstByte,
    chunk_len: usize,
    chunks: usize,
    taken: AtomicUsize,
    done: AtomicUsize,
}

/// What is kept of a result that somebody then writes has to be copied: too little to notice.
const KEPT_BYTES: usize = 16 << 10;

#[derive(Clone, Copy, Debug)]
struct FirstByte(*mut u8);

// SAFETY: it is read and written through by `Fold::work` alone, which says why two threads never touch the same byte.
unsafe impl Send for FirstByte {}
// SAFETY: as above.
unsafe impl Sync for FirstByte {}

impl Folds {
    /// The fold of a large all-reduce in the processor's memory.
    pub(super) fn large(reduce: &Reduce, contents: &Contents) -> Option<Folds> {
        let x = contents.part(0, 0);
        let bytes = reduce.out_shape().numel() * x.dtype().size_bytes();
        let large = bytes >= LARGE_BYTES && x.device() == Device::Cpu;
        large.then(|| Folds { all: std::iter::once(Fold::new(reduce, 0, x.dtype())).collect() })
    }

    /// The folds of a large reduce-scatter where some member has more to do than the others.
    pub(super) fn uneven(contents: &Contents) -> Option<Folds> {
        let x = contents.part(0, 0);
        let reduces = || (0..contents.len()).map(|at| contents.reduce(at).expect("every member folds"));
        let bytes = |reduce: &Reduce| reduce.out_shape().numel() * x.dtype().size_bytes();
        let most = reduces().map(bytes).max()?;
        let uneven = most * contents.len() > reduces().map(bytes).sum::<usize>() / 4 * 5;
        if most < HELPED_BYTES || !uneven || x.device() != Device::Cpu {
            return None;
        }
        let one = |(part, reduce)| Fold::new(reduce, part, x.dtype());
        Some(Folds { all: reduces().enumerate().map(one).collect() })
    }

    /// Folds chunks of the result of the member at `position`, then of the others', until none is left to take. True if a
    /// result was finished here that another member may wait for.
    pub(super) fn work(&self, position: usize, contents: &Contents) -> bool {
        let own = self.own(position);
        let mut last = false;
        for fold in self.all[own..].iter().chain(&self.all[..own]) {
            last |= fold.work(contents);
        }
        last
    }

    /// True once the member's result is finished.
    pub(super) fn is_done(&self, position: usize) -> bool {
        self.all[self.own(position)].is_done()
    }

    /// The member's result.
    pub(super) fn result(&self, position: usize) -> Tensor {
        let fold = &self.all[self.own(position)];
        assert!(fold.is_done(), "chunks are still being written");
        fold.out.clone()
    }

    fn own(&self, position: usize) -> usize {
        if self.all.len() == 1 { 0 } else { position }
    }
}

impl Fold {
    fn new(reduce: &Reduce, part: usize, dtype: DType) -> Fold {
        let mut out = Tensor::stale(dtype, reduce.out_shape());
        let at = FirstByte(out.bytes_mut().as_mut_ptr());
        let chunk_len = CHUNK_BYTES / dtype.size_bytes();
        let empty = reduce.order.outs_len() == 0;
        let chunks = if empty { 0 } else { reduce.shape.numel().div_ceil(chunk_len) };
        let (taken, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Fold { reduce: reduce.clone(), part, out, at, chunk_len, chunks, taken, done }
    }

    /// Folds chunks until none is left to take; true if the last one was finished here.
    fn work(&self, contents: &Contents) -> bool {
        let (size, each) = (self.out.dtype().size_bytes(), self.reduce.shape.numel());
        let mut last = false;
        loop {
            let chunk = self.taken.fetch_add(1, Ordering::Relaxed);
            if chunk >= self.chunks {
                return last;
            }
            let start = chunk * self.chunk_len;
            let end = (start + self.chunk_len).min(each);
            let row = |k: usize| {
                // SAFETY: `at` points to the buffer of `out`, which this structure keeps alive, gives to nobody and
                // does not read until `done` equals `chunks`. Chunk numbers are handed out once each; the ranges
                // `start..end` of the rows of `out`, each `each` elements long, are disjoint and inside `out`, so this
                // is the only access to these (initialised) bytes.
                unsafe {
                    let first = self.at.0.add((k * each + start) * size);
                    std::slice::from_raw_parts_mut(first, (end - start) * size)
                }
            };
            let rows = (0..self.reduce.order.outs_len()).map(row).collect();
            fold_range(&self.reduce, &|at| contents.part(at, self.part), start..end, rows);
            last = self.done.fetch_add(1, Ordering::AcqRel) + 1 == self.chunks;
        }
    }

    fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire) == self.chunks
    }
}

/// The last small result, which is written again once nobody else holds it: steady programs then take no memory.
#[derive(Debug, Default)]
pub(super) struct Kept(Option<Tensor>);

impl Kept {
    /// The fold of the tensors that `of` names by member.
    pub(super) fn fold<'a>(&mut self, reduce: &Reduce, of: &dyn Fn(usize) -> &'a Tensor) -> Result<Tensor> {
        let mut last = self.0.take();
        let mut is_fresh = false;
        let out = fold_into(reduce, of, |dtype, shape| {
            is_fresh = true;
            let fits =
                |last: &mut Tensor| last.dtype() == dtype && *last.shape() == shape && last.is_unique();
            last.take_if(fits).unwrap_or_else(|| Tensor::stale(dtype, shape))
        })?;
        // What was not folded is a member's own tensor.
        if is_fresh && out.len_bytes() <= KEPT_BYTES {
            self.0 = Some(out.clone());
        }
        Ok(out)
    }
}
