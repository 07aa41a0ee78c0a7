//! `embedding`: reads rows of a table by index.

use smallvec::smallvec;

use super::cuda::HeldRange;
use super::rows::read_rows;
use super::rows_cuda;
use super::segments::{checked_index, expect_indices};
use crate::error::{Error, Result};
use crate::ops::{
    Algebra, AxisPlacement, EmbeddingGrad, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Vjp,
    Windows, Work, arity,
};
use crate::tensor::Tensor;
use crate::tensor::cuda::fault::Fault;

static INDEX: Fault = Fault::index(400, "embedding");

/// Reads rows of a table: table is `[V, C]`, index i64 `[..]`, the result `table[index]` `[.., C]`. Applied by
/// [`DTensor::embedding`](crate::dtensor::DTensor::embedding).
///
/// A table that is sharded by rows gives a partial sum: each rank fills in the rows that it stores.
///
/// ```
/// use isoshard::{ops::{Embedding, eval_whole}, tensor::Tensor};
/// let table = Tensor::from_vec(vec![0.0, 1.0, 10.0, 11.0], [2, 2])?;
/// let index = Tensor::from_vec(vec![1i64, 0, 1], [3])?;
/// assert_eq!(eval_whole(&Embedding, &[table, index])?[0].to_f64_vec(), [10.0, 11.0, 0.0, 1.0, 10.0, 11.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Embedding;

impl Op for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [table, index] = arity(self.name(), ins)?;
        expect_indices(self.name(), index)?;
        if table.shape.len() != 2 {
            return Err(Error::invalid(self.name(), "the table has two dims", table.to_string(), ""));
        }
        let shape = index.shape.iter().copied().chain([table.shape[1]]).collect();
        Ok(smallvec![Meta { dtype: table.dtype, shape }])
    }

    /// If the table is sharded by rows, each rank fills in the rows that it stores, which gives a partial sum. Rows are
    /// only copied, so any partial table is accepted.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let last = ins[1].shape.len();
        let mut rows: Vec<Row> = (0..last)
            .map(|d| Row::new([AxisPlacement::R, AxisPlacement::S(d)], [AxisPlacement::S(d)]))
            .collect();
        rows.push(Row::new([AxisPlacement::S(1), AxisPlacement::R], [AxisPlacement::S(last)]));
        rows.push(Row::new([AxisPlacement::S(0), AxisPlacement::R], [AxisPlacement::SUM]).exact());
        rows.extend(
            Algebra::Structural
                .rows(1)
                .iter()
                .map(|r| Row::new([r.ins[0], AxisPlacement::R], [r.outs[0]]).exact()),
        );
        rows
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let (table, index, rows) = (ins[0].unsqueeze(0)?, ins[1].contiguous()?, held(at));
        let places: Vec<usize> = index
            .as_slice::<i64>()?
            .iter()
            // An index before this rank's first row wraps to a number far beyond its last row.
            .map(|&i| Ok(checked_index(self.name(), i, rows.n, 0)?.wrapping_sub(rows.start)))
            .collect::<Result<_>>()?;
        Ok(smallvec![read_rows(&table, &places, at.outs[0].local())?])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let table = ins[0].unsqueeze(0)?;
        Ok(smallvec![rows_cuda::read_rows(&table, &ins[1], held(at), (false, &INDEX), at.outs[0].local())?])
    }

    /// Reads only the rows that are copied.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::by_index(&ins[1], outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.none(1, "an index has no derivative");
        let rows = g.input_meta(0).shape[0];
        let (index, dy) = (g.input(1), g.grad(0));
        let table = g.apply(EmbeddingGrad { rows }, &[index, dy])?;
        g.set(0, table);
        Ok(())
    }
}

/// Returns the rows of the table that this rank stores.
fn held(at: &Windows) -> HeldRange {
    HeldRange { n: at.ins[0].global[0], start: at.ins[0].start(0) }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Embedding, [Input::ints([7, 3]), Input::index([5], 7)]),
        Sample::new(Embedding, [Input::ints([3, 5]), Input::index([2, 3], 3)]),
        Sample::new(Embedding, [Input::ints([5, 1]), Input::index([], 5)]),
        Sample::new(Embedding, [Input::ints([5, 2]), Input::index([3, 0], 5)]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::eval_whole;

    #[test]
    fn names_the_index_out_of_range() {
        let table = Tensor::from_vec(vec![1.0f32, 2.0, -0.0, 4.0], [2, 2]).unwrap();
        let index = |i| Tensor::from_vec(vec![1i64, i], [2]).unwrap();
        let y = eval_whole(&Embedding, &[table.clone(), index(0)]).unwrap();
        assert_eq!(y[0].to_vec::<f32>().unwrap(), [-0.0, 4.0, 1.0, 2.0]);
        let error = eval_whole(&Embedding, &[table.clone(), index(2)]).unwrap_err().to_string();
        assert_eq!(
            error,
            "embedding: an index leaves dim 0; got index 2 for 2 indices; indices run from 0 to below 2"
        );
        assert!(eval_whole(&Embedding, &[table, index(-1)]).is_err());
    }
}
