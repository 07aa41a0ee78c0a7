//! Where finished sums go.

use super::super::elementwise::UnaryF;
use super::super::real::{Lane, Num, Real};
use super::super::simd::{Kernel, dispatch};

/// Takes finished sums. Calls from several threads at once concern different elements.
///
/// # Safety
/// What [`Sink::direct`] gives may be written for every element of the result.
pub(super) unsafe trait Sink<T>: Sync {
    /// The result itself, if its columns lie side by side and tiles may be stored there as they come.
    fn direct(&self) -> Option<Direct<T>>;

    /// Takes the tile at `(row, col)` of `(rows, cols)`; its rows are `step` apart in `values`.
    ///
    /// # Safety
    /// The tile lies inside the result, and nobody else reads or writes these elements.
    unsafe fn put(&self, at: (usize, usize), shape: (usize, usize), values: &[T], step: usize);
}

/// How tiles are stored: `alpha * sum + beta * what was there`.
pub(super) struct Direct<T> {
    pub(super) c: *mut T,
    /// From row to row.
    pub(super) step: usize,
    pub(super) alpha: T,
    pub(super) beta: Option<T>,
}

/// `c = alpha * sum + beta * c`.
pub(super) struct Plain<T> {
    pub(super) c: *mut T,
    pub(super) strides: (usize, usize),
    pub(super) alpha: T,
    /// None where `c` is not to be read.
    pub(super) beta: Option<T>,
}

// SAFETY: the pointer is to a result that the call has borrowed exclusively; threads write different elements.
unsafe impl<T: Sync> Sync for Plain<T> {}

// SAFETY: `c` reaches over the whole result.
unsafe impl<T: Real> Sink<T> for Plain<T> {
    fn direct(&self) -> Option<Direct<T>> {
        let direct = Direct { c: self.c, step: self.strides.0, alpha: self.alpha, beta: self.beta };
        (self.strides.1 == 1).then_some(direct)
    }

    unsafe fn put(
        &self,
        (row, col): (usize, usize),
        (rows, cols): (usize, usize),
        values: &[T],
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
pub(super) struct Finish<'a, E, F> {
    pub(super) c: *mut E,
    pub(super) strides: (usize, usize),
    /// The bias seen as a matrix: one of its strides is 0.
    pub(super) bias: Option<(&'a [E], (usize, usize))>,
    /// None for the sum as it is.
    pub(super) f: Option<F>,
}

// SAFETY: as for `Plain`; the function is only called.
unsafe impl<E: Sync, F: Sync> Sync for Finish<'_, E, F> {}

// SAFETY: tiles are never stored as they come.
unsafe impl<E: Lane<Wide: Real>, F: UnaryF + Sync> Sink<E::Wide> for Finish<'_, E, F> {
    fn direct(&self) -> Option<Direct<E::Wide>> {
        None
    }

    unsafe fn put(&self, at: (usize, usize), shape: (usize, usize), values: &[E::Wide], step: usize) {
        dispatch(FinishTile { finish: self, at, shape, values, step });
    }
}

/// Elements finished at once.
const RUN: usize = 64;

struct FinishTile<'a, 'b, E: Lane, F> {
    finish: &'a Finish<'b, E, F>,
    at: (usize, usize),
    shape: (usize, usize),
    values: &'a [E::Wide],
    step: usize,
}

impl<E: Lane<Wide: Real>, F: UnaryF> Kernel for FinishTile<'_, '_, E, F> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let finish = self.finish;
        let (mut run, mut narrow) = ([E::Wide::ZERO; RUN], [E::default(); RUN]);
        for i in 0..self.shape.0 {
            let row = &self.values[i * self.step..][..self.shape.1];
            for (r, values) in row.chunks(RUN).enumerate() {
                let (row, col) = (self.at.0 + i, self.at.1 + r * RUN);
                let (run, narrow) = (&mut run[..values.len()], &mut narrow[..values.len()]);
                run.copy_from_slice(values);
                if let Some((bias, (rs, cs))) = finish.bias {
                    round(run, narrow);
                    let bias = &bias[row * rs..];
                    narrow.iter_mut().enumerate().for_each(|(j, x)| *x = bias[(col + j) * cs]);
                    let mut wide = [E::Wide::ZERO; RUN];
                    let wide = &mut wide[..values.len()];
                    E::widen_into(narrow, wide);
                    run.iter_mut().zip(wide).for_each(|(x, b)| *x = *x + *b);
                }
                if let Some(f) = finish.f {
                    round(run, narrow);
                    run.iter_mut().for_each(|x| *x = f.apply(*x));
                }
                narrow_into(run, narrow);
                for (j, &x) in narrow.iter().enumerate() {
                    // SAFETY: the promise of the caller of `put`.
                    unsafe { *finish.c.add(row * finish.strides.0 + (col + j) * finish.strides.1) = x };
                }
            }
        }
    }
}

/// To `E` and back.
#[inline(always)]
fn round<E: Lane<Wide: Real>>(run: &mut [E::Wide], narrow: &mut [E]) {
    if !E::NATIVE {
        narrow_into(run, narrow);
        E::widen_into(narrow, run);
    }
}

#[inline(always)]
fn narrow_into<E: Lane<Wide: Real>>(run: &[E::Wide], narrow: &mut [E]) {
    let mut buf = [E::Wide::ZERO; RUN];
    E::store(narrow, &mut buf, |dst| dst.copy_from_slice(run));
}
