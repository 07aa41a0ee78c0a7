//! Epilogues: they store the finished sums of a product.

use super::super::real::Real;
use super::super::simd::{Kernel, dispatch};
use super::stored::Stored;

/// A function that a fused product applies to each element before storing it. Implement `apply` `#[inline(always)]`.
pub trait UnaryF: Copy {
    /// Returns the function's value.
    fn apply<A: Real>(self, x: A) -> A;
}

/// The largest number of elements in a tile.
pub(super) const MAX_TILE_LEN: usize = 512;

/// Stores finished sums. Concurrent calls from several threads store different elements.
///
/// # Safety
/// The pointer of [`Epilogue::direct`] is valid for writing every element of the result.
pub(super) unsafe trait Epilogue<T>: Sync {
    /// Returns the result itself, if its columns are contiguous and tiles may be stored in it directly.
    fn direct(&self) -> Option<DirectStore<T>>;

    /// Stores the tile of `shape` at `(row, col)`. Its rows are `step` apart in `values`, which may be overwritten and
    /// have at most [`MAX_TILE_LEN`] elements.
    ///
    /// # Safety
    /// The tile is inside the result, and no other code reads or writes these elements.
    unsafe fn put(&self, at: (usize, usize), shape: (usize, usize), values: &mut [T], step: usize);
}

/// A direct store of tiles: `c = alpha * sum + beta * c`.
pub(super) struct DirectStore<T> {
    pub(super) c: *mut T,
    /// The distance from row to row.
    pub(super) step: usize,
    pub(super) alpha: T,
    pub(super) beta: Option<T>,
}

/// `c = alpha * sum + beta * c`.
pub(super) struct LinearEpilogue<T> {
    pub(super) c: *mut T,
    pub(super) strides: (usize, usize),
    pub(super) alpha: T,
    /// `None` if `c` is not read.
    pub(super) beta: Option<T>,
}

// SAFETY: the pointer is to a result that is borrowed exclusively; threads write different elements.
unsafe impl<T: Sync> Sync for LinearEpilogue<T> {}

// SAFETY: `c` is valid for the whole result.
unsafe impl<T: Real> Epilogue<T> for LinearEpilogue<T> {
    fn direct(&self) -> Option<DirectStore<T>> {
        let direct = DirectStore { c: self.c, step: self.strides.0, alpha: self.alpha, beta: self.beta };
        (self.strides.1 == 1).then_some(direct)
    }

    unsafe fn put(
        &self,
        (row, col): (usize, usize),
        (rows, cols): (usize, usize),
        values: &mut [T],
        step: usize,
    ) {
        for (i, values) in values.chunks(step).take(rows).enumerate() {
            for (j, &sum) in values[..cols].iter().enumerate() {
                // SAFETY: the caller's promise.
                unsafe {
                    let c = self.c.add((row + i) * self.strides.0 + (col + j) * self.strides.1);
                    let sum = self.alpha * sum;
                    *c = self.beta.map_or(sum, |beta| sum + beta * *c);
                }
            }
        }
    }
}

/// `c = f(sum + bias)`, rounded to `E` after every step.
pub(super) struct FusedEpilogue<'a, E, F> {
    pub(super) c: *mut E,
    pub(super) strides: (usize, usize),
    /// The bias as a matrix: its strides are (0, 1), or (1, 0) if the product is transposed.
    pub(super) bias: Option<(&'a [E], (usize, usize))>,
    /// `None` if no function is applied.
    pub(super) f: Option<F>,
}

// SAFETY: as for `LinearEpilogue`; the function is only called.
unsafe impl<E: Sync, F: Sync> Sync for FusedEpilogue<'_, E, F> {}

// SAFETY: `direct` returns `None`.
unsafe impl<E: Stored, F: UnaryF + Sync> Epilogue<E::Wide> for FusedEpilogue<'_, E, F> {
    fn direct(&self) -> Option<DirectStore<E::Wide>> {
        None
    }

    unsafe fn put(&self, at: (usize, usize), shape: (usize, usize), values: &mut [E::Wide], step: usize) {
        dispatch(FusedEpilogueTile { finish: self, at, shape, values, step });
    }
}

/// The loop that stores one tile of a [`FusedEpilogue`].
struct FusedEpilogueTile<'a, 'b, E: Stored, F> {
    finish: &'a FusedEpilogue<'b, E, F>,
    at: (usize, usize),
    shape: (usize, usize),
    values: &'a mut [E::Wide],
    step: usize,
}

impl<E: Stored, F: UnaryF> Kernel for FusedEpilogueTile<'_, '_, E, F> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let (finish, (row, col), cols) = (self.finish, self.at, self.shape.1);
        let values = &mut self.values[..self.shape.0 * self.step];
        if let Some((bias, steps)) = finish.bias {
            for (i, line) in values.chunks_exact_mut(self.step).enumerate() {
                let bias = &bias[(row + i) * steps.0 + col * steps.1..];
                if steps.1 == 1 {
                    line.iter_mut().zip(&bias[..cols]).for_each(|(x, b)| *x = rounded::<E>(*x) + b.widen());
                } else {
                    let bias = bias[0].widen();
                    line.iter_mut().for_each(|x| *x = rounded::<E>(*x) + bias);
                }
            }
        }
        if let Some(f) = finish.f {
            for x in values.iter_mut() {
                *x = f.apply(rounded::<E>(*x));
            }
        }
        for (i, line) in values.chunks_exact(self.step).enumerate() {
            let line = &line[..cols];
            let c = finish.c.wrapping_add((row + i) * finish.strides.0 + col * finish.strides.1);
            if finish.strides.1 == 1 {
                // SAFETY: a row of the tile, which the caller of `put` promises that no other code uses.
                let c = unsafe { std::slice::from_raw_parts_mut(c, cols) };
                c.iter_mut().zip(line).for_each(|(c, &x)| *c = E::narrow(x));
                continue;
            }
            for (j, &x) in line.iter().enumerate() {
                // SAFETY: as above, for one element.
                unsafe { *c.add(j * finish.strides.1) = E::narrow(x) };
            }
        }
    }
}

/// Rounds a value to `E`.
#[inline(always)]
fn rounded<E: Stored>(x: E::Wide) -> E::Wide {
    E::narrow(x).widen()
}
