//! `zero_grad`: the derivative of functions that are constant in pieces.

use super::record::{Pointwise, one_dtype};
use crate::error::Result;
use crate::ops::{Algebra, AxisPlacement, Input, Meta, Row, Sample, Vjp, Windows};
use crate::tensor::{DType, ReduceOp, Tensor};

/// Returns zeros of the operand's shape. The derivative of rounding, signs and other functions that are constant in
/// pieces: a gradient of 0 reaches their operands, whatever the incoming gradient is. Applied in backward passes;
/// `DTensor` has no method for it.
///
/// ```
/// use isoshard::{ops::{ZeroGrad, eval_whole}, tensor::Tensor};
/// let dy = Tensor::from_vec(vec![1.0, f64::NAN], [2])?;
/// assert_eq!(eval_whole(&ZeroGrad, &[dy])?[0].to_f64_vec(), [0.0, 0.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ZeroGrad;

impl Pointwise for ZeroGrad {
    const NAME: &'static str = "zero_grad";
    const ARITY: usize = 1;

    /// The additional rows accept every partial operand.
    fn algebra(&self) -> Algebra {
        Algebra::Structural
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        one_dtype(Self::NAME, ins)
    }

    /// Returns a view that repeats one zero.
    fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        Tensor::zeros(ins[0].dtype(), []).expand(ins[0].shape().clone())
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        Tensor::full_on(ins[0].device(), ins[0].dtype(), [], 0.0)?.expand(ins[0].shape().clone())
    }

    fn flops(&self) -> u64 {
        0
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        g.none(0, "zeros do not depend on the operand");
        Ok(())
    }

    /// The zeros are the same on every rank, whatever the operand's contributions are.
    fn more_rows(&self, _: &[Meta]) -> Vec<Row> {
        [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min]
            .map(|op| Row::new([AxisPlacement::P(op)], [AxisPlacement::R]).exact())
            .to_vec()
    }
}

pub(super) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(ZeroGrad, [Input::ints([5, 3])]).not_smooth(),
        Sample::new(ZeroGrad, [Input::index([7], 9)]).not_smooth(),
        Sample::new(ZeroGrad, [Input::ints([0, 3])]).not_smooth(),
    ]
}
