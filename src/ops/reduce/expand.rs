//! `expand`: repeats dims of extent 1 and adds leading dims. A view; other operators broadcast with it.
//!
//! It stands beside `sum`, since each is the other's derivative.

use smallvec::smallvec;

use crate::error::{Error, Result};
use crate::ops::record::view_methods;
use crate::ops::{
    Algebra, AxisPlacement, Input, MeshAxis, Meta, Metas, Op, Reshape, Row, Sample, Sum, Tensors, Vjp,
    Windows, arity,
};
use crate::tensor::{Dims, Shape, Tensor};

/// Repeats the operand to `shape` by NumPy's broadcasting rule, as a view:
/// [`DTensor::expand`](crate::dtensor::DTensor::expand).
///
/// ```
/// use isoshard::ops::{Expand, eval_whole};
/// use isoshard::tensor::Tensor;
/// let row = Tensor::from_vec(vec![1.0, 2.0], [2])?;
/// let twice = eval_whole(&Expand { shape: [2, 2].into() }, &[row])?.remove(0);
/// assert_eq!(twice.to_f64_vec(), [1.0, 2.0, 1.0, 2.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Expand {
    /// The result's shape.
    pub shape: Shape,
}

impl Expand {
    /// Returns the result's dims along which the operand is repeated.
    fn repeated(&self, x: &Meta) -> Dims {
        let lead = self.shape.len() - x.shape.len();
        (0..self.shape.len()).filter(|&d| d < lead || x.shape[d - lead] != self.shape[d]).collect()
    }
}

impl Op for Expand {
    fn name(&self) -> &'static str {
        "expand"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x] = arity(self.name(), ins)?;
        if x.shape.broadcast(self.name(), &self.shape)? != self.shape {
            return Err(Error::invalid(
                self.name(),
                "only dims of extent 1 and new leading dims can be repeated",
                format!("{x} to {}", self.shape),
                "",
            ));
        }
        Ok(smallvec![Meta { dtype: x.dtype, shape: self.shape.clone() }])
    }

    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let repeated = self.repeated(&ins[0]);
        let lead = self.shape.len() - ins[0].shape.len();
        let mut rows: Vec<Row> = (lead..self.shape.len())
            .filter(|d| !repeated.contains(d))
            .map(|d| Row::new([AxisPlacement::S(d - lead)], [AxisPlacement::S(d)]))
            .collect();
        rows.extend(Algebra::Structural.rows(1));
        rows.extend(repeated.iter().map(|&d| Row::new([AxisPlacement::R], [AxisPlacement::S(d)])));
        rows
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        Ok(smallvec![ins[0].expand(at.outs[0].local())?])
    }

    view_methods!();

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let x = g.input_meta(0).clone();
        let dims = self.repeated(&x);
        let dy = g.grad(0);
        let added = self.shape.len() - x.shape.len();
        // If new dims alone repeat elements, their sum is the gradient as it is.
        let keep = dims.len() > added;
        let sum = if dims.is_empty() { dy } else { g.apply(Sum { dims, keep }, &[dy])? };
        let dx = if keep && added > 0 { g.apply(Reshape { shape: x.shape }, &[sum])? } else { sum };
        g.set(0, dx);
        Ok(())
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let expand = |shape: &[usize]| Expand { shape: shape.into() };
    vec![
        Sample::new(expand(&[5, 3]), [Input::ints([3])]),
        Sample::new(expand(&[2, 7, 3]), [Input::ints([7, 1])]),
        Sample::new(expand(&[4, 1]), [Input::ints([])]),
        Sample::new(expand(&[0, 3]), [Input::ints([1, 3])]),
    ]
}
