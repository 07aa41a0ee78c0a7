//! `cat`: joins operands along a dim.

use smallvec::smallvec;

use crate::error::{Error, Result};
use crate::ops::{
    Algebra, AxisPlacement, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Slice, Tensors, Vjp, Windows,
    Work, list,
};
use crate::tensor::{Dims, Shape, Tensor, sort_by_key};

/// Joins operands along a dim, which is not sharded. The operands have one dtype and equal extents in all other dims.
/// Applied by [`DTensor::cat`](crate::dtensor::DTensor::cat).
///
/// ```
/// use isoshard::{ops::{Cat, eval_whole}, tensor::Tensor};
/// let (x, y) = (Tensor::from_vec(vec![1.0, 2.0], [1, 2])?, Tensor::from_vec(vec![3.0], [1, 1])?);
/// let z = eval_whole(&Cat { dim: 1 }, &[x, y])?.remove(0);
/// assert_eq!((&z.shape()[..], z.to_f64_vec()), (&[1, 3][..], vec![1.0, 2.0, 3.0]));
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Cat {
    /// The dim.
    pub dim: usize,
}

impl Op for Cat {
    fn name(&self) -> &'static str {
        "cat"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let bad = |rule: &str| {
            Err(Error::invalid(self.name(), rule, format!("dim {} of {}", self.dim, list(ins)), ""))
        };
        let Some(first) = ins.first() else { return bad("wants operands") };
        if self.dim >= first.shape.len() {
            return bad("no such dim");
        }
        let mut shape = first.shape.clone();
        shape[self.dim] = 0;
        for m in ins {
            let fits = m.shape.len() == shape.len()
                && (0..shape.len()).all(|d| d == self.dim || m.shape[d] == shape[d])
                && m.dtype == first.dtype;
            if !fits {
                return bad("the operands' dtypes or other extents differ");
            }
            // An extent that overflows stays at the maximum, which no tensor has.
            shape[self.dim] = shape[self.dim].saturating_add(m.shape[self.dim]);
        }
        Ok(smallvec![Meta { dtype: first.dtype, shape }])
    }

    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let others = (0..ins[0].shape.len()).filter(|&d| d != self.dim);
        others
            .map(|d| Row::same(AxisPlacement::S(d), ins.len()))
            .chain(Algebra::Structural.rows(ins.len()))
            .collect()
    }

    /// The result's dims lie in memory in the order of the operands', if that is one. Neighbouring operands that are all of
    /// a buffer are not copied: the result is that buffer.
    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        if let Some(whole) = Tensor::whole_of(ins, self.dim) {
            return Ok(smallvec![whole]);
        }
        let shape = at.outs[0].local();
        let order = memory_order(ins).unwrap_or_else(|| (0..shape.len()).collect());
        let stored: Shape = order.iter().map(|&d| shape[d]).collect();
        let mut out = Tensor::uninit_on(ins[0].device(), ins[0].dtype(), stored)?;
        let (mut strides, mut place) = (Dims::from_elem(0, order.len()), Dims::from_elem(0, order.len()));
        for (k, &d) in order.iter().enumerate() {
            (strides[d], place[d]) = (out.strides()[k], k);
        }
        let mut start = 0;
        for x in ins.iter() {
            x.copy_block(&mut out, x.shape(), (0, x.strides()), (start * strides[self.dim], &strides))?;
            start += x.shape()[self.dim];
        }
        Ok(smallvec![out.permute(&place)?])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        self.eval(ins, at)
    }

    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::moves(ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let lens: Vec<usize> = (0..g.ins_len()).map(|i| g.input_meta(i).shape[self.dim]).collect();
        let dy = g.grad(0);
        let mut start = 0;
        for (i, len) in lens.into_iter().enumerate() {
            if g.needs(i) {
                let dx = g.apply(Slice { dim: self.dim, start, len }, &[dy])?;
                g.set(i, dx);
            }
            start += len;
        }
        Ok(())
    }
}

