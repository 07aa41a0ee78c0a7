//! `cast`: converts elements to another dtype.

use super::record::Pointwise;
use crate::error::Result;
use crate::ops::{Algebra, AxisPlacement, Input, Meta, Row, Sample, Vjp, Windows};
use crate::tensor::{DType, ReduceOp, Tensor, cpu};

/// Converts elements to another dtype, as [`cpu::cast`] does: floats round to nearest, ties to even; a float becomes an
/// integer by truncation and saturation; integers wrap; a bool is `x != 0`. Applied by
/// [`DTensor::cast`](crate::dtensor::DTensor::cast).
///
/// ```
/// use isoshard::{ops::{Cast, eval_whole}, tensor::{DType, Tensor}};
/// let x = Tensor::from_vec(vec![2.9, -1.5, 1e30], [3])?;
/// let y = eval_whole(&Cast { dtype: DType::I32 }, &[x])?.remove(0);
/// assert_eq!(y.to_vec::<i32>()?, [2, -1, i32::MAX]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cast {
    /// The result's dtype.
    pub dtype: DType,
}

impl Pointwise for Cast {
    const NAME: &'static str = "cast";
    const ARITY: usize = 1;

    /// Partial sums are reduced first, so that they are added in the dtype that the caller chose. The additional rows
    /// accept partial maxima and minima.
    fn algebra(&self) -> Algebra {
        Algebra::Opaque
    }

    fn dtype(&self, _: &[Meta]) -> Result<DType> {
        Ok(self.dtype)
    }

    fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        cpu::cast(&ins[0], self.dtype)
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        ins[0].cast(self.dtype)
    }

    /// Counts one conversion, also if the dtypes are equal.
    fn flops(&self) -> u64 {
        1
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        let from = g.input_meta(0).dtype;
        if !from.is_float() || !self.dtype.is_float() {
            g.none(0, "integers and bools have no derivative");
            return Ok(());
        }
        let dy = g.grad(0);
        let dx = g.apply(Cast { dtype: from }, &[dy])?;
        g.set(0, dx);
        Ok(())
    }

    fn more_rows(&self, ins: &[Meta]) -> Vec<Row> {
        let mut rows = Vec::new();
        if ins[0].dtype == self.dtype {
            rows.push(Row::same(AxisPlacement::SUM, 1));
        }
        if never_decreases(ins[0].dtype, self.dtype) {
            rows.extend([ReduceOp::Max, ReduceOp::Min].map(|op| Row::same(AxisPlacement::P(op), 1)));
        }
        rows
    }
}

/// Returns true if the conversion never decreases, bit for bit. Conversions to narrower floats may give zeros of both
/// signs, narrower integers wrap, and integers have no NaN.
fn never_decreases(from: DType, to: DType) -> bool {
    match from {
        _ if from == to => true,
        DType::Bool | DType::U8 => true,
        DType::I32 => to == DType::I64 || to.is_float(),
        DType::I64 => to.is_float(),
        DType::F16 | DType::BF16 => matches!(to, DType::F32 | DType::F64),
        DType::F32 => to == DType::F64,
        DType::F64 => false,
    }
}

pub(super) fn samples() -> Vec<Sample> {
    let cast = |dtype| Cast { dtype };
    vec![
        Sample::new(cast(DType::F64), [Input::ints([5, 3])]),
        Sample::new(cast(DType::BF16), [Input::ints([7])]).not_smooth(),
        Sample::new(cast(DType::I64), [Input::ints([7])]).not_smooth(),
        Sample::new(cast(DType::F32), [Input::index([7], 9)]).not_smooth(),
        Sample::new(cast(DType::F32), [Input::bools([5])]).not_smooth(),
        Sample::new(cast(DType::Bool), [Input::ints([])]).not_smooth(),
        Sample::new(cast(DType::F16), [Input::ints([0, 3])]).not_smooth(),
    ]
}
