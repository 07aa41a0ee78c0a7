//! Places for results: memory that kernels write their results to instead of new blocks.
//!
//! A kernel allocates its results itself, so that it cannot be told to write into a buffer that is there already. Instead
//! [`with_places`] offers tensors to the allocations of one call: the first of equal device, dtype and length is taken. A
//! gradient is computed so where a collective will read it. An allocation that takes a place and is no result costs the place
//! alone: whoever offered it compares addresses, or copies.

use std::cell::{Cell, RefCell};

use super::{DType, Device, Shape, Tensor};

thread_local! {
    /// True if there are places, which every allocation asks.
    static IS_OFFERED: Cell<bool> = const { Cell::new(false) };
    static PLACES: RefCell<Vec<Option<Tensor>>> = const { RefCell::new(Vec::new()) };
}

/// Runs `f`, whose allocations take tensors of `places`. Returns its result, and the places that were not taken, at their
/// positions. Places that are offered outside do not count within.
pub(crate) fn with_places<T>(places: Vec<Tensor>, f: impl FnOnce() -> T) -> (T, Vec<Option<Tensor>>) {
    /// Restores the places that were offered outside, also if `f` unwinds.
    struct Outer(Vec<Option<Tensor>>);
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

/// Returns a place for an allocation, if one is offered.
#[inline]
pub(super) fn take_place(device: Device, dtype: DType, shape: &Shape) -> Option<Tensor> {
    if IS_OFFERED.get() { take_offered(device, dtype, shape) } else { None }
}

#[cold]
fn take_offered(device: Device, dtype: DType, shape: &Shape) -> Option<Tensor> {
    // A device's kernels store whole vectors to memory of their own.
    let is_aligned = |x: &Tensor| x.device_address().is_none_or(|at| at.is_multiple_of(16));
    let fits =
        |x: &Tensor| (x.device(), x.dtype(), x.numel()) == (device, dtype, shape.numel()) && is_aligned(x);
    let find = |places: &mut Vec<Option<Tensor>>| {
        places.iter_mut().find(|place| place.as_ref().is_some_and(fits))?.take()
    };
    let place = PLACES.with_borrow_mut(find)?;
    Some(Tensor { strides: shape.strides(), shape: shape.clone(), ..place })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_allocation_that_fits_takes_a_place() {
        let address = |x: &Tensor| x.data::<f32>().map(|x| x.as_ptr() as usize).unwrap();
        let places = Tensor::zeros(DType::F32, [5]).cut(&[(0, [2].into()), (2, [3].into())]).unwrap();
        let at: Vec<usize> = places.iter().map(address).collect();
        let (made, left) = with_places(places, || {
            let other = Tensor::full(DType::F32, [4], 1.0);
            let (inner, _) = with_places(Vec::new(), || Tensor::zeros(DType::F32, [3]));
            let own = Tensor::full(DType::F32, [3, 1], 2.0);
            [other, inner, own, Tensor::zeros(DType::F32, [3]), Tensor::zeros(DType::F64, [2])]
        });
        assert_eq!(
            made.iter().take(4).map(|x| address(x) == at[1]).collect::<Vec<_>>(),
            [false, false, true, false]
        );
        assert_eq!(left.iter().map(Option::is_some).collect::<Vec<_>>(), [true, false]);
        assert_ne!(address(&Tensor::zeros(DType::F32, [2])), at[0], "nothing is offered any more");
        let unwound =
            std::panic::catch_unwind(|| with_places(vec![Tensor::zeros(DType::F32, [7])], || panic!("no")));
        assert!(unwound.is_err() && !IS_OFFERED.get());
    }
}
