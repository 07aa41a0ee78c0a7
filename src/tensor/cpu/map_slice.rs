//! One loop over contiguous elements.

use super::simd::{Kernel, dispatch};

/// `dst[i] = f(src[i])`, vectorised.
pub fn map_slice<A: Copy, O: Copy>(src: &[A], dst: &mut [O], f: impl Fn(A) -> O + Copy) {
    dispatch(MapSlice { f, x: src, o: dst });
}

struct MapSlice<'a, F, A, O> {
    f: F,
    x: &'a [A],
    o: &'a mut [O],
}

impl<A: Copy, O, F: Fn(A) -> O + Copy> Kernel for MapSlice<'_, F, A, O> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        for (o, &x) in self.o.iter_mut().zip(self.x) {
            *o = (self.f)(x);
        }
    }
}
