//! `linear_index`: joins one index per dim to an index of the flattened dims.

use smallvec::smallvec;

use super::scatter_cuda;
use super::segments::{checked_index, expect_indices};
use crate::error::{Error, Result};
use crate::ops::{
    AxisPlacement, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Vjp, Windows, Work, list,
};
use crate::tensor::{DType, Dims, Tensor};

/// Joins one index (i64) per dim, all of one shape, to the row-major index of the flattened dims. Each index is checked
/// against its own dim. [`DTensor::index_put`](crate::dtensor::DTensor::index_put) applies it.
///
/// ```
/// use isoshard::{ops::{LinearIndex, eval_whole}, tensor::Tensor};
/// let (row, column) = (Tensor::from_vec(vec![1i64, 0], [2])?, Tensor::from_vec(vec![2i64, 1], [2])?);
/// let op = LinearIndex { extents: [2, 3].into_iter().collect() };
/// assert_eq!(eval_whole(&op, &[row.clone(), column])?[0].to_vec::<i64>()?, [5, 1]);
/// let outside = Tensor::from_vec(vec![0i64, 3], [2])?;
/// assert!(eval_whole(&op, &[row, outside]).is_err());
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LinearIndex {
    /// The dims' extents.
    pub extents: Dims,
}

impl LinearIndex {
    /// The largest number of dims.
    pub(crate) const DIMS: usize = scatter_cuda::JOINED;
}

impl Op for LinearIndex {
    fn name(&self) -> &'static str {
        "linear_index"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let known = (1..=LinearIndex::DIMS).contains(&ins.len());
        if !known || ins.len() != self.extents.len() || ins.iter().any(|m| m.shape != ins[0].shape) {
            let given = format!("{} for extents {:?}", list(ins), self.extents.as_slice());
            let rule = "wants one index per dim, 1 to 8 of one shape";
            return Err(Error::invalid(self.name(), rule, given, "expand them"));
        }
        ins.iter().try_for_each(|m| expect_indices(self.name(), m))?;
        Ok(smallvec![ins[0].clone()])
    }

    /// Each element depends on the operands' elements at its index alone.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let dims = (0..ins[0].shape.len()).map(AxisPlacement::S);
        dims.chain([AxisPlacement::Ragged]).map(|p| Row::same(p, ins.len())).collect()
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let mut out = Tensor::zeros(DType::I64, ins[0].shape());
        let joined = out.make_mut::<i64>()?;
        for (d, (index, &n)) in ins.iter().zip(&self.extents).enumerate() {
            for (out, &i) in joined.iter_mut().zip(index.contiguous()?.as_slice::<i64>()?) {
                *out = *out * n as i64 + checked_index(self.name(), i, n, d)? as i64;
            }
        }
        Ok(smallvec![out])
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        Ok(smallvec![scatter_cuda::linear_index(ins, &self.extents)?])
    }

    /// A product, a sum and a comparison per index.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::elementwise(3 * ins.len() as u64, ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.no_gradients("an index has no derivative");
        Ok(())
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let of = |extents: &[usize]| LinearIndex { extents: extents.iter().copied().collect() };
    vec![
        Sample::new(of(&[3, 5]), [Input::index([5, 3], 3), Input::index([5, 3], 5)]).not_smooth(),
        Sample::new(of(&[7]), [Input::index([7], 7)]).not_smooth(),
        Sample::new(of(&[2, 3]), [Input::index([0], 2), Input::index([0], 3)]).not_smooth(),
    ]
}
