//! `last_write`: the elements of a source that `scatter` leaves in the result. A step of its derivative.

use smallvec::smallvec;

use super::lines::rows_along;
use super::scatter_cuda;
use super::segments::{checked_index, expect_indices};
use crate::error::{Error, Result};
use crate::ops::index::lines::rows_back;
use crate::ops::{
    AxisPlacement, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Vjp, Windows, Work, arity,
};
use crate::tensor::{DType, KernelList, Tensor};

/// True at the positions along a dim, which is not sharded, whose index no later position has: `y[.., k, ..]` is true
/// if no `l > k` has `index[.., l, ..] = index[.., k, ..]`. The derivative of [`Scatter`](crate::ops::Scatter) uses it.
///
/// ```
/// use isoshard::{ops::{LastWrite, eval_whole}, tensor::Tensor};
/// let index = Tensor::from_vec(vec![2i64, 0, 2], [3])?;
/// let last = eval_whole(&LastWrite { dim: 0, extent: 3 }, &[index])?;
/// assert_eq!(last[0].to_vec::<bool>()?, [false, true, true]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LastWrite {
    /// The dim.
    pub dim: usize,
    /// The number of indices, from 0 on, that the index may have.
    pub extent: usize,
}

impl Op for LastWrite {
    fn name(&self) -> &'static str {
        "last_write"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [index] = arity(self.name(), ins)?;
        expect_indices(self.name(), index)?;
        if self.dim >= index.shape.len() {
            let given = format!("dim {} of {index}", self.dim);
            return Err(Error::invalid(self.name(), "no such dim", given, ""));
        }
        Ok(smallvec![Meta { dtype: DType::Bool, shape: index.shape.clone() }])
    }

    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let others = (0..ins[0].shape.len()).filter(|&d| d != self.dim);
        others.map(|d| Row::same(AxisPlacement::S(d), 1)).collect()
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let (len, index) = (ins[0].shape()[self.dim], rows_along(&ins[0], self.dim)?);
        let entries = index.as_slice::<i64>()?;
        for &i in entries {
            checked_index(self.name(), i, self.extent, self.dim)?;
        }
        // A row reads only the entries that it has written, so the list needs no reset between rows.
        let mut last = KernelList::<usize>::zeros(self.name(), self.extent)?;
        let out = Tensor::build(index.shape(), |out: &mut [bool]| {
            for (row, out) in entries.chunks_exact(len.max(1)).zip(out.chunks_exact_mut(len.max(1))) {
                row.iter().enumerate().for_each(|(k, &i)| last[i as usize] = k);
                out.iter_mut().zip(row).enumerate().for_each(|(k, (out, &i))| *out = last[i as usize] == k);
            }
        });
        Ok(smallvec![rows_back(&out, self.dim)?])
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        Ok(smallvec![scatter_cuda::last_write(&ins[0], self.dim, self.extent)?])
    }

    /// A comparison per index.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::elementwise(1, ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.none(0, "an index has no derivative");
        Ok(())
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let last = |dim, extent| LastWrite { dim, extent };
    vec![
        Sample::new(last(1, 3), [Input::index([5, 7], 3)]).not_smooth(),
        Sample::new(last(0, 2), [Input::index([5, 2, 3], 2)]).not_smooth(),
        Sample::new(last(0, 2), [Input::index([0, 3], 2)]).not_smooth(),
    ]
}
