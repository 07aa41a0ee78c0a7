//! `split`: cuts a dim into pieces of given lengths. Views.

use crate::error::{Error, Result};
use crate::ops::record::view_methods;
use crate::ops::{
    Algebra, AxisPlacement, Cat, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Vjp, VjpValue,
    Windows, arity,
};
use crate::tensor::{Dims, Tensor};

/// Cuts the operand along a dim, which is not sharded, into one view per length. Applied by
/// [`DTensor::split`](crate::dtensor::DTensor::split).
///
/// ```
/// use isoshard::{ops::{Split, eval_whole}, tensor::Tensor};
/// let x = Tensor::from_vec(vec![1.0, 2.0, 3.0], [3])?;
/// let pieces = eval_whole(&Split { dim: 0, lens: [1, 2].into_iter().collect() }, &[x])?;
/// assert_eq!((pieces[0].to_f64_vec(), pieces[1].to_f64_vec()), (vec![1.0], vec![2.0, 3.0]));
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Split {
    /// The dim.
    pub dim: usize,
    /// The pieces' lengths, whose sum is the dim's extent.
    pub lens: Dims,
}

impl Op for Split {
    fn name(&self) -> &'static str {
        "split"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x] = arity(self.name(), ins)?;
        let sum = self.lens.iter().try_fold(0usize, |sum, &len| sum.checked_add(len));
        if self.dim >= x.shape.len() || sum != Some(x.shape[self.dim]) {
            return Err(Error::invalid(
                self.name(),
                "the lengths do not add up to the dim's extent",
                format!("{:?} for dim {} of {x}", self.lens.as_slice(), self.dim),
                "",
            ));
        }
        let piece = |&len: &usize| {
            let mut shape = x.shape.clone();
            shape[self.dim] = len;
            Meta { dtype: x.dtype, shape }
        };
        Ok(self.lens.iter().map(piece).collect())
    }

    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let spread = |s: AxisPlacement| Row::new([s], self.lens.iter().map(|_| s));
        let others = (0..ins[0].shape.len()).filter(|&d| d != self.dim);
        let partial = Algebra::Structural.rows(1).into_iter().map(|r| spread(r.ins[0]).exact());
        others.map(|d| spread(AxisPlacement::S(d))).chain(partial).collect()
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let mut start = 0;
        let piece = |&len: &usize| {
            start += len;
            ins[0].narrow(self.dim, start - len, len)
        };
        self.lens.iter().map(piece).collect()
    }

    view_methods!();

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let pieces: Vec<VjpValue> = (0..self.lens.len()).map(|i| g.grad(i)).collect();
        let dx = g.apply(Cat { dim: self.dim }, &pieces)?;
        g.set(0, dx);
        Ok(())
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let split = |dim, lens: &[usize]| Split { dim, lens: lens.iter().copied().collect() };
    vec![
        Sample::new(split(0, &[2, 3]), [Input::ints([5, 3])]),
        Sample::new(split(1, &[1, 0, 2]), [Input::ints([5, 3])]),
        Sample::new(split(2, &[2, 2, 2]), [Input::ints([3, 2, 6])]),
    ]
}
