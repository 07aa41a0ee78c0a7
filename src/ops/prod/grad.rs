//! `prod_grad`: the derivative of `prod`.

use smallvec::smallvec;

use super::{cpu, cuda};
use crate::error::{Error, Result};
use crate::ops::reduce::dims::kept_shape;
use crate::ops::unfused::UnfusedExpression;
use crate::ops::{
    Algebra, AxisPlacement, Cat, Input, MeshAxis, Meta, Metas, Mul, Op, Pad, Permute, Row, Sample, Slice,
    Tensors, Vjp, Windows, Work, arity, list,
};
use crate::tensor::{Dims, Tensor, short_list};

/// The derivative of [`Prod`](crate::ops::Prod): takes `(dy, x)`, with `dy` of extent 1 at the dims, and returns `dy` times
/// the product of the *other* elements, for each element of `x`.
///
/// It multiplies the products from both sides, so one zero or several are no special case.
///
/// ```
/// use isoshard::{ops::{ProdGrad, eval_whole}, tensor::Tensor};
/// let (dy, x) = (Tensor::from_vec(vec![1.0], [1])?, Tensor::from_vec(vec![2.0, 0.0, 3.0], [3])?);
/// let dx = eval_whole(&ProdGrad { dims: [0].into_iter().collect() }, &[dy, x])?.remove(0);
/// assert_eq!(dx.to_f64_vec(), [0.0, 6.0, 0.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ProdGrad {
    /// The dims of the product, ascending.
    pub dims: Dims,
}

impl Op for ProdGrad {
    fn name(&self) -> &'static str {
        "prod_grad"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [dy, x] = arity(self.name(), ins)?;
        x.dtype.expect_float(self.name())?;
        if dy.dtype != x.dtype || dy.shape != kept_shape(&x.shape, &self.dims) {
            let rule = "wants a gradient for each product";
            return Err(Error::invalid(self.name(), rule, list(ins), ""));
        }
        Ok(smallvec![x.clone()])
    }

    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let kept = (0..ins[1].shape.len()).filter(|d| !self.dims.contains(d));
        let mut rows: Vec<Row> = kept.map(|d| Row::same(AxisPlacement::S(d), 2)).collect();
        rows.extend(Algebra::Linear.rows(2));
        rows
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        Ok(smallvec![cpu::prod_grad(&ins[0], &ins[1], &self.dims)?])
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        Ok(smallvec![cuda::prod_grad(&ins[0], &ins[1], &self.dims)?])
    }

    /// Per element: the products from both sides, the product of the two, and that with `dy`.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::new(crate::ops::record::work::elements(&ins[1]).saturating_mul(4), ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let x = g.input_meta(1).clone();
        self.unfused(&x)?.gradient(&[true])?.write_vjp(g, &[1, 0])
    }
}

impl ProdGrad {
    /// Returns the expression of the products, from `x`: it multiplies halves of the elements until one is left.
    fn unfused(&self, x: &Meta) -> Result<UnfusedExpression> {
        let mut e = UnfusedExpression::of(&[x]);
        let kept = (0..x.shape.len()).filter(|d| !self.dims.contains(d));
        let order: Dims = short_list(kept.clone().chain(self.dims.iter().copied()));
        let mut shape: Vec<usize> = kept.map(|d| x.shape[d]).collect();
        let mut len: usize = self.dims.iter().map(|&d| x.shape[d]).product();
        let dim = shape.len();
        shape.push(len);
        let mut y = e.wide_input(0)?;
        y = e.apply(Permute { order }, &[y])?;
        y = e.reshape(y, shape)?;
        if len == 0 {
            y = e.apply(Pad { dim, before: 0, after: 1 }, &[y])?; // a constant: there is nothing to differentiate
        }
        while len > 1 {
            let half = len / 2;
            let first = e.apply(Slice { dim, start: 0, len: half }, &[y])?;
            let second = e.apply(Slice { dim, start: half, len: half }, &[y])?;
            let mut product = e.apply(Mul, &[first, second])?;
            if len % 2 == 1 {
                let last = e.apply(Slice { dim, start: len - 1, len: 1 }, &[y])?;
                product = e.apply(Cat { dim }, &[product, last])?;
            }
            y = product;
            len = len.div_ceil(2);
        }
        let y = e.reshape(y, kept_shape(&x.shape, &self.dims))?;
        let y = e.cast(y, x.dtype)?;
        e.returns(y);
        Ok(e)
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let grad = |dims: &[usize]| ProdGrad { dims: dims.iter().copied().collect() };
    vec![
        Sample::new(grad(&[0]), [Input::ints([1, 5]), Input::ints([3, 5])]),
        Sample::new(grad(&[0, 2]), [Input::ints([1, 3, 1]), Input::ints([2, 3, 2])]),
        Sample::new(grad(&[1]), [Input::ints([3, 1]), Input::ints([3, 0])]),
    ]
}