/// Returns the dims from the outermost to the innermost in memory, if that is the same for all tensors and no elements of one
/// coincide.
fn memory_order(xs: &[Tensor]) -> Option<Dims> {
    let order = |x: &Tensor| -> Option<Dims> {
        // A dim of one index lies anywhere.
        let stride = |d: usize| if x.shape()[d] > 1 { x.strides()[d] } else { usize::MAX };
        let mut dims: Dims = (0..x.shape().len()).collect();
        sort_by_key(&mut dims, |&d| std::cmp::Reverse(stride(d)));
        dims.iter().all(|&d| stride(d) > 0).then_some(dims)
    };
    let first = order(xs.first()?)?;
    xs[1..].iter().all(|x| order(x).as_ref() == Some(&first)).then_some(first)
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    vec![
        Sample::new(Cat { dim: 0 }, [Input::ints([2, 3]), Input::ints([3, 3])]),
        Sample::new(Cat { dim: 1 }, [Input::ints([5, 1]), Input::ints([5, 0]), Input::ints([5, 2])]),
        Sample::new(Cat { dim: 0 }, [Input::ints([3])]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::eval_whole;

    /// Parts of a buffer are not copied if they are all of it, each once and in order.
    #[test]
    fn parts_of_a_buffer_are_joined_where_they_are() {
        let whole = Tensor::from_vec((0..30).map(|i| i as f32).collect(), [2, 3, 5]).unwrap();
        let turned = whole.permute(&[1, 2, 0]).unwrap();
        for (x, dim) in [(&whole, 0), (&whole, 1), (&whole, 2), (&turned, 0), (&turned, 1), (&turned, 2)] {
            let cat = |parts: &[Tensor]| eval_whole(&Cat { dim }, parts).unwrap().remove(0);
            let len = x.shape()[dim];
            let parts = [0..1, 1..2, 2..len].map(|r| x.narrow(dim, r.start, r.len()).unwrap());
            let joined = cat(&parts);
            assert!(joined.shares_storage(x), "dim {dim}");
            assert_eq!((joined.shape(), joined.to_f64_vec()), (x.shape(), x.to_f64_vec()), "dim {dim}");
            for parts in
                [vec![parts[1].clone(), parts[0].clone()], vec![parts[0].clone(); 2], parts[..1].to_vec()]
            {
                let copied = cat(&parts);
                let values: Vec<f64> = copied.to_f64_vec();
                assert!(!copied.shares_storage(x), "dim {dim}");
                let mut start = 0;
                for part in &parts {
                    let own = copied.narrow(dim, start, part.shape()[dim]).unwrap();
                    assert_eq!(own.to_f64_vec(), part.to_f64_vec(), "dim {dim} of {values:?}");
                    start += part.shape()[dim];
                }
            }
        }
    }

    #[test]
    fn dims_stay_in_the_order_in_which_they_lie_in_memory() {
        let of = |start: f32, len: usize| {
            let x = Tensor::from_vec((0..6 * len).map(|i| start + i as f32).collect(), [2, 3, len]).unwrap();
            x.permute(&[1, 0, 2]).unwrap()
        };
        let (x, y) = (of(0.0, 2), of(100.0, 3));
        let [packed_x, packed_y] = [&x, &y].map(|x| x.contiguous().unwrap());
        let of = |ins: &[Tensor]| eval_whole(&Cat { dim: 2 }, ins).unwrap().remove(0);
        let (turned, plain) = (of(&[x.clone(), y]), of(&[packed_x, packed_y.clone()]));
        assert_eq!((turned.shape(), turned.to_f64_vec()), (plain.shape(), plain.to_f64_vec()));
        assert_eq!((turned.strides(), plain.strides()), (&[5, 15, 1][..], &[10, 5, 1][..]));
        let mixed = of(&[x, packed_y]);
        assert_eq!((mixed.strides(), mixed.to_f64_vec()), (plain.strides(), plain.to_f64_vec()));
    }
}
