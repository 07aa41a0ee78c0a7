//! Places for results: memory that kernels write their results to instead of new blocks.
//!
//! A kernel allocates its results itself, so that it cannot be told to write into a buffer that is there already. Instead
//! [`with_places`](super::with_places) offers buffers to the allocations of one call: the first of equal device, dtype and length
//! is taken. A gradient is computed so in the place from which a collective sends it. An allocation that takes a place and is no
//! result costs the place alone: the caller finds that the result lies elsewhere, and copies it.

use std::cell::{Cell, RefCell};

use super::storage::Storage;
use super::{DType, Device, Shape};

thread_local! {
    /// True if there are places, which every allocation asks.
    static IS_OFFERED: Cell<bool> = const { Cell::new(false) };
    static PLACES: RefCell<Vec<Option<Place>>> = const { RefCell::new(Vec::new()) };
}

/// A buffer that nothing else holds.
pub(super) struct Place {
    pub storage: Storage,
    pub dtype: DType,
    /// The number of elements, which fill the buffer.
    pub numel: usize,
}

/// Runs `f`, whose allocations take `places`. Returns its result, and the places that were not taken, at their positions.
/// Places that are offered outside do not count within.
pub(super) fn offer<T>(places: Vec<Place>, f: impl FnOnce() -> T) -> (T, Vec<Option<Place>>) {
    /// Restores the places that were offered outside, also if `f` unwinds.
    struct Outer(Vec<Option<Place>>);
    impl Drop for Outer {
        fn drop(&mut self) {
            IS_OFFERED.set(!self.0.is_empty());
            PLACES.set(std::mem::take(&mut self.0));
        }
    }
    let outer = Outer(PLACES.replace(places.into_iter().map(Some).collect()));
    IS_OFFERED.set(true);
    let result = f();
    let left = PLACES.take();
    drop(outer);
    (result, left)
}

/// Returns a buffer for the elements of a shape, if one is offered.
#[inline]
pub(super) fn take_place(device: Device, dtype: DType, shape: &Shape) -> Option<Storage> {
    if IS_OFFERED.get() { take_offered(device, dtype, shape.numel()) } else { None }
}

#[cold]
fn take_offered(device: Device, dtype: DType, numel: usize) -> Option<Storage> {
    // A device's kernels store whole vectors to memory of their own.
    let is_aligned = |x: &Storage| {
        x.device_block()
            .is_none_or(|block| (block.address() as usize + x.start_in_block()).is_multiple_of(16))
    };
    let fits = |place: &Place| {
        (place.storage.device(), place.dtype, place.numel) == (device, dtype, numel)
            && is_aligned(&place.storage)
    };
    let find = |places: &mut Vec<Option<Place>>| {
        places.iter_mut().find(|place| place.as_ref().is_some_and(fits))?.take()
    };
    PLACES.with_borrow_mut(find).map(|place| place.storage)
}
