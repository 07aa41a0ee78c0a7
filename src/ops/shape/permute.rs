//! `permute`: reorders dims. A view.

use smallvec::smallvec;

use crate::error::{Error, Result};
use crate::ops::record::view_methods;
use crate::ops::{
    Algebra, AxisPlacement, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Vjp, Windows, arity,
};
use crate::tensor::{Dims, Tensor};

/// Reorders dims, as a view: dim `d` of the result is dim `order[d]` of the operand. Applied by
/// [`DTensor::permute`](crate::dtensor::DTensor::permute) and
/// [`DTensor::transpose`](crate::dtensor::DTensor::transpose).
///
/// ```
/// use isoshard::{ops::{Permute, eval_whole}, tensor::Tensor};
/// let x = Tensor::from_vec(vec![1.0, 2.0, 3.0, 4.0], [2, 2])?;
/// assert_eq!(eval_whole(&Permute::swap(2, 0, 1), &[x])?[0].to_f64_vec(), [1.0, 3.0, 2.0, 4.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Permute {
    /// A permutation of the operand's dims.
    pub order: Dims,
}

impl Permute {
    /// Creates the permutation of `ndim` dims that swaps `a` and `b`.
    pub fn swap(ndim: usize, a: usize, b: usize) -> Permute {
        let mut order: Dims = (0..ndim).collect();
        order.swap(a, b);
        Permute { order }
    }

    fn inverse(&self) -> Permute {
        let mut order = Dims::from_elem(0, self.order.len());
        self.order.iter().enumerate().for_each(|(d, &from)| order[from] = d);
        Permute { order }
    }
}

impl Op for Permute {
    fn name(&self) -> &'static str {
        "permute"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x] = arity(self.name(), ins)?;
        let mut sorted = self.order.clone();
        sorted.sort_unstable();
        if !sorted.iter().copied().eq(0..x.shape.len()) {
            return Err(Error::invalid(
                self.name(),
                "not a permutation of the dims",
                format!("{:?} for {x}", self.order.as_slice()),
                format!("name each of 0..{} once", x.shape.len()),
            ));
        }
        Ok(smallvec![Meta { dtype: x.dtype, shape: self.order.iter().map(|&d| x.shape[d]).collect() }])
    }

    fn rows(&self, _: &[Meta], _: MeshAxis) -> Vec<Row> {
        let cut = |(to, &from): (usize, &usize)| Row::new([AxisPlacement::S(from)], [AxisPlacement::S(to)]);
        let mut rows: Vec<Row> = self.order.iter().enumerate().map(cut).collect();
        rows.extend(Algebra::Structural.rows(1));
        rows
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        Ok(smallvec![ins[0].permute(&self.order)?])
    }

    view_methods!();

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let dy = g.grad(0);
        let dx = g.apply(self.inverse(), &[dy])?;
        g.set(0, dx);
        Ok(())
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let permute = |order: &[usize]| Permute { order: order.iter().copied().collect() };
    vec![
        Sample::new(permute(&[1, 0]), [Input::ints([5, 3])]),
        Sample::new(permute(&[2, 0, 1]), [Input::ints([2, 7, 1])]),
        Sample::new(permute(&[1, 0]), [Input::ints([0, 3])]),
    ]
}
