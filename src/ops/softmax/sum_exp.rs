//! `sum_exp`: the denominators of a softmax over the last dim, which may be sharded. A statistic of `cross_entropy`.

use std::sync::Arc;

use smallvec::smallvec;

use super::cuda;
use crate::error::{Error, Result};
use crate::ops::{
    AxisPlacement, Input, Max, MeshAxis, Meta, Metas, Op, Row, Sample, Statistic, Tensors, Vjp, Windows,
    Work, arity, list,
};
use crate::placement::Leaf;
use crate::tensor::cpu::{Kernel, Real, dispatch};
use crate::tensor::{DType, ReduceOp, Tensor, cpu, for_dtype};

/// `sum(exp(x - m))` over the last dim: x `[.., C]`, its maximum m `[.., 1]`, result `[.., 1]`, in f32 (f64 for f64)
/// whatever the operands.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SumExp;

impl Op for SumExp {
    fn name(&self) -> &'static str {
        "sum_exp"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x, m] = arity(self.name(), ins)?;
        x.dtype.expect_float(self.name())?;
        if x.shape.is_empty() || m.dtype != x.dtype || m.shape != statistic_shape(x) {
            let rule = "wants a maximum for each row of the last dim, kept with extent 1";
            return Err(Error::invalid(self.name(), rule, list(ins), ""));
        }
        Ok(smallvec![Meta { dtype: accumulator(x.dtype), shape: m.shape.clone() }])
    }

    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let last = ins[0].shape.len() - 1;
        let mut rows: Vec<Row> = (0..last).map(|d| Row::same(AxisPlacement::S(d), 2)).collect();
        rows.push(Row::new(
            [AxisPlacement::S(last), AxisPlacement::R],
            [AxisPlacement::TreeSum(Leaf::Pairs)],
        ));
        rows
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let x = &ins[0];
        let m = ins[1].expand(x.shape())?;
        let terms = for_dtype!(float self.name(), x.dtype(), T => {
            type A = <T as crate::tensor::Float>::Acc;
            cpu::map::<T, A>(&[x, &m], &|ins, out| dispatch(ExpDifferences { x: ins[0], m: ins[1], out }))
        })?;
        Ok(smallvec![cpu::reduce(self.name(), &terms, &[x.shape().len() - 1], ReduceOp::Sum, true)?])
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        Ok(smallvec![cuda::sum_exp(self.name(), &ins[0], &ins[1])?])
    }

    /// For each element: subtracting, exponentiating, adding.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::elementwise(Work::SPECIAL + 2, ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.none_at_all("a statistic: the gradient of cross_entropy holds its share");
        Ok(())
    }

    fn statistics(&self, ins: &[Meta]) -> Vec<Statistic> {
        vec![row_maximum(1, &ins[0])]
    }

    fn adds(&self) -> bool {
        true
    }
}

/// `exp(x - m)` of a piece.
struct ExpDifferences<'a, A> {
    x: &'a [A],
    m: &'a [A],
    out: &'a mut [A],
}

impl<A: Real> Kernel for ExpDifferences<'_, A> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        for (out, (&x, &m)) in self.out.iter_mut().zip(self.x.iter().zip(self.m)) {
            *out = (x - m).exp();
        }
    }
}

/// Says that an operand is the maximum of operand 0, which is `x`, over its last dim.
pub(in crate::ops) fn row_maximum(operand: usize, x: &Meta) -> Statistic {
    let max = Max { dims: [x.shape.len() - 1].into_iter().collect(), keep: true };
    Statistic { operand, op: Arc::new(max), of: vec![0], result: 0 }
}

/// The shape of a statistic kept over the last dim.
pub(in crate::ops) fn statistic_shape(x: &Meta) -> crate::tensor::Shape {
    crate::ops::reduce::kept_shape(&x.shape, &[x.shape.len() - 1])
}

/// The dtype that sums of `dtype` are kept in.
pub(in crate::ops) fn accumulator(dtype: DType) -> DType {
    if matches!(dtype, DType::F16 | DType::BF16) { DType::F32 } else { dtype }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(SumExp, [Input::ints([3, 7]), Input::ints([3, 1])]).rounded(7).not_smooth(),
        Sample::new(SumExp, [Input::ints([2, 1, 5]), Input::ints([2, 1, 1])]).rounded(5).not_smooth(),
        Sample::new(SumExp, [Input::ints([0, 3]), Input::ints([0, 1])]).rounded(3).not_smooth(),
    ]
}
