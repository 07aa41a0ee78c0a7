//! The CPU kernels of `argmax` and `first_index`.

use crate::error::{Error, Result};
use crate::tensor::cpu::{Isa, Kernel, MaxReducer, Num, dispatch, fast_extreme, first_with, is_nan};
use crate::tensor::{DType, Dims, Shape, Tensor, for_dtype, short_list};

/// Returns the index along `dim` of the first largest element, as i64. NaN counts as largest; zeros of both signs are
/// equal. With `keep_dim` the dim stays with extent 1.
///
/// ```
/// use isoshard::{ops::cpu::argmax, tensor::Tensor};
/// let x = Tensor::from_vec(vec![1.0, 5.0, 7.0, 2.0], [2, 2])?;
/// assert_eq!(argmax("argmax", &x, 1, false)?.to_vec::<i64>()?, [1, 0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Refuses a dim that `x` does not have, and an empty one.
pub fn argmax(verb: &str, x: &Tensor, dim: usize, keep_dim: bool) -> Result<Tensor> {
    if x.shape().get(dim).is_none_or(|&n| n == 0) {
        return Err(Error::invalid(
            verb,
            "wants a dim with elements",
            format!("dim {dim} of {}", x.notation()),
            "",
        ));
    }
    let n = x.shape()[dim];
    let mut order: Dims = short_list((0..x.shape().len()).filter(|&d| d != dim));
    let mut shape: Shape = order.iter().map(|&d| x.shape()[d]).collect();
    order.push(dim);
    let rows = x.permute(&order)?.contiguous()?;
    if keep_dim {
        shape = x.shape().iter().enumerate().map(|(d, &n)| if d == dim { 1 } else { n }).collect();
    }
    macro_rules! by_blocks {
        ($T:ty) => {{
            let rows = rows.as_slice::<$T>()?;
            Ok(Tensor::build(shape, |out: &mut [i64]| dispatch(FirstLargest { rows, n, out })))
        }};
    }
    match rows.dtype() {
        DType::F32 => by_blocks!(f32),
        DType::F64 => by_blocks!(f64),
        DType::I64 => by_blocks!(i64),
        DType::I32 => by_blocks!(i32),
        other => for_dtype!(any other, T => {
            let rows = rows.as_slice::<T>()?;
            Ok(Tensor::build(shape, |out: &mut [i64]| {
                for (row, out) in rows.chunks_exact(n).zip(out) {
                    *out = first_largest(row) as i64;
                }
            }))
        }),
    }
}

/// The number of elements whose largest is computed before it is looked for.
const BLOCK: usize = 2048;

/// The loop over rows of `n` elements, for types whose comparison is an instruction.
struct FirstLargest<'a, T> {
    rows: &'a [T],
    n: usize,
    out: &'a mut [i64],
}

impl<T: Num> Kernel for FirstLargest<'_, T> {
    type Out = ();
    const WIDEST: Isa = Isa::Avx2;
    #[inline(always)]
    fn run(self) {
        for (row, out) in self.rows.chunks_exact(self.n).zip(self.out) {
            *out = first_largest_by_blocks(row) as i64;
        }
    }
}

/// Returns what [`first_largest`] does. It finds the block first, so that the loops vectorise.
#[inline(always)]
fn first_largest_by_blocks<T: Num>(row: &[T]) -> usize {
    let (isa, mut best, mut start) = (Isa::current(), T::LOWEST, 0);
    for (i, block) in row.chunks(BLOCK).enumerate() {
        let Some(largest) = fast_extreme::<T, MaxReducer>(isa, block) else {
            return i * BLOCK + first_with(block, is_nan).expect("a NaN in the block");
        };
        if largest > best {
            (best, start) = (largest, i * BLOCK);
        }
    }
    let block = &row[start..][..BLOCK.min(row.len() - start)];
    start + first_with(block, |x| x == best).expect("the largest in its block")
}

/// Returns the index of the first largest element, or of the first NaN.
fn first_largest<T: PartialOrd + Copy>(row: &[T]) -> usize {
    let mut best = 0;
    for (i, &x) in row.iter().enumerate() {
        if is_nan(row[best]) {
            return best;
        }
        if x > row[best] || is_nan(x) {
            best = i;
        }
    }
    best
}

