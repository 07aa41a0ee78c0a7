//! `slice`: takes a range of indices of a dim. A view.

use smallvec::smallvec;

use crate::error::{Error, Result};
use crate::ops::record::view_methods;
use crate::ops::{
    Algebra, AxisPlacement, Input, MeshAxis, Meta, Metas, Op, Pad, Row, Sample, Tensors, Vjp, Windows, arity,
};
use crate::tensor::Tensor;

/// Takes the indices `start..start + len` of a dim, which is not sharded, as a view. Applied by
/// [`DTensor::slice`](crate::dtensor::DTensor::slice).
///
/// ```
/// use isoshard::{ops::{Slice, eval_whole}, tensor::Tensor};
/// let x = Tensor::from_vec(vec![1.0, 2.0, 3.0, 4.0], [4])?;
/// assert_eq!(eval_whole(&Slice { dim: 0, start: 1, len: 2 }, &[x])?[0].to_f64_vec(), [2.0, 3.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Slice {
    /// The dim.
    pub dim: usize,
    /// The first index.
    pub start: usize,
    /// The number of indices.
    pub len: usize,
}

impl Op for Slice {
    fn name(&self) -> &'static str {
        "slice"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x] = arity(self.name(), ins)?;
        let n = x.shape.get(self.dim).copied().unwrap_or(0);
        if self.dim >= x.shape.len() || self.start.checked_add(self.len).is_none_or(|end| end > n) {
            return Err(Error::invalid(
                self.name(),
                "the range leaves the tensor",
                format!("{}..{}+{} of dim {} of {x}", self.start, self.start, self.len, self.dim),
                "",
            ));
        }
        let mut shape = x.shape.clone();
        shape[self.dim] = self.len;
        Ok(smallvec![Meta { dtype: x.dtype, shape }])
    }

    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let mut rows: Vec<Row> = (0..ins[0].shape.len())
            .filter(|&d| d != self.dim)
            .map(|d| Row::same(AxisPlacement::S(d), 1))
            .collect();
        rows.extend(Algebra::Structural.rows(1));
        rows
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        Ok(smallvec![ins[0].narrow(self.dim, self.start, self.len)?])
    }

    view_methods!();

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let extent = g.input_meta(0).shape[self.dim];
        let dy = g.grad(0);
        let pad = Pad { dim: self.dim, before: self.start, after: extent - self.start - self.len };
        let dx = g.apply(pad, &[dy])?;
        g.set(0, dx);
        Ok(())
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Slice { dim: 0, start: 1, len: 3 }, [Input::ints([5, 3])]),
        Sample::new(Slice { dim: 1, start: 0, len: 0 }, [Input::ints([5, 3])]),
        Sample::new(Slice { dim: 2, start: 2, len: 1 }, [Input::ints([2, 4, 3])]),
    ]
}
