//! `select`: chooses each element from one of two tensors by a condition.

use super::mask::Mask;
use super::record::Pointwise;
use crate::error::{Error, Result};
use crate::ops::{Algebra, AxisPlacement, Input, Meta, Row, Sample, Vjp, Windows, list};
use crate::tensor::{DType, ReduceOp, Tensor, cpu, cuda};

/// Chooses each element by a condition: `(condition, x, y) -> x if condition else y`. Applied by
/// [`DTensor::select`](crate::dtensor::DTensor::select).
///
/// ```
/// use isoshard::{ops::{Select, eval_whole}, tensor::Tensor};
/// let condition = Tensor::from_vec(vec![true, false], [2])?;
/// let (x, y) = (Tensor::from_vec(vec![1.0, 2.0], [2])?, Tensor::from_vec(vec![10.0, 20.0], [2])?);
/// assert_eq!(eval_whole(&Select, &[condition, x, y])?[0].to_f64_vec(), [1.0, 20.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Select;

impl Pointwise for Select {
    const NAME: &'static str = "select";
    const ARITY: usize = 3;

    /// The condition must not be partial. The additional rows accept partial `x` and `y`.
    fn algebra(&self) -> Algebra {
        Algebra::Opaque
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        if ins[0].dtype != DType::Bool {
            return Err(Error::invalid(Self::NAME, "the condition is not bool", list(ins), "compare first"));
        }
        if ins[1].dtype != ins[2].dtype {
            return Err(Error::invalid(
                Self::NAME,
                "the choices' dtypes differ",
                list(ins),
                "cast one of them",
            ));
        }
        Ok(ins[1].dtype)
    }

    fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        let [condition, x, y] = ins else { unreachable!("infer has counted the operands") };
        cpu::select(Self::NAME, [condition, x, y], true)
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        cuda::map(cuda::formula!("select"), ins, &[])
    }

    fn flops(&self) -> u64 {
        1
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        g.none(0, "a condition has no derivative");
        for (i, on) in [(1, true), (2, false)] {
            if g.needs(i) {
                let (condition, dz) = (g.input(0), g.grad(0));
                let dx = g.apply(Mask { on }, &[condition, dz])?;
                g.set(i, dx);
            }
        }
        Ok(())
    }

    /// Both choices may be partial sums. If one is a partial maximum or minimum, the other may be replicated, since the
    /// maximum of equal elements is the element.
    fn more_rows(&self, _: &[Meta]) -> Vec<Row> {
        let mut rows = vec![
            Row::new([AxisPlacement::R, AxisPlacement::SUM, AxisPlacement::SUM], [AxisPlacement::SUM])
                .exact(),
        ];
        for part in [ReduceOp::Max, ReduceOp::Min].map(AxisPlacement::P) {
            rows.extend(
                [[part, part], [part, AxisPlacement::R], [AxisPlacement::R, part]]
                    .map(|[x, y]| Row::new([AxisPlacement::R, x, y], [part])),
            );
        }
        rows
    }
}

pub(super) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Select, [Input::bools([5, 3]), Input::ints([5, 3]), Input::ints([5, 3])]),
        Sample::new(Select, [Input::bools([7]), Input::index([7], 9), Input::index([7], 9)]).not_smooth(),
        Sample::new(Select, [Input::bools([]), Input::ints([]), Input::ints([])]),
        Sample::new(Select, [Input::bools([0, 3]), Input::ints([0, 3]), Input::ints([0, 3])]),
    ]
}
