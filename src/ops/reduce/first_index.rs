//! `first_index`: the first index along a dim at which an element equals a given value. With a maximum or minimum it finds
//! the extreme's place, also along a sharded dim.

use smallvec::smallvec;

use super::dims::kept_shape;
use super::{cpu, cuda};
use crate::error::{Error, Result};
use crate::ops::{
    AxisPlacement, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Vjp, Window, Windows, Work, arity,
    list,
};
use crate::tensor::{DType, ReduceOp, Tensor};

/// The first index (i64) along a dim at which `x` equals `value`, or `i64::MAX` if there is none: `x` is `[.., n, ..]`,
/// `value` and the result are `[.., 1, ..]`. A NaN equals a NaN, and zeros of both signs are equal.
///
/// A sharded dim gives a partial minimum, so ranks exchange one index per result.
/// [`DTensor::argmin`](crate::dtensor::DTensor::argmin) applies it.
///
/// ```
/// use isoshard::{ops::{FirstIndex, eval_whole}, tensor::Tensor};
/// let (x, max) = (Tensor::from_vec(vec![1.0, 5.0, 5.0], [3])?, Tensor::from_vec(vec![5.0], [1])?);
/// assert_eq!(eval_whole(&FirstIndex { dim: 0 }, &[x, max])?[0].to_vec::<i64>()?, [1]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FirstIndex {
    /// The dim.
    pub dim: usize,
}

impl Op for FirstIndex {
    fn name(&self) -> &'static str {
        "first_index"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x, value] = arity(self.name(), ins)?;
        let fits = self.dim < x.shape.len() && value.shape == kept_shape(&x.shape, &[self.dim]);
        if !fits || value.dtype != x.dtype {
            let rule = format!("wants one value for each line along dim {}", self.dim);
            return Err(Error::invalid(self.name(), rule, list(ins), ""));
        }
        Ok(smallvec![Meta { dtype: DType::I64, shape: value.shape.clone() }])
    }

    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let part = AxisPlacement::P(ReduceOp::Min);
        let mut rows: Vec<Row> = (0..ins[0].shape.len())
            .map(|d| match d == self.dim {
                true => Row::new([AxisPlacement::S(d), AxisPlacement::R], [part]),
                false => Row::same(AxisPlacement::S(d), 2),
            })
            .collect();
        if ins[0].shape.len() == 1 {
            rows.push(Row::new([AxisPlacement::Ragged, AxisPlacement::R], [part]));
        }
        rows
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        Ok(smallvec![cpu::first_index(&ins[0], &ins[1], self.dim, start(&at.ins[0], self.dim))?])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let start = start(&at.ins[0], self.dim);
        Ok(smallvec![cuda::first_index(self.name(), &ins[0], &ins[1], self.dim, start)?])
    }

    /// A comparison per element.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::elementwise(1, ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.no_gradients("an index has no derivative");
        Ok(())
    }
}

/// Returns the first global index of a shard along `dim`; any number if the shard is empty.
fn start(window: &Window, dim: usize) -> usize {
    window.region.boxes.first().map_or(0, |block| block.start[dim])
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let first = |dim, x: &[usize], value: &[usize]| {
        Sample::new(FirstIndex { dim }, [Input::ints(x), Input::ints(value)]).not_smooth()
    };
    vec![
        first(0, &[17, 3], &[1, 3]),
        first(1, &[5, 13], &[5, 1]),
        first(1, &[3, 0, 2], &[3, 1, 2]),
        Sample::new(FirstIndex { dim: 0 }, [Input::index([23], 7), Input::index([1], 7)]).not_smooth(),
    ]
}
