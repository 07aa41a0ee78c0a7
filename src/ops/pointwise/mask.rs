//! `mask`: sets the elements that a condition excludes to 0. The derivative of `select`.

use super::record::Pointwise;
use crate::error::{Error, Result};
use crate::ops::{Algebra, AxisPlacement, Input, Meta, Row, Sample, Vjp, Windows, list};
use crate::tensor::{DType, ReduceOp, Tensor, cpu, cuda};

/// Keeps the elements at which a condition equals `on`: `(condition, x) -> x if condition == on else 0` (false for
/// bools). The derivative of [`Select`](super::Select).
///
/// ```
/// use isoshard::{ops::{Mask, eval_whole}, tensor::Tensor};
/// let condition = Tensor::from_vec(vec![true, false], [2])?;
/// let x = Tensor::from_vec(vec![1.0, 2.0], [2])?;
/// assert_eq!(eval_whole(&Mask { on: true }, &[condition, x])?[0].to_f64_vec(), [1.0, 0.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mask {
    /// The condition's value that keeps an element.
    pub on: bool,
}

impl Pointwise for Mask {
    const NAME: &'static str = "mask";
    const ARITY: usize = 2;

    /// Linear in the second operand only; the additional rows say so.
    fn algebra(&self) -> Algebra {
        Algebra::Opaque
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        if ins[0].dtype != DType::Bool {
            return Err(Error::invalid(Self::NAME, "the condition is not bool", list(ins), "compare first"));
        }
        Ok(ins[1].dtype)
    }

    fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        let zero = Tensor::zeros(ins[1].dtype(), []).expand(ins[1].shape())?;
        let (condition, x) = ins.split_first_mut().expect("infer has counted the operands");
        cpu::select(Self::NAME, [condition, &mut x[0], &mut { zero }], self.on)
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        cuda::map(cuda::formula!("mask"), ins, &[f64::from(u8::from(self.on))])
    }

    fn flops(&self) -> u64 {
        1
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        g.none(0, "a condition has no derivative");
        if g.needs(1) {
            let (dy, condition) = (g.grad(0), g.input(0));
            let dx = g.apply(*self, &[condition, dy])?;
            g.set(1, dx);
        }
        Ok(())
    }

    /// An element is copied, or 0 on every rank. The sum, maximum and minimum of zeros is 0, so any partial `x` is
    /// accepted.
    fn more_rows(&self, _: &[Meta]) -> Vec<Row> {
        let rows = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min].map(AxisPlacement::P);
        rows.map(|part| Row::new([AxisPlacement::R, part], [part]).exact()).to_vec()
    }
}

pub(super) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Mask { on: true }, [Input::bools([5, 3]), Input::ints([5, 3])]),
        Sample::new(Mask { on: false }, [Input::bools([7]), Input::ints([7])]),
        Sample::new(Mask { on: true }, [Input::bools([7]), Input::index([7], 9)]).not_smooth(),
        Sample::new(Mask { on: true }, [Input::bools([0, 3]), Input::ints([0, 3])]),
    ]
}
