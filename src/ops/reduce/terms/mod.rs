//! `sum_deviations`, `sum_squared_deviations`, `sum_exp_differences`, `sum_powers`: sums of a function of each element and
//! of one value per sum. Variances, logarithms of sums of exponentials, and norms consist of them.

mod cpu;
pub(in crate::ops) mod sum_term;

use smallvec::smallvec;
use sum_term::SumTerm;

use super::blocks::sum_blocks;
use super::dims::{DimReduction, kept_shape};
use crate::error::{Error, Result};
use crate::ops::{
    Abs, AxisPlacement, Bits, Cast, Compare, CompareKind, Exp, Expand, Input, Mask, MeshAxis, Meta, Metas,
    Mul, MulScalar, Neg, Op, PowScalar, Row, Sample, Sign, Statistic, Sub, Sum, Tensors, Vjp, VjpValue,
    Windows, Work, accumulator, arity, list,
};
use crate::placement::Leaf;
use crate::tensor::cuda::reduce::{TermKernel, sum_to};
use crate::tensor::{Dims, ReduceOp, Shape, Tensor};

/// Sums a term over dims, which stay with extent 1. The operands are `x` and one value `w` per sum, in the dtype and shape
/// of the result: f32 (f64 for f64), or f64 for powers of any dtype.
///
/// The sums follow the reduction tree of [`Sum`]; a sharded reduced dim gives a partial sum, so ranks exchange one number
/// per sum. [`DTensor::var`](crate::dtensor::DTensor::var), [`DTensor::logsumexp`](crate::dtensor::DTensor::logsumexp) and
/// [`DTensor::norm`](crate::dtensor::DTensor::norm) apply it.
///
/// ```
/// use isoshard::ops::{SumTerm, TermSum, eval_whole};
/// use isoshard::tensor::Tensor;
/// let (x, mean) = (Tensor::from_vec(vec![1.0, 3.0], [2])?, Tensor::from_vec(vec![2.0], [1])?);
/// let squares = TermSum { term: SumTerm::SquaredDeviation, dims: [0].into_iter().collect() };
/// assert_eq!(eval_whole(&squares, &[x, mean])?[0].to_f64_vec(), [2.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TermSum {
    /// The function of each element.
    pub term: SumTerm,
    /// The dims to sum over, ascending.
    pub dims: Dims,
}

impl TermSum {
    /// Runs `sum` on this rank's shards. A shard that is ragged over several dims has fewer dims than the global tensor;
    /// the rows admit it only if all dims are reduced.
    fn on_shard(
        &self,
        ins: &[Tensor],
        at: &Windows,
        sum: impl Fn(&Tensor, &Tensor, &[usize]) -> Result<Tensor>,
    ) -> Result<Tensors> {
        let dims = ins[0].shape().len();
        if self.dims.len() == at.ins[0].global.len() {
            let (all, one): (Dims, Shape) = ((0..dims).collect(), (0..dims).map(|_| 1).collect());
            let sums = sum(&ins[0], &ins[1].reshape(one)?, &all)?;
            return Ok(smallvec![sums.reshape(at.outs[0].local().clone())?]);
        }
        Ok(smallvec![sum(&ins[0], &ins[1], &self.dims)?])
    }
}

