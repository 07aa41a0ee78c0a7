//! `sum` over any dims. `DTensor::mean` multiplies it by the reciprocal of the *global* number of elements.

use smallvec::smallvec;

use super::{DimReduction, kept_shape};
use crate::error::Result;
use crate::ops::{
    Expand, Input, MeshAxis, Meta, Metas, Op, Reshape, Row, Sample, Tensors, Vjp, Windows, Work, arity,
};
use crate::tensor::{Dims, ReduceOp, Tensor, cpu, cuda};

/// The sum over dims, along the reduction tree of [`cpu::reduce`]. Applied by
/// [`DTensor::sum`](crate::dtensor::DTensor::sum) and [`DTensor::mean`](crate::dtensor::DTensor::mean). A sharded
/// reduced dim gives a partial sum.
///
/// ```
/// use isoshard::{ops::{Sum, eval_whole}, tensor::Tensor};
/// let x = Tensor::from_vec(vec![1.0, 2.0, 3.0, 4.0], [2, 2])?;
/// let columns = eval_whole(&Sum { dims: [0].into_iter().collect(), keep: false }, &[x])?.remove(0);
/// assert_eq!(columns.to_f64_vec(), [4.0, 6.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Sum {
    /// The dims to sum over, ascending.
    pub dims: Dims,
    /// True if the dims stay with extent 1.
    pub keep: bool,
}

impl Sum {
    fn reduction(&self) -> DimReduction<'_> {
        DimReduction("sum", ReduceOp::Sum, &self.dims, self.keep)
    }
}

impl Op for Sum {
    fn name(&self) -> &'static str {
        "sum"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x] = arity(self.name(), ins)?;
        Ok(smallvec![Meta { dtype: x.dtype, shape: self.reduction().shape(x)? }])
    }

    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        self.reduction().rows(&ins[0])
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        self.reduction().eval(&ins[0], at, cpu::reduce)
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        self.reduction().eval(&ins[0], at, cuda::reduce)
    }

    fn keep_leading(&self, outer: usize) -> Option<Box<dyn Op>> {
        let leading = self.dims[..outer].iter().copied().eq(0..outer);
        let dims = Dims::from_slice(&self.dims[outer..]);
        leading.then(|| Box::new(Sum { dims, keep: self.keep }) as Box<dyn Op>)
    }

    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::reduction(ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let x = g.input_meta(0).shape.clone();
        let dy = g.grad(0);
        let kept = kept_shape(&x, &self.dims);
        let dy = if *g.meta(dy).shape == *kept { dy } else { g.apply(Reshape { shape: kept }, &[dy])? };
        let dx = g.apply(Expand { shape: x }, &[dy])?;
        g.set(0, dx);
        Ok(())
    }

    fn adds(&self) -> bool {
        true
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let sum = |dims: &[usize], keep| Sum { dims: dims.iter().copied().collect(), keep };
    vec![
        Sample::new(sum(&[0], false), [Input::ints([5, 3])]),
        Sample::new(sum(&[1], true), [Input::ints([7, 2, 3])]),
        Sample::new(sum(&[0, 2], false), [Input::ints([3, 1, 5])]),
        Sample::new(sum(&[0, 1], false), [Input::ints([7, 3])]),
        Sample::new(sum(&[0], false), [Input::ints([0, 3])]),
    ]
}
