//! `one_hot`: rows that are 1 at one index and 0 elsewhere.

use smallvec::smallvec;

use super::cuda;
use crate::error::{Error, Result};
use crate::ops::index::segments::{checked_index, expect_indices};
use crate::ops::{
    AxisPlacement, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Vjp, Windows, Work, arity,
};
use crate::tensor::cpu::as_elements_mut;
use crate::tensor::{DType, Element, Shape, Tensor, for_dtype};

/// Returns rows of `classes` elements that are 1 at the index and 0 elsewhere: indices `[..]` (i64) give `[.., classes]`.
/// Applied by [`DTensor::one_hot`](crate::dtensor::DTensor::one_hot).
///
/// Each rank computes its own shard, also if the classes are sharded.
///
/// ```
/// use isoshard::{ops::{OneHot, eval_whole}, tensor::{DType, Tensor}};
/// let index = Tensor::from_vec(vec![2i64, 0], [2])?;
/// let rows = eval_whole(&OneHot { classes: 3, dtype: DType::F32 }, &[index])?.remove(0);
/// assert_eq!(rows.to_vec::<f32>()?, [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OneHot {
    /// The number of classes.
    pub classes: usize,
    /// The dtype of the result.
    pub dtype: DType,
}

impl Op for OneHot {
    fn name(&self) -> &'static str {
        "one_hot"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [index] = arity(self.name(), ins)?;
        expect_indices(self.name(), index)?;
        if self.classes == 0 {
            let rule = "there is no class to be 1";
            return Err(Error::invalid(self.name(), rule, index.to_string(), "pass the number of classes"));
        }
        let shape: Shape = index.shape.iter().copied().chain([self.classes]).collect();
        Ok(smallvec![Meta { dtype: self.dtype, shape }])
    }

    /// A replicated index may give sharded classes: every rank writes the columns that it stores.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let dims = ins[0].shape.len();
        let mut rows: Vec<Row> = (0..dims).map(|d| Row::same(AxisPlacement::S(d), 1)).collect();
        rows.push(Row::same(AxisPlacement::Ragged, 1));
        rows.push(Row::new([AxisPlacement::R], [AxisPlacement::S(dims)]));
        rows
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let (index, window) = (ins[0].contiguous()?, &at.outs[0]);
        let mut out = Tensor::zeros(self.dtype, window.local().clone());
        let held = window.local()[window.local().len() - 1];
        let start = window.region.boxes.first().map_or(0, |block| block.start[window.global.len() - 1]);
        for_dtype!(any self.dtype, T => {
            let out = as_elements_mut::<T>(out.bytes_mut());
            for (row, &i) in index.as_slice::<i64>()?.iter().enumerate() {
                let place = checked_index(self.name(), i, self.classes, window.global.len() - 1)?.wrapping_sub(start);
                if place < held {
                    out[row * held + place] = <T as Element>::from_f64(1.0);
                }
            }
        });
        Ok(smallvec![out])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let window = &at.outs[0];
        let held = window.local()[window.local().len() - 1];
        let start = window.region.boxes.first().map_or(0, |block| block.start[window.global.len() - 1]);
        Ok(smallvec![cuda::one_hot(&ins[0], self.dtype, [start, held, self.classes])?])
    }

    /// A comparison per element of the result.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::moves(ins, outs).plus(crate::ops::record::work::elements(&outs[0]))
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.no_gradients("an index has no derivative");
        Ok(())
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let one_hot = |classes, dtype| OneHot { classes, dtype };
    vec![
        Sample::new(one_hot(5, DType::F32), [Input::index([3, 7], 5)]).not_smooth(),
        Sample::new(one_hot(7, DType::Bool), [Input::index([5], 7)]).not_smooth(),
        Sample::new(one_hot(3, DType::I64), [Input::index([0, 2], 3)]).not_smooth(),
        Sample::new(one_hot(1, DType::F16), [Input::index([], 1)]).not_smooth(),
    ]
}