impl Op for TermSum {
    fn name(&self) -> &'static str {
        self.term.name()
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x, with] = arity(self.name(), ins)?;
        x.dtype.expect_float(self.name())?;
        let (verb, kind, dims) = (self.name(), ReduceOp::Sum, self.dims.as_slice());
        let shape = DimReduction { verb, kind, dims, keep: true }.shape(x)?;
        if !self.term.takes(x.dtype, with.dtype) || with.shape != shape {
            let rule = format!("wants one value per sum, {}{shape}", accumulator(x.dtype));
            return Err(Error::invalid(self.name(), rule, list(ins), ""));
        }
        Ok(smallvec![with.clone()])
    }

    /// A deviation is linear in both operands together; no other term is.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let part = AxisPlacement::TreeSum(Leaf::Pairs);
        let reduced = |d: &usize| self.dims.contains(d);
        let mut rows: Vec<Row> = (0..ins[0].shape.len())
            .map(|d| match reduced(&d) {
                true => Row::new([AxisPlacement::S(d), AxisPlacement::R], [part]),
                false => Row::same(AxisPlacement::S(d), 2),
            })
            .collect();
        if self.dims.len() == ins[0].shape.len() {
            rows.push(Row::new([AxisPlacement::Ragged, AxisPlacement::R], [part]));
        }
        if self.term == SumTerm::Deviation {
            rows.push(Row::same(AxisPlacement::SUM, 2));
        }
        rows
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let terms = |x: &Tensor, with: Option<&Tensor>| cpu::terms(self.term, x, with.expect("given below"));
        self.on_shard(ins, at, |x, with, dims| {
            if let Some(sums) = cpu::sum_squares(self.term, x, with, dims)? {
                return Ok(sums);
            }
            match cpu::sum_rows(self.term, x, with, dims)? {
                Some(sums) => Ok(sums),
                None => sum_blocks(x, Some(with), dims, with.dtype(), &terms),
            }
        })
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        macro_rules! stems {
            ($name:literal) => {
                [concat!($name, "_rows"), concat!($name, "_packed_rows"), concat!($name, "_columns")]
            };
        }
        let is_narrow = ins[1].dtype() == accumulator(ins[0].dtype());
        let (stems, power) = match self.term {
            SumTerm::Deviation => (stems!("deviation"), 1.0),
            SumTerm::SquaredDeviation => (stems!("squared_deviation"), 2.0),
            SumTerm::ExpDifference => (stems!("exp_difference"), 1.0),
            SumTerm::Power(Bits(2.0)) if is_narrow => (stems!("square"), 2.0),
            SumTerm::Power(Bits(2.0)) => (stems!("wide_square"), 2.0),
            SumTerm::Power(p) if is_narrow => (["power_rows", "power_rows", "power_columns"], p.0),
            SumTerm::Power(p) => (["wide_power_rows", "wide_power_rows", "wide_power_columns"], p.0),
        };
        self.on_shard(ins, at, |x, with, dims| {
            sum_to(self.name(), x, dims, Some(TermKernel { stems, with, power }), with.dtype())
        })
    }

    /// Per element: an addition, and the term.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        let term = match self.term {
            SumTerm::Deviation => 1,
            SumTerm::SquaredDeviation => 2,
            SumTerm::ExpDifference => Work::SPECIAL + 1,
            SumTerm::Power(p) if (1.0..=8.0).contains(&p.0) && p.0.fract() == 0.0 => p.0 as u64,
            SumTerm::Power(_) => 2 * Work::SPECIAL + 2,
        };
        Work::elementwise(1 + term, ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let Meta { dtype, shape } = g.input_meta(0).clone();
        let wide = g.output_meta(0).dtype;
        let (x, with, dy) = (g.input(0), g.input(1), g.grad(0));
        let x = if dtype == wide { x } else { g.apply(Cast { dtype: wide }, &[x])? };
        let whole = |g: &mut Vjp, value: VjpValue| g.apply(Expand { shape: shape.clone() }, &[value]);
        let total =
            |g: &mut Vjp, value: VjpValue| g.apply(Sum { dims: self.dims.clone(), keep: true }, &[value]);
        // The derivative by x, and by w.
        let (dx, dw) = match self.term {
            SumTerm::Deviation | SumTerm::SquaredDeviation | SumTerm::ExpDifference => {
                let dy = whole(g, dy)?;
                let dx = match self.term {
                    SumTerm::Deviation => dy,
                    _ => {
                        let with = whole(g, with)?;
                        let d = g.apply(Sub, &[x, with])?;
                        let slope = match self.term {
                            SumTerm::ExpDifference => g.apply(Exp, &[d])?,
                            _ => g.apply(MulScalar::by(2.0), &[d])?,
                        };
                        g.apply(Mul, &[dy, slope])?
                    }
                };
                let dw = |g: &mut Vjp| {
                    let sum = total(g, dx)?;
                    g.apply(Neg, &[sum])
                };
                (dx, if g.needs(1) { Some(dw(g)?) } else { None })
            }
            SumTerm::Power(p) => {
                let scale = whole(g, with)?;
                let y = g.apply(Mul, &[x, scale])?;
                let slope = self.power_slope(g, y, p.0)?;
                // The factor w first: with dy it is the gradient of a norm, which is in range.
                let scaled = g.apply(Mul, &[dy, with])?;
                let factor = whole(g, scaled)?;
                let dx = g.apply(Mul, &[factor, slope])?;
                let dw = |g: &mut Vjp| {
                    let product = g.apply(Mul, &[slope, x])?;
                    let sum = total(g, product)?;
                    g.apply(Mul, &[dy, sum])
                };
                (dx, if g.needs(1) { Some(dw(g)?) } else { None })
            }
        };
        if g.needs(0) {
            let dx = if dtype == wide { dx } else { g.apply(Cast { dtype }, &[dx])? };
            g.set(0, dx);
        }
        if let Some(dw) = dw {
            g.set(1, dw);
        }
        Ok(())
    }

    fn statistics(&self, ins: &[Meta]) -> Vec<Statistic> {
        let max = super::max::Max { dims: self.dims.clone(), keep: true };
        let of_same_dtype = ins[0].dtype == ins[1].dtype;
        match self.term {
            SumTerm::ExpDifference if of_same_dtype => {
                vec![Statistic { operand: 1, op: std::sync::Arc::new(max), of: vec![0], result: 0 }]
            }
            _ => Vec::new(),
        }
    }
}

