//! One product on several threads.

use std::cell::Cell;
use std::sync::OnceLock;
use std::thread::{self, Builder};

use super::super::caches::{Caches, with_caches};
use super::super::real::{Real, Widen};
use super::super::simd::{Isa, with_isa};
use super::blocks::{GemmOperands, run};
use super::epilogue::{DirectStore, Epilogue};
use super::tile::Tiled;
use crate::error::{Error, Result};

/// A product's thread has at least this many multiplications.
const MIN_MULTIPLICATIONS: usize = if cfg!(miri) { 1 << 9 } else { 4 << 20 };

/// The most threads that [`threads_from_env`] believes.
const MOST_THREADS: usize = 1024;

thread_local! {
    /// The number that [`with_threads`] has set, if any.
    static THREADS: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Returns the number of threads per product outside of [`with_threads`]: the environment variable `ISOSHARD_THREADS`,
/// or 1 if it is not set.
///
/// ```
/// use isoshard::tensor::cpu;
/// assert!(cpu::threads_from_env()? >= 1);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Refuses a value that is not a number from 1 to 1024.
pub fn threads_from_env() -> Result<usize> {
    match std::env::var_os("ISOSHARD_THREADS") {
        None => Ok(1),
        Some(given) => parsed(&given.to_string_lossy()),
    }
}

fn parsed(given: &str) -> Result<usize> {
    let number = given.trim().parse().ok().filter(|n| (1..=MOST_THREADS).contains(n));
    number.ok_or_else(|| {
        let rule = format!("ISOSHARD_THREADS is a number from 1 to {MOST_THREADS}");
        Error::invalid("threads", rule, format!("{given:?}"), "unset it for one thread")
    })
}

/// Returns the number of threads that a product of this thread may use.
fn allowed() -> usize {
    static DEFAULT: OnceLock<usize> = OnceLock::new();
    // `Spmd` reports a value that is no number.
    THREADS.get().unwrap_or_else(|| *DEFAULT.get_or_init(|| threads_from_env().unwrap_or(1)))
}

/// Runs `f`, in which each large product of this thread uses up to `n` threads. Outside it uses as many as
/// [`threads_from_env`] says. Any number of threads gives the same bits.
///
/// ```
/// use isoshard::tensor::{DType, Tensor, cpu};
/// let (a, b) = (Tensor::full(DType::F32, [1, 64, 9], 0.1), Tensor::full(DType::F32, [1, 9, 64], 3.0));
/// let product = || cpu::gemm("matmul", &a, &b, &[9]);
/// assert_eq!(cpu::with_threads(4, product)?.as_bytes()?, product()?.as_bytes()?);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Panics
/// Panics if `n` is 0.
pub fn with_threads<R>(n: usize, f: impl FnOnce() -> R) -> R {
    struct RestoreThreads(Option<usize>);
    impl Drop for RestoreThreads {
        fn drop(&mut self) {
            THREADS.set(self.0);
        }
    }
    assert!(n > 0, "with_threads: needs one thread or more");
    let _restore = RestoreThreads(THREADS.replace(Some(n)));
    f()
}

/// Runs [`run`] on the allowed number of threads. Each computes some rows, or some columns if there are more columns
/// than rows.
///
/// # Safety
/// The conditions of [`run`] hold.
pub(super) unsafe fn run_on_threads<E: Widen<Wide = T>, T: Real + Tiled>(
    operands: &GemmOperands<'_, E>,
    epilogue: &dyn Epilogue<T>,
) {
    let ((m, k), n) = (operands.a.shape(), operands.b.shape().1);
    let threads = allowed().min(m.saturating_mul(n).saturating_mul(k) / MIN_MULTIPLICATIONS);
    if threads <= 1 {
        // SAFETY: the caller's promise.
        return unsafe { run(operands, epilogue) };
    }
    let (isa, caches) = (Isa::current(), Caches::current());
    let kernels = T::kernels(isa);
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
    let part = &part;
    thread::scope(|scope| {
        for start in (share..len).step_by(share) {
            let there = move || with_isa(isa, || with_caches(caches, || part(start)));
            // If the system has no thread left, this one computes the part.
            if Builder::new().spawn_scoped(scope, there).is_err() {
                part(start);
            }
        }
        part(0);
    });
}

/// An epilogue for the part of the result that begins at `at`.
struct OffsetEpilogue<'a, T> {
    epilogue: &'a dyn Epilogue<T>,
    at: (usize, usize),
}

// SAFETY: the part is inside the whole result.
unsafe impl<T> Epilogue<T> for OffsetEpilogue<'_, T> {
    fn direct(&self) -> Option<DirectStore<T>> {
        let direct = self.epilogue.direct()?;
        Some(DirectStore { c: direct.c.wrapping_add(self.at.0 * direct.step + self.at.1), ..direct })
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
    use crate::tensor::cpu::Num;

    #[test]
    fn any_number_of_threads_gives_the_same_bits() {
        let of = |i: usize| ((i * 7919 + 13) % 1009) as f32 * 0.01 - 5.0;
        let sizes: &[_] = match cfg!(miri) {
            true => &[(17, 33, 21), (5, 33, 40)],
            false => &[(211, 300, 197), (190, 300, 203), (3, 1030, 4100), (4200, 1000, 3), (411, 1500, 97)],
        };
        for &(m, k, n) in sizes {
            assert!(m * k * n >= 2 * MIN_MULTIPLICATIONS, "worth several threads");
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
        assert_eq!(THREADS.get(), None, "the choice ends with the call");
    }

    #[test]
    fn a_number_of_threads_is_bounded() {
        assert_eq!((parsed("1").unwrap(), parsed(" 16 ").unwrap()), (1, 16));
        for bad in ["", "0", "-1", "two", "1025", "99999999999999999999"] {
            let e = parsed(bad).unwrap_err().to_string();
            assert!(e.starts_with("threads: ISOSHARD_THREADS is a number from 1 to 1024; got "), "{e}");
        }
    }
}
