//! `topk`: the largest or smallest elements along a dim, and their indices.

use smallvec::smallvec;

use super::sort::{first_of_rows, write_order_vjp};
use super::{cuda, expect_dim, rows_but};
use crate::error::{Error, Result};
use crate::ops::record::work::elements;
use crate::ops::{Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Vjp, Windows, Work, arity};
use crate::tensor::{DType, Tensor};

/// The `k` largest or smallest elements along a dim, which is not sharded, and their indices (i64): the first `k` of
/// [`Sort`](crate::ops::Sort), descending for the largest. Applied by [`DTensor::topk`](crate::dtensor::DTensor::topk).
///
/// ```
/// use isoshard::{ops::{TopK, eval_whole}, tensor::Tensor};
/// let x = Tensor::from_vec(vec![1.0, 4.0, 2.0, 4.0], [4])?;
/// let top = eval_whole(&TopK { dim: 0, k: 3, largest: true }, &[x])?;
/// assert_eq!((top[0].to_f64_vec(), top[1].to_vec::<i64>()?), (vec![4.0, 4.0, 2.0], vec![1, 3, 2]));
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TopK {
    /// The dim.
    pub dim: usize,
    /// The number of elements.
    pub k: usize,
    /// True for the largest elements, false for the smallest.
    pub largest: bool,
}

impl Op for TopK {
    fn name(&self) -> &'static str {
        "topk"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x] = arity(self.name(), ins)?;
        if self.k > expect_dim(self.name(), x, self.dim)? {
            let given = format!("k = {} for dim {} of {x}", self.k, self.dim);
            return Err(Error::invalid(self.name(), "k is larger than the dim's extent", given, ""));
        }
        let mut shape = x.shape.clone();
        shape[self.dim] = self.k;
        Ok(smallvec![Meta { dtype: x.dtype, shape: shape.clone() }, Meta { dtype: DType::I64, shape }])
    }

    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        rows_but(&ins[0], self.dim)
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        first_of_rows(&ins[0], self.dim, self.largest, self.k)
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        cuda::first_of_rows(self.name(), &ins[0], self.dim, self.largest, self.k)
    }

    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        top_work(self.k, ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        write_order_vjp(g, self.dim)
    }
}

/// Returns the work of choosing `k` elements per row: each element is compared with the last one that is kept, and each
/// that is kept with `log2 k` others.
pub(super) fn top_work(k: usize, ins: &[Meta], outs: &[Meta]) -> Work {
    let halvings = u64::from(usize::BITS - k.saturating_sub(1).leading_zeros());
    let kept = elements(&outs[0]).saturating_mul(halvings);
    Work::new(elements(&ins[0]).saturating_add(kept), ins, outs)
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let top = |dim, k, largest| TopK { dim, k, largest };
    vec![
        Sample::new(top(1, 3, true), [Input::ints([5, 7])]).not_smooth(),
        Sample::new(top(0, 2, false), [Input::ints([7, 3])]).not_smooth(),
        Sample::new(top(1, 1, true), [Input::index([2, 5, 3], 4)]).not_smooth(),
        Sample::new(top(0, 0, true), [Input::ints([3])]).not_smooth(),
    ]
}
