//! Kernels that compute one row of the result from one row of each operand, such as softmax. f16 and bf16 compute in
//! f32 and round once.

use super::as_elements_mut;
use super::cast::cast;
use super::pointwise::expect_matching;
use crate::error::{Error, Result};
use crate::tensor::{DType, Element, Tensor};

/// Runs a loop, one for each of f32 and f64, on all rows (along the last dim) of tensors with one shape and dtype. It
/// is given the operands' elements, the number of elements in a row and the result's.
///
/// # Errors
/// Returns an error that names `verb` if the elements are not floats, if the operands' shapes or dtypes differ, or if
/// they have no dims.
pub(crate) fn over_rows_with<const N: usize>(
    verb: &str,
    x: [&Tensor; N],
    narrow: &RowsLoop<'_, f32, N>,
    wide: &RowsLoop<'_, f64, N>,
) -> Result<Tensor> {
    expect_matching(verb, x[0], &x[1..])?;
    x[0].dtype().expect_float(verb)?;
    if x[0].shape().is_empty() {
        return Err(Error::invalid(verb, "wants a last dim", x[0].notation(), "reshape it to [1]"));
    }
    match x[0].dtype() {
        DType::F32 => rows_as(x, narrow),
        DType::F64 => rows_as(x, wide),
        half => {
            let widened: Vec<Tensor> = x.iter().map(|x| cast(x, DType::F32)).collect::<Result<_>>()?;
            cast(&rows_as(std::array::from_fn(|k| &widened[k]), narrow)?, half)
        }
    }
}

/// A loop over rows.
pub(crate) type RowsLoop<'a, T, const N: usize> = dyn Fn([&[T]; N], usize, &mut [T]) + 'a;

fn rows_as<T: Element, const N: usize>(x: [&Tensor; N], run: &RowsLoop<'_, T, N>) -> Result<Tensor> {
    let mut out = Tensor::uninit(T::DTYPE, x[0].shape());
    if out.numel() == 0 {
        return Ok(out);
    }
    let len = x[0].shape()[x[0].shape().len() - 1];
    let x = x.map(Tensor::packed);
    let mut inputs = [&[] as &[T]; N];
    for (input, x) in inputs.iter_mut().zip(&x) {
        *input = x.as_slice()?;
    }
    run(inputs, len, as_elements_mut(out.bytes_mut()));
    Ok(out)
}
