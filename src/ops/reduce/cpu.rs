//! The CPU kernels of `argmax` and `first_index`.

use isoshard_kernels::sums::FirstIndices;

use crate::error::{Error, Result};
use crate::tensor::{Dims, Shape, Tensor, for_dtype, short_list};

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
    Ok(for_dtype!(any rows.dtype(), T => {
        let rows = rows.as_slice::<T>()?;
        Tensor::build(shape, |out: &mut [i64]| T::first_largest(rows, n, out))
    }))
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
        Tensor::build(turned, |out: &mut [i64]| T::first_equal(rows, n, value, start, out))
    });
    out.transpose(dim, last)?.contiguous()?.reshape(shape)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;
    use crate::tensor::cpu::{Isa, with_isa};

    #[test]
    fn argmax_is_the_first_and_nan_wins() {
        let x = Tensor::from_vec(vec![1.0f32, 3.0, 3.0, 0.0, f32::NAN, f32::NAN], [2, 3]).unwrap();
        assert_eq!(argmax("argmax", &x, 1, false).unwrap().to_vec::<i64>().unwrap(), [1, 1]);
        assert_eq!(argmax("argmax", &x, 0, true).unwrap().to_vec::<i64>().unwrap(), [0, 1, 1]);
        assert!(argmax("argmax", &Tensor::zeros(DType::F32, [0]), 0, false).is_err());
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
