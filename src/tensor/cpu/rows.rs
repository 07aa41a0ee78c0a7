//! Kernels that compute one row of the result from one row of each operand, such as softmax. f16 and bf16 compute in
//! f32 and round once.

use isoshard_kernels::rows::each_row;

use super::cast::cast;
use super::pointwise::expect_matching;
use super::{RowBody, as_elements_mut};
use crate::error::{Error, Result};
use crate::tensor::{DType, Element, Tensor};

/// Runs `body` on every row (along the last dim) of tensors with one shape and dtype.
///
/// ```
/// use isoshard::tensor::Tensor;
/// use isoshard::tensor::cpu::{Real, RowBody, RowTree, SumReducer, over_rows};
///
/// /// Divides a row by its sum.
/// #[derive(Clone, Copy)]
/// struct Normalise;
/// impl RowBody<1> for Normalise {
///     #[inline(always)]
///     fn row<T: Real>(self, [x]: [&[T]; 1], out: &mut [T], tree: &mut RowTree<T>, _: &mut [T]) {
///         let sum = tree.fold::<SumReducer>(x);
///         out.iter_mut().zip(x).for_each(|(y, &x)| *y = x / sum);
///     }
/// }
/// let x = Tensor::from_vec(vec![1.0f32, 3.0, 2.0, 2.0], [2, 2])?;
/// assert_eq!(over_rows("normalise", [&x], Normalise)?.to_vec::<f32>()?, [0.25, 0.75, 0.5, 0.5]);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Returns an error that names `verb` if the elements are not floats, if the operands' shapes or dtypes differ, or if
/// they have no dims.
pub fn over_rows<const N: usize, B: RowBody<N>>(verb: &str, x: [&Tensor; N], body: B) -> Result<Tensor> {
    over_rows_with(
        verb,
        x,
        &|x, len, out: &mut [f32]| each_row(x, len, out, body),
        &|x, len, out: &mut [f64]| each_row(x, len, out, body),
    )
}

/// [`over_rows`] with a loop for each of f32 and f64, which is given the operands' elements, the number of elements in a row
/// and the result's.
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
