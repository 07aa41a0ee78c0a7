//! A loop over the rows of tensors: one row in, one row out, with a [summation tree](super::tree) of the row's length. f16 and
//! bf16 compute in f32 and round once.

use super::cast::cast;
use super::pointwise::expect_alike;
use super::simd::{Kernel, dispatch};
use super::tree::RowTree;
use super::{Real, as_elements_mut};
use crate::error::{Error, Result};
use crate::tensor::{DType, Tensor};

/// One row of the output from one row of each of `N` inputs. Implement `row` `#[inline(always)]`.
pub trait RowBody<const N: usize>: Copy {
    /// Writes `out`; `scratch` has the row's length.
    fn row<T: Real>(self, x: [&[T]; N], out: &mut [T], tree: &mut RowTree<T>, scratch: &mut [T]);
}

/// Runs `body` on every row (along the last dim) of tensors of equal shape and dtype.
///
/// # Errors
/// Refuses integers, operands that differ, and tensors without dims.
pub fn over_rows<const N: usize, B: RowBody<N>>(verb: &str, x: [&Tensor; N], body: B) -> Result<Tensor> {
    expect_alike(verb, x[0], &x[1..])?;
    x[0].dtype().expect_float(verb)?;
    if x[0].shape().is_empty() {
        return Err(Error::invalid(verb, "wants a last dim", x[0].notation(), "reshape it to [1]"));
    }
    match x[0].dtype() {
        DType::F32 => rows_as::<f32, N, B>(x, body),
        DType::F64 => rows_as::<f64, N, B>(x, body),
        half => {
            let wide: Vec<Tensor> = x.iter().map(|x| cast(x, DType::F32)).collect::<Result<_>>()?;
            cast(&rows_as::<f32, N, B>(std::array::from_fn(|k| &wide[k]), body)?, half)
        }
    }
}

fn rows_as<T: Real, const N: usize, B: RowBody<N>>(x: [&Tensor; N], body: B) -> Result<Tensor> {
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
    dispatch(Rows { inputs, out: as_elements_mut(out.bytes_mut()), len, body });
    Ok(out)
}

struct Rows<'a, T, const N: usize, B> {
    inputs: [&'a [T]; N],
    out: &'a mut [T],
    len: usize,
    body: B,
}

impl<T: Real, const N: usize, B: RowBody<N>> Kernel for Rows<'_, T, N, B> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let len = self.len;
        let mut tree = RowTree::new(len);
        let mut scratch = vec![T::ZERO; len];
        for (i, out) in self.out.chunks_exact_mut(len).enumerate() {
            let mut x = self.inputs;
            for x in &mut x {
                *x = &x[i * len..][..len];
            }
            self.body.row(x, out, &mut tree, &mut scratch);
        }
    }
}
