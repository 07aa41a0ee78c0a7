//! `sum` over any dims, in the operand's dtype or in the one that it is accumulated in.

use std::fmt;

use smallvec::smallvec;

use super::blocks::sum_blocks;
use super::dims::{DimReduction, kept_shape};
use crate::error::Result;
use crate::ops::{
    Cast, Expand, Input, InputFill, MeshAxis, Meta, Metas, Op, Reshape, Row, Sample, Tensors, Vjp, Windows,
    Work, arity,
};
use crate::tensor::{DType, Dims, ReduceOp, Shape, Tensor, cpu, cuda};

/// The sum over dims in the operand's dtype; see [`SumIn`]. Applied by [`DTensor::sum`](crate::dtensor::DTensor::sum).
///
/// ```
/// use isoshard::{ops::{Sum, eval_whole}, tensor::Tensor};
/// let x = Tensor::from_vec(vec![1.0, 2.0, 3.0, 4.0], [2, 2])?;
/// let columns = eval_whole(&Sum { dims: [0].into_iter().collect(), keep: false }, &[x])?.remove(0);
/// assert_eq!(columns.to_f64_vec(), [4.0, 6.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
pub type Sum = SumIn<false>;

/// The sum over dims whose result has the dtype that sums are accumulated in: f32 for f16 and bf16. Applied by
/// [`DTensor::mean`](crate::dtensor::DTensor::mean), which rounds after the division.
///
/// ```
/// use isoshard::{ops::{WideSum, eval_whole}, tensor::{DType, Tensor}};
/// let x = Tensor::full(DType::F16, [700], 100.0); // the largest f16 is 65504
/// let sum = eval_whole(&WideSum { dims: [0].into_iter().collect(), keep: false }, &[x])?.remove(0);
/// assert_eq!((sum.dtype(), sum.item()?), (DType::F32, 70_000.0));
/// # Ok::<(), isoshard::Error>(())
/// ```
pub type WideSum = SumIn<true>;

/// The sum over dims, along the reduction tree of [`cpu::reduce`]: [`Sum`] or [`WideSum`]. A sharded reduced dim gives a
/// partial sum.
///
/// Integers and bools are summed in i64 and give i64, as in PyTorch; the sum of bools counts.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct SumIn<const WIDE: bool> {
    /// The dims to sum over, ascending.
    pub dims: Dims,
    /// True if the dims stay with extent 1.
    pub keep: bool,
}

impl<const WIDE: bool> SumIn<WIDE> {
    fn reduction(&self) -> DimReduction<'_> {
        let verb = if WIDE { "wide_sum" } else { "sum" };
        DimReduction { verb, kind: ReduceOp::Sum, dims: &self.dims, keep: self.keep }
    }

    /// Returns the result's dtype.
    fn dtype(x: DType) -> DType {
        match x {
            DType::F16 | DType::BF16 if WIDE => DType::F32,
            DType::F16 | DType::BF16 | DType::F32 | DType::F64 => x,
            DType::I64 | DType::I32 | DType::U8 | DType::Bool => DType::I64,
        }
    }
}

impl<const WIDE: bool> Op for SumIn<WIDE> {
    fn name(&self) -> &'static str {
        self.reduction().verb
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x] = arity(self.name(), ins)?;
        Ok(smallvec![Meta { dtype: Self::dtype(x.dtype), shape: self.reduction().shape(x)? }])
    }

    /// Partial sums of narrow integers wrap, so they are reduced before they are summed in i64.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let mut rows = self.reduction().rows(&ins[0]);
        if !ins[0].dtype.is_float() && ins[0].dtype != DType::I64 {
            rows.retain(|row| !row.ins[0].is_sum());
        }
        rows
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        self.reduction().eval(&ins[0], at, |verb, x, dims, kind, keep| {
            let to = Self::dtype(x.dtype());
            if x.dtype() == to {
                return cpu::reduce(verb, x, dims, kind, keep);
            }
            if x.dtype().is_float() {
                return cpu::reduce_wide(verb, x, dims, kind, keep);
            }
            let sums = sum_blocks(x, None, dims, to, &|x, _| cpu::cast(x, to))?;
            without_dims(sums, dims, keep)
        })
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        self.reduction().eval(&ins[0], at, |verb, x, dims, kind, keep| {
            let to = Self::dtype(x.dtype());
            if x.dtype() == to {
                return cuda::reduce(verb, x, dims, kind, keep);
            }
            without_dims(cuda::reduce::sum_to(verb, x, dims, None, to)?, dims, keep)
        })
    }

    fn keep_leading(&self, outer: usize) -> Option<Box<dyn Op>> {
        let leading = self.dims[..outer].iter().copied().eq(0..outer);
        let dims = Dims::from_slice(&self.dims[outer..]);
        leading.then(|| Box::new(Self { dims, keep: self.keep }) as Box<dyn Op>)
    }

    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::reduction(ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let Meta { dtype, shape: x } = g.input_meta(0).clone();
        if !dtype.is_float() {
            g.none(0, "integers have no derivative");
            return Ok(());
        }
        let dy = g.grad(0);
        let kept = kept_shape(&x, &self.dims);
        let dy = if *g.meta(dy).shape == *kept { dy } else { g.apply(Reshape { shape: kept }, &[dy])? };
        let dy = if g.meta(dy).dtype == dtype { dy } else { g.apply(Cast { dtype }, &[dy])? };
        let dx = g.apply(Expand { shape: x }, &[dy])?;
        g.set(0, dx);
        Ok(())
    }
}

impl<const WIDE: bool> fmt::Debug for SumIn<WIDE> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = if WIDE { "WideSum" } else { "Sum" };
        f.debug_struct(name).field("dims", &self.dims).field("keep", &self.keep).finish()
    }
}

/// Removes the dims, whose extents are 1, unless they are kept.
fn without_dims(sums: Tensor, dims: &[usize], keep: bool) -> Result<Tensor> {
    if keep {
        return Ok(sums);
    }
    let kept = (0..sums.shape().len()).filter(|d| !dims.contains(d));
    let shape: Shape = kept.map(|d| sums.shape()[d]).collect();
    sums.reshape(shape)
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let sum = |dims: &[usize], keep| Sum { dims: dims.iter().copied().collect(), keep };
    let wide = |dims: &[usize]| WideSum { dims: dims.iter().copied().collect(), keep: false };
    vec![
        Sample::new(sum(&[0], false), [Input::ints([5, 3])]),
        Sample::new(sum(&[1], true), [Input::ints([7, 2, 3])]),
        Sample::new(sum(&[0, 2], false), [Input::ints([3, 1, 5])]),
        Sample::new(sum(&[0, 1], false), [Input::ints([7, 3])]),
        Sample::new(sum(&[0], false), [Input::ints([0, 3])]),
        Sample::new(sum(&[1], false), [Input::bools([5, 7])]),
        Sample::new(wide(&[0]), [Input::ints([5, 3])]),
        Sample::new(
            wide(&[0, 1]),
            [Input { meta: Meta::new(DType::I32, [7, 3]), fill: InputFill::Index(256) }],
        ),
    ]
}
