//! A loop over contiguous elements.

use crate::isa::simd::{Kernel, dispatch, opaque_index};

/// Sets `dst[i] = f(src[i])` for every index of the shorter slice, with the widest vectors that the CPU has.
///
/// ```
/// use isoshard_kernels::map_slice;
/// let mut halves = [0.0f32; 3];
/// map_slice(&[2i32, 4, 6], &mut halves, |x| x as f32 / 2.0);
/// assert_eq!(halves, [1.0, 2.0, 3.0]);
/// ```
pub fn map_slice<A: Copy, O: Copy>(src: &[A], dst: &mut [O], f: impl Fn(A) -> O + Copy) {
    dispatch(MapSlice { f, src, dst });
}

struct MapSlice<'a, F, A, O> {
    f: F,
    src: &'a [A],
    dst: &'a mut [O],
}

impl<A: Copy, O, F: Fn(A) -> O + Copy> Kernel for MapSlice<'_, F, A, O> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        for (to, &from) in self.dst.iter_mut().zip(self.src) {
            *to = (self.f)(from);
        }
    }
    #[inline(always)]
    fn run_small(self) {
        for i in 0..self.dst.len().min(self.src.len()) {
            let i = opaque_index(i);
            self.dst[i] = (self.f)(self.src[i]);
        }
    }
}
