//! Epilogues: they store the finished sums of a product.

use super::tiles::stored::Stored;
use super::tiles::tile::Added;
use crate::isa::simd::{Kernel, dispatch};
use crate::loops::formulas::LoopFn;
use crate::num::real::Real;

/// The largest number of elements in a tile.
pub(super) const MAX_TILE_LEN: usize = 512;

/// Stores finished sums. Concurrent calls from several threads store different elements.
///
/// # Safety
/// The pointers of [`Epilogue::direct`] are valid for every element of the result: `c` for writing, the added matrix for
/// reading.
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

/// A direct store of tiles: `c = alpha * sum`, plus a matrix if one is added. Columns are contiguous.
#[derive(Clone, Copy)]
pub(super) struct DirectStore<T> {
    pub(super) c: *mut T,
    /// The distance from row to row.
    pub(super) step: usize,
    pub(super) alpha: T,
    pub(super) added: Option<Added<T>>,
}

impl<T> DirectStore<T> {
    /// Returns the store of the part that begins at `(row, col)`.
    pub(super) fn at(self, row: usize, col: usize) -> Self {
        let c = self.c.wrapping_add(row.wrapping_mul(self.step).wrapping_add(col));
        DirectStore { c, added: self.added.map(|added| added.at(row, col)), ..self }
    }
}

/// `c = alpha * sum`, plus a matrix if one is added.
pub(super) struct LinearEpilogue<T> {
    pub(super) c: *mut T,
    pub(super) strides: (usize, usize),
    pub(super) alpha: T,
    pub(super) added: Option<Added<T>>,
}

// SAFETY: `c` is a result that is borrowed exclusively, the added matrix is that or borrowed; threads write different
// elements.
unsafe impl<T: Sync> Sync for LinearEpilogue<T> {}

// SAFETY: `c` and the added matrix are valid for the whole result.
unsafe impl<T: Real> Epilogue<T> for LinearEpilogue<T> {
    fn direct(&self) -> Option<DirectStore<T>> {
        let contiguous = self.strides.1 == 1 && self.added.is_none_or(|added| added.strides.1 == 1);
        let direct = DirectStore { c: self.c, step: self.strides.0, alpha: self.alpha, added: self.added };
        contiguous.then_some(direct)
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
                    *c = self.added.map_or(sum, |added| sum + added.factor * *added.at(row + i, col + j).x);
                }
            }
        }
    }
}

/// `c = sum`, rounded once.
pub(super) struct RoundingEpilogue<E> {
    pub(super) c: *mut E,
    pub(super) strides: (usize, usize),
}

// SAFETY: as for `LinearEpilogue`.
unsafe impl<E: Sync> Sync for RoundingEpilogue<E> {}

// SAFETY: `direct` returns `None`.
unsafe impl<E: Stored> Epilogue<E::Wide> for RoundingEpilogue<E> {
    fn direct(&self) -> Option<DirectStore<E::Wide>> {
        None
    }

    unsafe fn put(&self, at: (usize, usize), shape: (usize, usize), values: &mut [E::Wide], step: usize) {
        dispatch(StoreTile { c: self.c, strides: self.strides, at, shape, values, step });
    }
}

/// `z = sum + bias` and `y = f(z)` for f16 and bf16. Both are computed in f32 and rounded once.
pub(super) struct MapEpilogue<'a, E: Stored<Wide = f32>> {
    pub(super) y: *mut E,
    /// The place of `z`, and `f`. Without them, `y` is `z`.
    pub(super) activation: Option<(*mut E, LoopFn<f32, f32>)>,
    pub(super) strides: (usize, usize),
    /// The bias as a matrix: its strides are (0, 1), or (1, 0) if the product is transposed.
    pub(super) bias: Option<(&'a [E], (usize, usize))>,
}

// SAFETY: as for `LinearEpilogue`; the function is only called.
unsafe impl<E: Stored<Wide = f32>> Sync for MapEpilogue<'_, E> {}

// SAFETY: `direct` returns `None`.
unsafe impl<E: Stored<Wide = f32>> Epilogue<f32> for MapEpilogue<'_, E> {
    fn direct(&self) -> Option<DirectStore<f32>> {
        None
    }

    unsafe fn put(&self, at: (usize, usize), shape: (usize, usize), values: &mut [f32], step: usize) {
        let strides = self.strides;
        if let Some((bias, steps)) = self.bias {
            let bias = &bias[at.0 * steps.0 + at.1 * steps.1..];
            dispatch(AddBias { bias, steps, shape, values: &mut *values, step });
        }
        let Some((z, f)) = self.activation else {
            dispatch(StoreTile { c: self.y, strides, at, shape, values, step });
            return;
        };
        dispatch(StoreTile { c: z, strides, at, shape, values: &*values, step });
        let (mut results, len) = ([0.0; MAX_TILE_LEN], shape.0 * step);
        f([0.0; 2], &[&values[..len]], &mut results[..len]);
        dispatch(StoreTile { c: self.y, strides, at, shape, values: &results, step });
    }
}

/// The loop that adds a bias to a tile.
struct AddBias<'a, E: Stored> {
    /// The bias from the tile's first element on.
    bias: &'a [E],
    steps: (usize, usize),
    shape: (usize, usize),
    values: &'a mut [E::Wide],
    step: usize,
}

impl<E: Stored> Kernel for AddBias<'_, E> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        for (i, line) in self.values.chunks_mut(self.step).take(self.shape.0).enumerate() {
            if self.steps.1 == 1 {
                let bias = &self.bias[..self.shape.1];
                line.iter_mut().zip(bias).for_each(|(x, b)| *x = *x + b.widen());
            } else {
                let bias = self.bias[i * self.steps.0].widen();
                line.iter_mut().for_each(|x| *x = *x + bias);
            }
        }
    }
}

/// The loop that stores one tile of the matrix `c`.
struct StoreTile<'a, E: Stored> {
    c: *mut E,
    strides: (usize, usize),
    at: (usize, usize),
    shape: (usize, usize),
    values: &'a [E::Wide],
    step: usize,
}

impl<E: Stored> Kernel for StoreTile<'_, E> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let ((row, col), (rows, cols)) = (self.at, self.shape);
        for (i, line) in self.values.chunks(self.step).take(rows).enumerate() {
            let line = &line[..cols];
            let c = self.c.wrapping_add((row + i) * self.strides.0 + col * self.strides.1);
            if self.strides.1 == 1 {
                // SAFETY: a row of the tile, which the caller of `put` promises that no other code uses.
                let c = unsafe { std::slice::from_raw_parts_mut(c, cols) };
                c.iter_mut().zip(line).for_each(|(c, &x)| *c = E::narrow(x));
                continue;
            }
            for (j, &x) in line.iter().enumerate() {
                // SAFETY: as above, for one element.
                unsafe { *c.add(j * self.strides.1) = E::narrow(x) };
            }
        }
    }
}