impl TermSum {
    /// Writes the derivative `p |y|^(p - 1) sign(y)` of `|y|^p`, and 0 if `y` is 0.
    fn power_slope(&self, g: &mut Vjp, y: VjpValue, p: f64) -> Result<VjpValue> {
        if p == 2.0 {
            return g.apply(MulScalar::by(2.0), &[y]);
        }
        let magnitude = g.apply(Abs, &[y])?;
        let power = g.apply(PowScalar::to(p - 1.0), &[magnitude])?;
        let sign = g.apply(Sign, &[y])?;
        let signed = g.apply(Mul, &[power, sign])?;
        let slope = g.apply(MulScalar::by(p), &[signed])?;
        let zero = g.apply(MulScalar::by(0.0), &[magnitude])?;
        let is_zero = g.apply(Compare { kind: CompareKind::Eq }, &[magnitude, zero])?;
        g.apply(Mask { on: false }, &[is_zero, slope])
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let sum = |term, dims: &[usize], shape: &[usize]| {
        let dims: Dims = dims.iter().copied().collect();
        let with = kept_shape(&shape.into(), &dims);
        let op = TermSum { term, dims };
        Sample::new(op, [Input::ints(shape), Input::ints(with)])
    };
    vec![
        sum(SumTerm::Deviation, &[0], &[5, 3]),
        sum(SumTerm::Deviation, &[0, 1], &[7, 2]),
        sum(SumTerm::SquaredDeviation, &[1], &[3, 7]),
        sum(SumTerm::SquaredDeviation, &[0, 1], &[5, 3]),
        sum(SumTerm::SquaredDeviation, &[1], &[0, 3]),
        sum(SumTerm::ExpDifference, &[0], &[7, 3]).rounded(7),
        sum(SumTerm::ExpDifference, &[1], &[2, 1]).rounded(1),
        sum(SumTerm::Power(Bits(2.0)), &[0], &[5, 3]),
        sum(SumTerm::Power(Bits(3.0)), &[0, 1], &[3, 5]),
        Sample::new(
            TermSum { term: SumTerm::Power(Bits(1.5)), dims: [1].into_iter().collect() },
            [Input::positive([3, 7]), Input::positive([3, 1])],
        )
        .rounded(7),
    ]
}
