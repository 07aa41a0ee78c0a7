//! Kernels that compute one row of the result from one row of each operand, such as softmax. f16 and bf16 compute in
//! f32 and round once.

use super::cast::cast;
use super::pointwise::expect_matching;
use super::{Isa, Kernel, Real, RowTree, RowsMut, as_elements_mut, dispatch, for_each_part, widest_of};
use crate::error::{Error, Result};
use crate::tensor::{DType, Tensor};

/// A function that computes one row of the result from one row of each of `N` operands. Implement `row`
/// `#[inline(always)]`.
pub trait RowBody<const N: usize>: Copy + Sync {
    /// Writes `out`. `tree` is the [summation tree](RowTree) of the row's length, and `scratch` has that length.
    fn row<T: Real>(self, x: [&[T]; N], out: &mut [T], tree: &mut RowTree<T>, scratch: &mut [T]);
}

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
    expect_matching(verb, x[0], &x[1..])?;
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
    let rows = out.numel() / len;
    let nanos = NANOS_PER_ELEMENT * out.numel();
    let data = RowsMut { data: as_elements_mut(out.bytes_mut()), len };
    for_each_part(rows, nanos, data, |at, out| {
        let inputs = inputs.map(|x: &[T]| &x[at.start * len..at.end * len]);
        dispatch(RowKernel { inputs, out: out.data, len, body });
    });
    Ok(out)
}

/// About the time that a function takes.
const NANOS_PER_ELEMENT: usize = 1;

struct RowKernel<'a, T, const N: usize, B> {
    inputs: [&'a [T]; N],
    out: &'a mut [T],
    len: usize,
    body: B,
}

impl<T: Real, const N: usize, B: RowBody<N>> Kernel for RowKernel<'_, T, N, B> {
    type Out = ();
    const WIDEST: Isa = widest_of::<T>();
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
