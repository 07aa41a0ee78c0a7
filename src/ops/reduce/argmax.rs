//! `argmax`: the index of the largest element along a dim.

use smallvec::smallvec;

use super::{cpu, cuda};
use crate::error::{Error, Result};
use crate::ops::{
    AxisPlacement, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Vjp, Windows, Work, arity,
};
use crate::tensor::{DType, Tensor};

/// The index (i64) of the first largest element along a dim, which is not sharded and is removed. NaN counts as
/// largest. Applied by [`DTensor::argmax`](crate::dtensor::DTensor::argmax).
///
/// ```
/// use isoshard::{ops::{Argmax, eval_whole}, tensor::Tensor};
/// let x = Tensor::from_vec(vec![1.0, 5.0, 5.0], [3])?;
/// assert_eq!(eval_whole(&Argmax { dim: 0 }, &[x])?[0].to_vec::<i64>()?, [1]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Argmax {
    /// The dim.
    pub dim: usize,
}

impl Op for Argmax {
    fn name(&self) -> &'static str {
        "argmax"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x] = arity(self.name(), ins)?;
        if x.shape.get(self.dim).is_none_or(|&n| n == 0) {
            let given = format!("dim {} of {x}", self.dim);
            return Err(Error::invalid(self.name(), "wants a dim with elements", given, ""));
        }
        let others = (0..x.shape.len()).filter(|&d| d != self.dim);
        Ok(smallvec![Meta::new(DType::I64, others.map(|d| x.shape[d]).collect::<Vec<_>>())])
    }

    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let others = (0..ins[0].shape.len()).filter(|&d| d != self.dim);
        others
            .map(|d| Row::new([AxisPlacement::S(d)], [AxisPlacement::S(d - usize::from(d > self.dim))]))
            .collect()
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        Ok(smallvec![cpu::argmax(self.name(), &ins[0], self.dim, false)?])
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        Ok(smallvec![cuda::argmax(self.name(), &ins[0], self.dim)?])
    }

    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::reduction(ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.none(0, "an index has no derivative");
        Ok(())
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Argmax { dim: 1 }, [Input::ints([5, 3])]).not_smooth(),
        Sample::new(Argmax { dim: 0 }, [Input::ints([7, 2])]).not_smooth(),
        Sample::new(Argmax { dim: 1 }, [Input::ints([2, 3, 0])]).not_smooth(),
        Sample::new(Argmax { dim: 0 }, [Input::ints([1])]).not_smooth(),
    ]
}
