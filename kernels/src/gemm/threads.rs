//! One product on several threads: equal shares of its rows, or of its columns.
//!
//! Threads that pack the operand that both read together, and take eighths of the rows or columns as they come, are no faster
//! (`benches/results/2026-11-28-zen3.md`). Likely causes: the system interrupts a thread for longer than a product takes, and half of
//! the packing is less than a second meeting of the threads.

use super::block_loops::blocks::{self, GemmOperands};
use super::epilogue::{DirectStore, Epilogue};
use super::thin;
use super::tiles::stored::Stored;
use super::tiles::tile::Tiled;
use crate::isa::simd::Isa;
use crate::num::real::Real;
use crate::threads::team::{allowed, run_parts, worth};

/// About the speed of a thread.
const MULTIPLICATIONS_PER_NANO: usize = 40;
/// About the speed at which a thread reads the columns, if there are few rows.
const BYTES_PER_NANO: usize = 32;

/// Computes the product on the allowed number of threads. Each computes some rows, or some columns if there are more columns
/// than rows.
///
/// # Safety
/// The conditions of [`blocks::run`] hold.
pub(super) unsafe fn run_on_threads<E: Stored<Wide = T>, T: Real + Tiled>(
    operands: &GemmOperands<'_, E>,
    epilogue: &dyn Epilogue<T>,
) {
    let ((m, k), n) = (operands.a.shape(), operands.b.shape().1);
    let (products, bytes) =
        (m.saturating_mul(n).saturating_mul(k), n.saturating_mul(k).saturating_mul(size_of::<E>()));
    let threads = allowed().min(worth((products / MULTIPLICATIONS_PER_NANO).max(bytes / BYTES_PER_NANO)));
    if threads <= 1 {
        // SAFETY: the caller's promise.
        return unsafe { run(operands, epilogue) };
    }
    let kernels = T::kernels(Isa::current());
    let (len, unit) =
        if m >= n { (m, kernels.tiles.len()) } else { (n, kernels.tiles[0].len() * kernels.lanes) };
    let share = len.div_ceil(threads).next_multiple_of(unit);
    let part = |start: usize| {
        let len = share.min(len - start);
        let (a, b, at) = if m >= n {
            (operands.a.rows(start, len), operands.b, (start, 0))
        } else {
            (operands.a, operands.b.cols(start, len), (0, start))
        };
        // SAFETY: the threads' parts of the result do not overlap.
        unsafe { run(&GemmOperands { a, b, tree: operands.tree }, &OffsetEpilogue { epilogue, at }) };
    };
    run_parts(threads, len.div_ceil(share), &|i| part(i * share));
}

/// Computes the product on this thread.
///
/// # Safety
/// The conditions of [`blocks::run`] hold.
unsafe fn run<E: Stored<Wide = T>, T: Real + Tiled>(
    operands: &GemmOperands<'_, E>,
    epilogue: &dyn Epilogue<T>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if thin::fits(operands.a, operands.b) {
            thin::run(operands, epilogue)
        } else {
            blocks::run(operands, epilogue)
        }
    }
}

/// An epilogue for the part of the result that begins at `at`.
struct OffsetEpilogue<'a, T> {
    epilogue: &'a dyn Epilogue<T>,
    at: (usize, usize),
}

// SAFETY: the part is inside the whole result.
unsafe impl<T> Epilogue<T> for OffsetEpilogue<'_, T> {
    fn direct(&self) -> Option<DirectStore<T>> {
        Some(self.epilogue.direct()?.at(self.at.0, self.at.1))
    }

    unsafe fn put(&self, (row, col): (usize, usize), shape: (usize, usize), values: &mut [T], step: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.epilogue.put((self.at.0 + row, self.at.1 + col), shape, values, step) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Gemm, MatMut, MatRef};
    use super::*;
    use crate::{Num, with_threads};

    #[test]
    fn any_number_of_threads_gives_the_same_bits() {
        let of = |i: usize| ((i * 7919 + 13) % 1009) as f32 * 0.01 - 5.0;
        let sizes: &[_] = match cfg!(miri) {
            true => &[(17, 33, 21), (5, 33, 40)],
            false => &[(211, 300, 197), (190, 300, 203), (3, 1030, 4100), (4200, 1000, 3), (411, 1500, 97)],
        };
        for &(m, k, n) in sizes {
            assert!(worth(m * k * n / MULTIPLICATIONS_PER_NANO) >= 2, "worth several threads");
            let (a, b): (Vec<f32>, Vec<f32>) = ((0..m * k).map(of).collect(), (0..k * n).map(of).collect());
            let product = |threads: usize| {
                let mut c = vec![f32::ZERO; m * n];
                with_threads(threads, || {
                    let a = MatRef::new(&a, (m, k), (k, 1)).unwrap();
                    let b = MatRef::new(&b, (k, n), (n, 1)).unwrap();
                    let c = MatMut::new(&mut c, (m, n), (n, 1)).unwrap();
                    f32::product(1.0, a, b, 0.0, c);
                });
                c
            };
            let want = product(1);
            assert!([2, 3, 7].into_iter().all(|threads| product(threads) == want), "{m} {k} {n}");
        }
    }
}
