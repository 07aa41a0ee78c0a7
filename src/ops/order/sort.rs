//! `sort`: the elements along a dim in order, and their former indices.

use isoshard_kernels::order::{Order, RowOrder};
use smallvec::smallvec;

use super::{cuda, expect_dim, rows_but};
use crate::error::Result;
use crate::ops::index::lines::{rows_along, rows_back};
use crate::ops::record::work::elements;
use crate::ops::{
    Input, MeshAxis, Meta, Metas, Op, Row, Sample, ScatterAdd, Tensors, Vjp, Windows, Work, arity,
};
use crate::tensor::{DType, Tensor, cpu, for_dtype};

/// Orders the elements along a dim, which is not sharded: returns the elements and their former indices (i64). Applied
/// by [`DTensor::sort`](crate::dtensor::DTensor::sort).
///
/// The sort is stable. Zeros of both signs are equal, and NaN comes after every number; if `descending`, before it.
///
/// ```
/// use isoshard::{ops::{Sort, eval_whole}, tensor::Tensor};
/// let x = Tensor::from_vec(vec![3.0, f64::NAN, 1.0, 3.0], [4])?;
/// let down = eval_whole(&Sort { dim: 0, descending: true }, &[x.clone()])?;
/// assert_eq!(down[1].to_vec::<i64>()?, [1, 0, 3, 2]);
/// let up = eval_whole(&Sort { dim: 0, descending: false }, &[x])?;
/// assert_eq!(up[0].to_f64_vec()[..3], [1.0, 3.0, 3.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Sort {
    /// The dim.
    pub dim: usize,
    /// True if the largest element comes first.
    pub descending: bool,
}

impl Op for Sort {
    fn name(&self) -> &'static str {
        "sort"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x] = arity(self.name(), ins)?;
        expect_dim(self.name(), x, self.dim)?;
        Ok(smallvec![x.clone(), Meta { dtype: DType::I64, shape: x.shape.clone() }])
    }

    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        rows_but(&ins[0], self.dim)
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let n = ins[0].shape()[self.dim];
        first_of_rows(&ins[0], self.dim, self.descending, n)
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let n = ins[0].shape()[self.dim];
        cuda::first_of_rows(self.name(), &ins[0], self.dim, self.descending, n)
    }

    /// `n log2 n` comparisons per row.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        let n = ins[0].shape[self.dim];
        let halvings = u64::from(usize::BITS - n.saturating_sub(1).leading_zeros());
        Work::new(elements(&ins[0]).saturating_mul(halvings), ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        write_order_vjp(g, self.dim)
    }
}

/// Returns the first `k` elements along `dim` in order, and their indices.
pub(super) fn first_of_rows(x: &Tensor, dim: usize, descending: bool, k: usize) -> Result<Tensors> {
    let (n, rows) = (x.shape()[dim], rows_along(x, dim)?);
    let mut shape = rows.shape().clone();
    *shape.last_mut().expect("the dim is there") = k;
    let (mut values, mut indices) = (Tensor::uninit(x.dtype(), &shape), Tensor::uninit(DType::I64, &shape));
    if values.numel() > 0 {
        for_dtype!(any x.dtype(), T => {
            let mut order = RowOrder::<T>::new(descending);
            let values = cpu::as_elements_mut::<T>(values.bytes_mut()).chunks_exact_mut(k);
            let indices = cpu::as_elements_mut::<i64>(indices.bytes_mut()).chunks_exact_mut(k);
            for (row, (values, indices)) in rows.as_slice::<T>()?.chunks_exact(n).zip(values.zip(indices)) {
                T::write_in_order(&mut order, row, 0..n, 0, values, indices);
            }
        });
    }
    Ok(smallvec![rows_back(&values, dim)?, rows_back(&indices, dim)?])
}

/// Writes the derivative of an operator that takes elements along `dim` and returns them with their indices.
pub(super) fn write_order_vjp(g: &mut Vjp, dim: usize) -> Result<()> {
    g.constant(1, "an index has no derivative");
    if !g.input_meta(0).dtype.is_float() {
        g.none(0, "integers have no derivative");
        return Ok(());
    }
    let extent = g.input_meta(0).shape[dim];
    let (index, dy) = (g.output(1), g.grad(0));
    let dx = g.apply(ScatterAdd { dim, extent }, &[index, dy])?;
    g.set(0, dx);
    Ok(())
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let sort = |dim, descending| Sort { dim, descending };
    vec![
        Sample::new(sort(1, false), [Input::ints([5, 7])]).not_smooth(),
        Sample::new(sort(0, true), [Input::ints([7, 3])]).not_smooth(),
        Sample::new(sort(1, true), [Input::index([2, 5, 3], 4)]).not_smooth(),
        Sample::new(sort(0, false), [Input::ints([0, 3])]).not_smooth(),
    ]
}
