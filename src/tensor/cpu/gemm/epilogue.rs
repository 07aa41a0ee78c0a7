//! Epilogues: they store the finished sums of a product, and complete the stored elements.

use super::super::loops::LoopFn;
use super::super::real::{Num, Real, Widen};
use super::super::simd::{Kernel, dispatch};
use super::stored::Stored;
use super::tile::Added;

/// The largest number of elements in a tile.
pub(super) const MAX_TILE_LEN: usize = 512;

/// Stores finished sums. Concurrent calls from several threads store different elements.
///
/// # Safety
/// The pointers of [`Epilogue::direct`] are valid for writing and reading every element of the result.
pub(super) unsafe trait Epilogue<T>: Sync {
    /// Returns the result itself, if its columns are contiguous and tiles may be stored in it directly.
    fn direct(&self) -> Option<DirectStore<T>>;

    /// Stores the tile of `shape` at `(row, col)`. Its rows are `step` apart in `values`, which may be overwritten and
    /// have at most [`MAX_TILE_LEN`] elements.
    ///
    /// # Safety
    /// The tile is inside the result, and no other code reads or writes these elements.
    unsafe fn put(&self, at: (usize, usize), shape: (usize, usize), values: &mut [T], step: usize);

    /// Completes the part of `shape` at `(row, col)` whose sums are all stored, and still in a cache. It is called once
    /// for each element.
    ///
    /// # Safety
    /// The part is inside the result, and no other code reads or writes these elements.
    unsafe fn complete(&self, _at: (usize, usize), _shape: (usize, usize)) {}
}

/// A direct store of tiles: `c = alpha * sum`, or with `added`, `c = alpha * sum + factor * x`.
#[derive(Clone, Copy)]
pub(super) struct DirectStore<T> {
    pub(super) c: *mut T,
    /// The distance from row to row; columns are contiguous.
    pub(super) step: usize,
    pub(super) alpha: T,
    pub(super) added: Option<Added<T>>,
}

impl<T> DirectStore<T> {
    /// Returns the store of the part that begins at `(row, col)`.
    pub(super) fn at(self, row: usize, col: usize) -> Self {
        let added = self.added.map(|added| Added {
            x: added.x.wrapping_add(row.wrapping_mul(added.step).wrapping_add(col)),
            ..added
        });
        let c = self.c.wrapping_add(row.wrapping_mul(self.step).wrapping_add(col));
        DirectStore { c, added, ..self }
    }
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
        let (c, step) = (self.c, self.strides.0);
        let added = self.beta.map(|factor| Added { factor, x: c.cast_const(), step });
        (self.strides.1 == 1).then_some(DirectStore { c, step, alpha: self.alpha, added })
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

/// A function of sums, which are wide.
type MapFn<E> = LoopFn<<E as Widen>::Wide, <E as Widen>::Wide>;

/// `z = sum + bias` and `y = f(z)`. Both are computed in the wide type and rounded once: `f` reads `z` from the result if
/// its elements are wide, else from the tile.
pub(super) struct MapEpilogue<'a, E: Stored> {
    pub(super) y: *mut E,
    /// The place of `z`, and `f`. Without them, `y` is `z`.
    pub(super) activation: Option<(*mut E, MapFn<E>)>,
    pub(super) strides: (usize, usize),
    /// The bias as a matrix: its strides are (0, 1), or (1, 0) if the product is transposed.
    pub(super) bias: Option<(&'a [E], (usize, usize))>,
}

// SAFETY: as for `LinearEpilogue`; the function is only called.
unsafe impl<E: Stored> Sync for MapEpilogue<'_, E> {}

// SAFETY: `z` and `y` are valid for the whole result, and the bias has an element for every column. If `E` is its own
// wide type, the pointers' types are the same.
unsafe impl<E: Stored> Epilogue<E::Wide> for MapEpilogue<'_, E> {
    fn direct(&self) -> Option<DirectStore<E::Wide>> {
        let added = self.bias.map(|(bias, steps)| (bias.as_ptr().cast::<E::Wide>(), steps));
        let direct = E::NATIVE && self.strides.1 == 1 && added.is_none_or(|(_, steps)| steps.1 == 1);
        direct.then(|| DirectStore {
            c: self.activation.map_or(self.y, |(z, _)| z).cast::<E::Wide>(),
            step: self.strides.0,
            alpha: E::Wide::ONE,
            added: added.map(|(x, (step, _))| Added { factor: E::Wide::ONE, x, step }),
        })
    }

    unsafe fn put(&self, at: (usize, usize), shape: (usize, usize), values: &mut [E::Wide], step: usize) {
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
        if E::NATIVE {
            return;
        }
        let (mut results, len) = ([E::Wide::ZERO; MAX_TILE_LEN], shape.0 * step);
        f([0.0; 2], &[&values[..len]], &mut results[..len]);
        dispatch(StoreTile { c: self.y, strides, at, shape, values: &results, step });
    }

    unsafe fn complete(&self, (row, col): (usize, usize), (rows, cols): (usize, usize)) {
        let Some((z, f)) = self.activation.filter(|_| E::NATIVE) else { return };
        let first = row * self.strides.0 + col * self.strides.1;
        // The elements of one dim are contiguous.
        let (lines, step, len) =
            if self.strides.1 == 1 { (rows, self.strides.0, cols) } else { (cols, self.strides.1, rows) };
        let (lines, len) = if step == len { (1, lines * len) } else { (lines, len) };
        for start in (0..lines).map(|i| first + i * step) {
            // SAFETY: a line of the part, whose `z` is stored; the caller promises that no other code uses it.
            let (z, y) = unsafe {
                let z = std::slice::from_raw_parts(z.add(start).cast::<E::Wide>(), len);
                (z, std::slice::from_raw_parts_mut(self.y.add(start).cast::<E::Wide>(), len))
            };
            f([0.0; 2], &[z], y);
        }
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