/// Returns, for each line along `dim`, the first index at which `x` equals `value`, plus `start`, or `i64::MAX`. The dim
/// stays with extent 1.
///
/// # Errors
/// Returns an error if the dtypes differ.
pub(super) fn first_index(x: &Tensor, value: &Tensor, dim: usize, start: usize) -> Result<Tensor> {
    let last = x.shape().len() - 1;
    let (n, shape) = (x.shape()[dim], value.shape().clone());
    // Lines along the last dim; the extent 1 of `value` moves with the dim.
    let (rows, value) = (x.transpose(dim, last)?.contiguous()?, value.transpose(dim, last)?.contiguous()?);
    let turned = value.shape().clone();
    let out = for_dtype!(any x.dtype(), T => {
        let (rows, value) = (rows.as_slice::<T>()?, value.as_slice::<T>()?);
        Tensor::build(turned, |out: &mut [i64]| dispatch(FirstEqual { rows, n, value, start, out }))
    });
    out.transpose(dim, last)?.contiguous()?.reshape(shape)
}

/// The loop over rows of `n` elements that looks for a value in each.
struct FirstEqual<'a, T> {
    rows: &'a [T],
    n: usize,
    value: &'a [T],
    start: usize,
    out: &'a mut [i64],
}

impl<T: PartialEq + Copy> Kernel for FirstEqual<'_, T> {
    type Out = ();
    const WIDEST: Isa = Isa::Avx2;
    #[inline(always)]
    fn run(self) {
        for (r, (out, &v)) in self.out.iter_mut().zip(self.value).enumerate() {
            let row = &self.rows[r * self.n..][..self.n];
            let found = if is_nan(v) { first_with(row, is_nan) } else { first_with(row, |x| x == v) };
            *out = found.map_or(i64::MAX, |i| (self.start + i) as i64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::cpu::with_isa;

    #[test]
    fn argmax_is_the_first_and_nan_wins() {
        let x = Tensor::from_vec(vec![1.0f32, 3.0, 3.0, 0.0, f32::NAN, f32::NAN], [2, 3]).unwrap();
        assert_eq!(argmax("argmax", &x, 1, false).unwrap().to_vec::<i64>().unwrap(), [1, 1]);
        assert_eq!(argmax("argmax", &x, 0, true).unwrap().to_vec::<i64>().unwrap(), [0, 1, 1]);
        assert!(argmax("argmax", &Tensor::zeros(DType::F32, [0]), 0, false).is_err());
    }

    #[test]
    fn blocks_find_the_same_index() {
        fn check<T: Num>(of: impl Fn(usize) -> T) {
            for n in (1..130).chain([BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5]) {
                let rows: Vec<T> = (0..3 * n).map(&of).collect();
                let want: Vec<i64> = rows.chunks(n).map(|row| first_largest(row) as i64).collect();
                for &isa in Isa::available() {
                    let mut out = [0; 3];
                    with_isa(isa, || dispatch(FirstLargest { rows: &rows, n, out: &mut out }));
                    assert_eq!(out[..], want, "{n} {isa:?}");
                }
            }
        }
        check(|i| (i * 7919 % 1009) as f32);
        check(|i| -((i * 7919 % 11) as f64));
        check(|i| if i % 5000 == 4999 { f32::NAN } else { i as f32 });
        check(|i| if i % 3 == 0 { -0.0f32 } else { 0.0 });
        check(|_| f32::NEG_INFINITY);
        check(|_| i64::MIN);
        check(|i| -(i as i32) / 40);
    }

    #[test]
    fn the_first_equal_element_is_found_after_any_number_of_others() {
        let x = Tensor::build([3, 100], |out: &mut [f32]| {
            out.iter_mut().enumerate().for_each(|(i, x)| *x = (i % 100 / 50) as f32);
            out[250] = f32::NAN;
        });
        for (value, want) in [(1.0, [55, 55, 56]), (f32::NAN, [i64::MAX, i64::MAX, 55]), (-0.0, [5, 5, 5])] {
            let value = Tensor::from_vec(vec![value; 3], [3, 1]).unwrap();
            for &isa in Isa::available() {
                let found = with_isa(isa, || first_index(&x, &value, 1, 5).unwrap());
                assert_eq!(found.to_vec::<i64>().unwrap(), want, "{isa:?}");
            }
        }
    }
}
