//! `bincount`: the number of times that each index occurs.

use smallvec::smallvec;

use super::scatter_cuda;
use super::segments::{checked_index, expect_indices};
use crate::error::Result;
use crate::ops::{
    AxisPlacement, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Vjp, Windows, Work, arity,
};
use crate::tensor::{DType, Tensor};

/// Counts (i64 `[bins]`) how many times each of the indices `0..bins` occurs in the operand (i64 `[..]`). A sharded
/// operand gives a partial sum. Applied by [`DTensor::bincount`](crate::dtensor::DTensor::bincount).
///
/// ```
/// use isoshard::{ops::{Bincount, eval_whole}, tensor::Tensor};
/// let x = Tensor::from_vec(vec![2i64, 0, 2], [3])?;
/// assert_eq!(eval_whole(&Bincount { bins: 4 }, &[x])?[0].to_vec::<i64>()?, [1, 0, 2, 0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Bincount {
    /// The number of bins. Shapes do not depend on values, so it is given, and an index outside it is an error.
    pub bins: usize,
}

impl Op for Bincount {
    fn name(&self) -> &'static str {
        "bincount"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x] = arity(self.name(), ins)?;
        expect_indices(self.name(), x)?;
        Ok(smallvec![Meta::new(DType::I64, [self.bins])])
    }

    /// Sums of integers have the same bits in any order. If the bins are sharded, each rank counts its own.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let dims = (0..ins[0].shape.len()).map(AxisPlacement::S).chain([AxisPlacement::Ragged]);
        let parts = dims.map(|cut| Row::new([cut], [AxisPlacement::SUM]).exact());
        parts.chain([Row::new([AxisPlacement::R], [AxisPlacement::S(0)])]).collect()
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let (start, held) = (at.outs[0].start(0), at.outs[0].local()[0]);
        let mut out = Tensor::zeros(DType::I64, [held]);
        let counts = out.make_mut::<i64>()?;
        for &i in ins[0].contiguous()?.as_slice::<i64>()? {
            let place = checked_index(self.name(), i, self.bins, 0)?.wrapping_sub(start);
            if let Some(count) = counts.get_mut(place) {
                *count += 1;
            }
        }
        Ok(smallvec![out])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let (start, held) = (at.outs[0].start(0), at.outs[0].local()[0]);
        Ok(smallvec![scatter_cuda::bincount(&ins[0], self.bins, (start, held))?])
    }

    /// An addition per index.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::elementwise(1, ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.none(0, "an index has no derivative");
        Ok(())
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Bincount { bins: 5 }, [Input::index([7, 3], 5)]).not_smooth(),
        Sample::new(Bincount { bins: 7 }, [Input::index([11], 4)]).not_smooth(),
        Sample::new(Bincount { bins: 3 }, [Input::index([0], 3)]).not_smooth(),
    ]
}
