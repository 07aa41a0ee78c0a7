//! `prod` over any dims, and its derivative.
//!
//! Missing: a row that shards a reduced dim, which is gathered instead.

mod cpu;
mod cuda;
mod grad;

pub use grad::ProdGrad;

use smallvec::smallvec;

use crate::error::Result;
use crate::ops::reduce::dims::{DimReduction, kept_shape};
use crate::ops::{
    AxisPlacement, Input, InputFill, MeshAxis, Meta, Metas, Op, Reshape, Row, Sample, Tensors, Vjp, Windows,
    Work, arity,
};
use crate::tensor::{DType, Dims, ReduceOp, Tensor};

/// The product over dims, which are not sharded. Applied by [`DTensor::prod`](crate::dtensor::DTensor::prod).
///
/// Elements are multiplied along the tree of one row that has the reduced dims in order. f16 and bf16 are multiplied in f32
/// and rounded once; integers and bools are multiplied in i64 and give i64. The product of no elements is 1. The derivative
/// is right at zeros: it multiplies the other elements and does not divide.
///
/// ```
/// use isoshard::{ops::{Prod, eval_whole}, tensor::Tensor};
/// let x = Tensor::from_vec(vec![1.0, 2.0, 3.0, 4.0], [2, 2])?;
/// let columns = eval_whole(&Prod { dims: [0].into_iter().collect(), keep: false }, &[x])?.remove(0);
/// assert_eq!(columns.to_f64_vec(), [3.0, 8.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Prod {
    /// The dims to multiply over, ascending.
    pub dims: Dims,
    /// True if the dims stay with extent 1.
    pub keep: bool,
}

impl Prod {
    fn dtype(x: DType) -> DType {
        if x.is_float() { x } else { DType::I64 }
    }
}

impl Op for Prod {
    fn name(&self) -> &'static str {
        "prod"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x] = arity(self.name(), ins)?;
        let (verb, kind, dims) = (self.name(), ReduceOp::Sum, self.dims.as_slice());
        let shape = DimReduction { verb, kind, dims, keep: self.keep }.shape(x)?;
        Ok(smallvec![Meta { dtype: Self::dtype(x.dtype), shape }])
    }

    /// There are no partial products, so a sharded reduced dim is gathered first.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let place = |d: usize| d - if self.keep { 0 } else { self.dims.iter().filter(|&&r| r < d).count() };
        let kept = (0..ins[0].shape.len()).filter(|d| !self.dims.contains(d));
        kept.map(|d| Row::new([AxisPlacement::S(d)], [AxisPlacement::S(place(d))])).collect()
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let products = cpu::prod(&ins[0], &self.dims, Self::dtype(ins[0].dtype()))?;
        Ok(smallvec![products.reshape(at.outs[0].local().clone())?])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let products = cuda::prod(self.name(), &ins[0], &self.dims, Self::dtype(ins[0].dtype()))?;
        Ok(smallvec![products.reshape(at.outs[0].local().clone())?])
    }

    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::reduction(ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let Meta { dtype, shape } = g.input_meta(0).clone();
        if !dtype.is_float() {
            g.none(0, "integers have no derivative");
            return Ok(());
        }
        let (x, dy, kept) = (g.input(0), g.grad(0), kept_shape(&shape, &self.dims));
        let dy = if g.meta(dy).shape == kept { dy } else { g.apply(Reshape { shape: kept }, &[dy])? };
        let dx = g.apply(ProdGrad { dims: self.dims.clone() }, &[dy, x])?;
        g.set(0, dx);
        Ok(())
    }
}

pub(super) fn samples() -> Vec<Sample> {
    let prod = |dims: &[usize], keep| Prod { dims: dims.iter().copied().collect(), keep };
    let whole = Input { meta: Meta::new(DType::I32, [5, 3]), fill: InputFill::Index(4) };
    let own = vec![
        Sample::new(prod(&[0], false), [Input::ints([3, 5])]),
        Sample::new(prod(&[0, 2], true), [Input::ints([2, 3, 2])]),
        Sample::new(prod(&[1], false), [Input::ints([3, 0])]),
        Sample::new(prod(&[0], false), [whole]).not_smooth(),
    ];
    [own, grad::samples()].concat()
}
